"""Advice: how much each candidate saves at this peak, and which candidates are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_eff.config import composition
from lightning_eff.core import catalog
from lightning_eff.core.errors import ConflictError
from lightning_eff.planner import advice
from lightning_eff.planner.advice import AdvisedRecipe, Options, advise, candidates
from lightning_eff.planner.forecast import DeviceMemory, ExampleBatch
from lightning_eff.prediction.predict import Prediction

ADAPTERS: Options = ("+callbacks=peft_adapter",)
SMALL = ["trainer.accelerator=cpu", "model.num_layers=2", "model.d_model=32"]
ONE_TOKEN = ["data.batch_size=1", "data.context_length=2"]


def known(memory_bytes: int, *, operation: str = "mm", **peaks: int) -> AdvisedRecipe:
    """Return a recipe of 16 samples with a peak of 1000 bytes; `peaks` has the saving of each candidate."""
    saved = {name.replace("__", "="): size for name, size in peaks.items()}

    def forecast(options: tuple[str, ...]) -> Any:
        size, flops = 1000, 100
        for word in options:
            if word == "optimizer=adamw_8bit_bnb":
                raise ConflictError("a conflict")
            name, _, value = word.rpartition("=")
            if name.endswith("micro_batch_size"):
                size -= saved.get("micro_batch", 0) * (16 - int(value))
            size -= saved.get(word, 0)
            flops += 33 * (word == "+callbacks=gradient_checkpointing")
        prediction = Prediction(flops=flops)
        peak = SimpleNamespace(phase="step", holders=[SimpleNamespace(operation=operation)])
        return SimpleNamespace(num_bytes=size, peak=peak, prediction=prediction)

    values: Any = {"data": {"batch_size": 16}, "callbacks": {}}
    example = ExampleBatch(values, None, None, 16)
    recipe = AdvisedRecipe(lambda _: values, values, DeviceMemory("here", memory_bytes), example)
    object.__setattr__(recipe, "forecast", forecast)
    return recipe


CHECKPOINTING = {"+callbacks__gradient_checkpointing": 300}
HALF = {"precision__bf16_true": 200}
LAST = {"+callbacks__peft_adapter": 500}


def test_each_candidate_occurs_once_and_names_an_option() -> None:
    words = [each.words for each in candidates()]
    assert len(set(words)) == len(words)
    assert {("+callbacks=tiled_loss",), ("precision=bf16_mixed",), ADAPTERS} <= {*words}
    assert {switch for switch, *_ in words} <= {entry.use for entry in catalog.options()}


def test_for_a_batch_that_fits_each_candidate_is_shown_alone() -> None:
    found = advise(known(6000, **CHECKPOINTING))
    assert (found.fits, found.chosen) == (True, [])
    first = found.alone[0]
    assert (first.saved_bytes, first.flops_ratio, first.why) == (300, 1.33, "new peak: step")
    why = {each.words[0]: each.why for each in found.alone}
    assert "a conflict" in why["optimizer=adamw_8bit_bnb"]
    assert why["precision=bf16_mixed"] == "computes in 16 bits; saves nothing here"
    assert advise(known(2000), budget_s=0.0).unfinished


def test_a_technique_that_is_on_is_not_tried_again() -> None:
    recipe = known(6000, **CHECKPOINTING)
    tiled: Options = ("+callbacks=tiled_loss",)
    assert tiled in {each.words for each in advise(recipe).alone}
    recipe.values["callbacks"]["tiled_loss"] = {}
    assert tiled not in {each.words for each in advise(recipe).alone}


def test_tiled_convolutions_are_tried_if_a_convolution_is_at_the_peak() -> None:
    tiled: Options = ("+callbacks=tiled_conv",)
    for operation in ("convolution", "mm"):
        tried = {each.words for each in advise(known(6000, operation=operation)).alone}
        assert (tiled in tried) == (operation == "convolution")


def test_smaller_micro_batches_come_first_as_far_as_they_help() -> None:
    found = advise(known(750, micro_batch=50, **CHECKPOINTING))
    assert found.overrides == ("+callbacks=micro_batch", "callbacks.micro_batch.micro_batch_size=8")
    assert found.peak_bytes == 600
    smaller = advise(known(2000, micro_batch=50), usable_bytes=500, shows_alone=False)
    assert (smaller.alone, smaller.overrides[1][-2:]) == ([], "=4")


def test_the_best_candidates_are_added_until_it_fits_and_adapters_are_never_chosen() -> None:
    found = advise(known(550, **CHECKPOINTING, **HALF, **LAST))
    assert found.alone[0].words == ADAPTERS
    assert "fewer weights" in found.alone[0].why
    assert [(each.words[0], each.peak_bytes) for each in found.chosen] == [
        ("+callbacks=gradient_checkpointing", 700),
        ("precision=bf16_true", 500),
    ]
    assert found.overrides == ("+callbacks=gradient_checkpointing", "precision=bf16_true")
    too_little = advise(known(100, **CHECKPOINTING, **HALF))
    assert (len(too_little.chosen), too_little.overrides) == (2, ())


@pytest.mark.slow
def test_checkpointing_saves_nothing_if_the_peak_is_in_the_optimizer_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a batch of one token there is nothing to recompute; the optimizer's state decides."""
    tried = (
        ("+callbacks=gradient_checkpointing",),
        ADAPTERS,
        ("optimizer=in_backward", "trainer.gradient_clip_val=null"),
    )
    few = [each for each in candidates() if each.words in tried]
    monkeypatch.setattr(advice, "candidates", lambda: few)
    monkeypatch.chdir(tmp_path)

    def compose(more: Sequence[str]) -> Mapping[str, Any]:
        return composition.compose_recipe("baseline", [*SMALL, *ONE_TOKEN, *more]).values

    recipe = AdvisedRecipe.of(compose, compose(()), DeviceMemory("here", 2**40))
    found = {each.words: each for each in advise(recipe, budget_s=900.0).alone}
    assert found[tried[0]].why == "saves nothing here"
    assert found[tried[1]].why.startswith("trains fewer weights")
    assert found[tried[2]].saved_bytes is not None
    assert found[tried[2]].saved_bytes > 0
