"""Advice: what saves memory at this peak and what does not, and how large a batch fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.config import composition
from lightning_eff.config.recipes import RecipePath
from lightning_eff.kernels.devices import this_cpu
from lightning_eff.planner.advice import Advice
from lightning_eff.planner.advice import advise as advise_on
from lightning_eff.planner.advised_recipe import AdvisedRecipe
from lightning_eff.planner.device_memory import DeviceMemory
from lightning_eff.planner.dry_run import ExampleBatch, dry_run

FIXED = replace(this_cpu(), peak_tflops={"float32": 0.14}, memory_gbs=12.5)
"""A CPU whose rates do not depend on the machine."""
SMALL = ["trainer.accelerator=cpu", "model.num_layers=2", "model.d_model=32", "data.context_length=32"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def advise(compose: Any, memory: DeviceMemory, **options: float) -> Advice:
    recipe = AdvisedRecipe.of(compose, memory)
    assert recipe is not None
    return advise_on(recipe, **options)


def composer(*words: str) -> Any:
    def compose(more: Sequence[str]) -> Mapping[str, Any]:
        return composition.compose_recipe("baseline", [*SMALL, *words, *more], RecipePath.of([])).values

    return compose


@pytest.mark.slow
def test_nothing_is_chosen_if_it_fits_and_the_largest_batch_is_exact() -> None:
    compose = composer("data.batch_size=4")
    taken = dry_run(compose([])).peak
    assert taken is not None
    memory = DeviceMemory("here", 5 * taken.num_bytes)
    found = advise(compose, memory)
    assert found.fits
    assert found.chosen == []
    assert "the batch fits: techniques that save memory only pay off with a larger batch" in str(found)
    size = next(each.value for each in found.largest if each.typed == "data.batch_size")

    def peak(rows: int) -> int:
        values = composer(f"data.batch_size={rows}")([])
        prediction = dry_run(values, ExampleBatch.of(values)).peak
        assert prediction is not None
        return prediction.num_bytes

    assert peak(size) <= memory.memory_bytes < peak(size + 1)

    (length,) = (each.value for each in found.largest if each.typed == "data.context_length")

    def peak_of(tokens: int) -> int:
        values = composer("data.batch_size=4", f"data.context_length={tokens}")([])
        prediction = dry_run(values, ExampleBatch.of(values)).peak
        assert prediction is not None
        return prediction.num_bytes

    assert peak_of(length) <= memory.memory_bytes < peak_of(length + 16)
    assert f"data.context_length={length}" in str(found)


@pytest.mark.slow
def test_the_best_candidate_comes_first_until_it_fits() -> None:
    compose = composer("data.batch_size=16")
    taken = dry_run(compose([])).peak
    assert taken is not None
    found = advise(compose, DeviceMemory("here", taken.num_bytes // 2, device=FIXED))
    assert not found.fits
    alone = [each.saved_bytes or 0 for each in found.first]
    assert alone == sorted(alone, reverse=True)
    assert found.chosen[0] == next(each for each in found.first if "adapter" not in each.words[0])
    checkpointing = next(each for each in found.first if each.words == ("+callbacks=gradient_checkpointing",))
    assert checkpointing.time_ratio is not None
    assert 1.1 < checkpointing.time_ratio < 1.4, "one more forward pass of the blocks is a third of a step"
    assert found.chosen[-1].peak_bytes is not None
    assert found.chosen[-1].peak_bytes <= taken.num_bytes // 2
    assert found.largest[0].value < 16


def test_checkpointing_saves_nothing_if_the_peak_is_in_the_update() -> None:
    """With a batch of one token there is nothing to recompute, and the optimizer's state is what counts."""
    found = advise(
        composer("data.batch_size=1", "data.context_length=2"),
        DeviceMemory("here", 2**40),
        budget_s=900.0,
    )
    why = {each.words: each.why for each in found.first}
    assert why[("+callbacks=gradient_checkpointing",)] == "saves nothing here"
    assert "fewer weights" in why[("+callbacks=peft_adapter",)]
    best = next(each for each in found.first if "adapter" not in each.words[0])
    assert best.words[0] in {"optimizer=in_backward", "precision=bf16_true", "optimizer=adamw_8bit_bnb"}


def test_time_is_bounded() -> None:
    found = advise(composer("data.batch_size=1"), DeviceMemory("here", 2**40), budget_s=0.0)
    assert found.unfinished
    assert found.first == []
    assert "time ran out" in str(found)
