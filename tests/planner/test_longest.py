"""The longest sequence fits and a granule more does not, with and without host memory; expected seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.config import composition
from lightning_eff.config.recipes import RecipePath
from lightning_eff.kernels import devices
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.dry_run import ExampleBatch, dry_run
from lightning_eff.planner.longest import (
    MAX_RUNS,
    MAX_TOKENS,
    ON_DEVICE,
    WITH_HOST,
    LongestSequence,
    longest_sequences,
    search,
)
from lightning_eff.planner.prediction import Prediction
from lightning_eff.report.peak import Peak
from lightning_eff.report.recording import CATEGORIES

MEMORY = DeviceMemory("small", 0, is_cuda=True)
SMALL = ["trainer.accelerator=cpu", "model.num_layers=2", "model.d_model=32", "data.batch_size=2"]


def forecast_of(num_bytes: int | None, **fields: Any) -> MemoryForecast:
    if num_bytes is None:
        return MemoryForecast(Prediction(reason="ValueError: too long"), MEMORY)
    sizes = dict.fromkeys(CATEGORIES, 0) | {"activations": num_bytes}
    peak = Peak(num_bytes, "forward", "mm", "", sizes, {}, 0, [], [])
    return MemoryForecast(Prediction(in_blocks=peak, **fields), MEMORY)


CURVES: dict[str, Callable[[int], int | None]] = {
    "a line": lambda n: 5_000_000 + 800 * n,
    "two lines, as the peak moves to another phase": lambda n: max(40_000_000 + 10 * n, 1500 * n),
    "a quadratic mask": lambda n: 1_000_000 + 700 * n + n * n // 4096,
    "a model of 3,000 positions": lambda n: 100 * n if n <= 3000 else None,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("start", [64, 1500, 500_000])
def test_the_length_found_fits_and_a_granule_more_does_not(name: str, start: int) -> None:
    curve, free_bytes, granule = CURVES[name], 100_000_000, 1000
    tried = search(lambda n: forecast_of(curve(n)), start, free_bytes, granule=granule, max_runs=20)
    found = LongestSequence.of("", [], tried, free_bytes)

    def fits(n: int) -> bool:
        num_bytes = curve(n)
        return num_bytes is not None and num_bytes <= free_bytes

    assert found.num_tokens == max(n for n in range(granule, MAX_TOKENS + 1, granule) if fits(n))
    assert found.too_long == found.num_tokens + granule
    if name == "a line":
        assert len(tried) <= 4


def test_a_search_ends() -> None:
    nothing = search(lambda _: forecast_of(10), 1024, 5)
    assert list(nothing) == [1024]
    found = LongestSequence.of(ON_DEVICE, [], nothing, 5)
    assert (found.num_tokens, found.too_long) == (0, 1024)
    everything = search(forecast_of, 1024, 10**9)
    assert max(everything) == MAX_TOKENS
    assert LongestSequence.of("", [], everything, 10**9).too_long is None
    assert len(search(lambda n: forecast_of(n**3), 1024, 10**15)) <= MAX_RUNS


def test_expected_seconds_are_flops_at_a_fraction_of_the_peak() -> None:
    forecast = forecast_of(1, flops=10 * 989 * 10**12, masked_flops=2 * 989 * 10**12)
    found = LongestSequence.of("", [], {1024: forecast}, 1)
    assert found.step_s(devices.named("h200"), torch.bfloat16) == pytest.approx(8 / 0.4)
    assert found.step_s(devices.named("cpu"), torch.bfloat16) is None, "its peak is not known"


def test_rows_of_another_length_keep_batch_and_other_axes() -> None:
    batch = {"ids": torch.arange(6).view(2, 3), "mask": torch.ones(2, 1, 3, 3), "weight": torch.ones(2)}
    longer = ExampleBatch(None, batch, None, None).with_length(5).batch  # pyright: ignore[reportArgumentType]
    assert longer["ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert longer["mask"].shape == (2, 1, 5, 5)
    assert longer["weight"].shape == (2,)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
def test_recipes_are_searched_with_and_without_host_memory(empty_folder: Path) -> None:
    """What is found is confirmed by predictions with batches that the data make."""

    def compose(words: Sequence[str]) -> dict[str, Any]:
        return composition.compose_recipe("baseline", [*SMALL, *words], RecipePath.of([])).values

    memory = DeviceMemory("small", 552 * 2**20, is_cuda=True)
    granule = 32
    found = longest_sequences(compose, memory, devices.named("h200"), torch.bfloat16, granule=granule)
    assert found.reason == ""
    assert [each.where for each in found.found] == [ON_DEVICE, WITH_HOST]
    assert found.found[1].num_tokens > found.found[0].num_tokens
    assert found.num_rows == 2
    kept, offloaded = found.found
    for length in (kept.num_tokens, kept.num_tokens + granule):
        forecast = MemoryForecast(dry_run(compose([f"data.context_length={length}"]), is_cuda=True), memory)
        assert forecast.num_bytes is not None
        assert (forecast.num_bytes <= memory.free_bytes) == (length == kept.num_tokens)
        assert length != kept.num_tokens or forecast.num_bytes == kept.forecast.num_bytes
    # The inputs of two blocks, in float32, are packed in the forward pass.
    assert offloaded.forecast.prediction.host_bytes == 2 * 2 * offloaded.num_tokens * 32 * 4
    assert "with host memory" in str(found)
    assert "expected, not measured: time of a batch of 2 at 40% of the 989 TFLOP/s" in str(found)


def test_data_without_a_length_have_no_longest_sequence(empty_folder: Path) -> None:
    values = composition.compose_recipe("images", ["trainer.accelerator=cpu"], RecipePath.of([])).values
    found = longest_sequences(lambda _: values, MEMORY, devices.named("h200"), torch.bfloat16)
    assert str(found).startswith("no longest sequence: the recipe's data has no length to vary")
