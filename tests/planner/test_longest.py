"""The longest sequence fits and a granule more does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lightning_eff.core.errors import ConfigError
from lightning_eff.planner import longest
from lightning_eff.planner.advice import AdvisedRecipe
from lightning_eff.planner.forecast import (
    CONTEXT_BYTES,
    DeviceMemory,
    ExampleBatch,
    MemoryForecast,
)
from lightning_eff.planner.longest import MAX_TOKENS, longest_sequence
from lightning_eff.prediction.predict import Prediction
from lightning_eff.report.peak import Peak

MEMORY = DeviceMemory("small", 100_000_000 + CONTEXT_BYTES, is_cuda=True)
BATCH: Any = ExampleBatch(None, torch.zeros(2, 8, dtype=torch.int64), None, None)  # pyright: ignore[reportArgumentType]

CURVES: dict[str, Callable[[int], int | None]] = {
    "a line": lambda n: 5_000_000 + 800 * n,
    "two lines, as the peak moves to another phase": lambda n: max(40_000_000 + 10 * n, 1500 * n),
    "a model of 3,000 positions": lambda n: 100 * n if n <= 3000 else None,
    "none fits": lambda _: 10**9,
    "all fit": lambda _: 1,
}


@pytest.mark.parametrize("start", [8, 500_000])
@pytest.mark.parametrize("name", CURVES)
def test_the_length_found_fits_and_a_granule_more_does_not(
    name: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that cannot be composed counts as too long."""
    curve, granule, tried = CURVES[name], 1000, list[int]()

    def compose(words: Sequence[str]) -> dict[str, Any]:
        length = int(words[0].partition("=")[2]) if words else start
        if words and curve(length) is None:
            raise ConfigError("data.context_length", length, allowed="fewer")
        return {"data": {"context_length": length}}

    def predicted(values: dict[str, Any], memory: DeviceMemory, example: ExampleBatch) -> MemoryForecast:
        length = values["data"]["context_length"]
        assert example.batch.shape == (2, length)
        tried.append(length)
        peak = Peak(curve(length) or 0, "forward", "mm", "", {}, {}, 0, [], [])
        return MemoryForecast(Prediction(in_blocks=peak), memory)

    monkeypatch.setattr(longest, "forecast", predicted)
    found = longest_sequence(AdvisedRecipe(compose, compose(()), MEMORY, BATCH), granule=granule)
    lengths = range(granule, MAX_TOKENS + 1, granule)
    fitting = [n for n in lengths if (size := curve(n)) is not None and size <= 100_000_000]
    assert found.num_tokens == max(fitting, default=0)
    above = found.num_tokens + granule
    assert found.too_long == (above if above in lengths else None)
    assert bool(found.reason) == (name == "none fits")
    assert found.peak_bytes == (curve(found.num_tokens) if fitting else None)
    assert len(tried) == len(set(tried)) <= (4 if name == "a line" else 16)


def test_rows_of_another_length_keep_batch_and_other_axes() -> None:
    batch = {"ids": torch.arange(6).view(2, 3), "mask": torch.ones(2, 1, 3, 3), "weight": torch.ones(2)}
    longer = ExampleBatch(None, batch, None, None).with_length(5).batch  # pyright: ignore[reportArgumentType]
    assert longer["ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert longer["mask"].shape == (2, 1, 5, 5)
    assert longer["weight"].shape == (2,)


def test_data_without_a_length_have_no_longest_sequence() -> None:
    values = {"data": {"batch_size": 64}}
    found = longest_sequence(AdvisedRecipe(lambda _: values, values, MEMORY, BATCH))
    assert (found.num_tokens, "no length to vary" in found.reason) == (0, True)
