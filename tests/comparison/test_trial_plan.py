"""The trials of a recipe: one per technique, with the same model, data, seed and global batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lightning_eff.comparison.trial_plan import (
    bare_trial,
    changes_of,
    combine_trials,
    global_batch_size,
    merge_overrides,
    single_technique_trials,
)
from lightning_eff.config.composition import compose_recipe
from lightning_eff.core import catalog

LM: dict[str, Any] = {"data": {"batch_size": 16}, "trainer": {}, "callbacks": {}}


def test_every_technique_has_a_trial() -> None:
    found = single_technique_trials(LM).keys()
    callbacks = [e.name.partition("/")[2] for e in catalog.options() if e.name.startswith("callbacks/")]
    assert set(callbacks) - {"optimizer_choice", "exact_resume", "contrastive"} <= found
    assert {"baseline", "precision=bf16_mixed", "strategy=fsdp2", "optimizer=in_backward"} <= found
    assert not {"precision=fp32", "strategy=auto", "optimizer=adamw", "optimizer_choice"} & found
    assert "strategy=ddp" not in found
    assert "strategy=ddp" in single_technique_trials(LM | {"trainer": {"devices": 2}})


ACCUMULATION = {"gradient_accumulation": {"global_batch_size": 64}}
BATCHES = {"gradient_accumulation": {"global_batch_size": None, "num_batches": 3}}


@pytest.mark.parametrize(
    ("values", "size", "on_device"),
    [
        ({"data": {"batch_size": 8}, "trainer": {"accumulate_grad_batches": 3}}, 24, 24),
        ({"data": {"num_rows": 8}, "trainer": {}}, 0, None),
        ({"data": {"batch_size": 4}, "trainer": {"devices": 4}, "callbacks": ACCUMULATION}, 64, 16),
        ({"data": {"batch_size": 4}, "trainer": {"devices": 2}, "callbacks": BATCHES}, 24, 12),
    ],
)
def test_a_step_has_the_same_number_of_samples_in_every_trial(
    values: dict[str, Any], size: int, on_device: int | None
) -> None:
    assert global_batch_size(values) == size
    set_by_it = [line for line in bare_trial(values) if line.startswith("data.")]
    assert set_by_it == ([] if on_device is None else [f"data.batch_size={on_device}"])


def test_a_batch_is_cut_into_parts_that_divide_it() -> None:
    for size, part in ((16, 4), (6, 2), (10, 5), (7, 7)):
        found = single_technique_trials({"data": {"batch_size": size}, "trainer": {}})
        for name in ("gradient_accumulation", "micro_batch"):
            settings = [line.rpartition("=")[2] for line in found[name]]
            assert {word for word in settings if word.isdecimal()} == {str(size), str(part)}


def test_a_recipe_that_counts_batches_is_tried_with_the_same_samples() -> None:
    values = {"data": {"batch_size": 4}, "trainer": {}, "callbacks": BATCHES}
    found = single_technique_trials(values)["gradient_accumulation"]
    prefix = "callbacks.gradient_accumulation"
    assert found[-3:] == ["data.batch_size=3", f"{prefix}.num_batches=null", f"{prefix}.global_batch_size=12"]


def test_trials_that_helped_are_combined_best_first_without_conflicts() -> None:
    bf16, fp16 = (bare_trial(LM, f"precision={name}_mixed") for name in ("bf16", "fp16"))
    one = [*bare_trial(LM, "callbacks=[a]"), "callbacks.a.x=1"]
    other = merge_overrides(bare_trial(LM, "callbacks=[b]"), ["data.batch_size=4"])
    rejected = bare_trial(LM, "callbacks=[c]")
    both = combine_trials([bf16, one, fp16, rejected, other], lambda trial: "c]" not in trial[0])
    assert both == [
        "callbacks=[exact_resume,a,b]", "precision=bf16_mixed", "strategy=auto",
        "data.batch_size=4", "callbacks.a.x=1",
    ]  # fmt: skip
    assert combine_trials([bf16], lambda _: True) is None, "that is a row already"


@functools.cache
def values_of(recipe: str) -> dict[str, Any]:
    return compose_recipe(recipe, []).values


def changes(recipe: str, *facts: str) -> list[str]:
    return [" ".join(each) for each in changes_of(values_of(recipe), facts)]


def test_changes_keep_the_training_and_its_global_batch() -> None:
    lm = changes("lm")
    assert {"data.batch_size=8", "data.batch_size=4"} < set(lm)
    assert "data.batch_size=16" not in lm, "it has that"
    assert not any("micro_batch" in word or "gradient_accumulation" in word for word in lm)
    assert {"~callbacks.tiled_loss", "+callbacks=torch_compile"} < set(lm)
    assert "precision=auto" not in lm, "it has that"
    assert not any(word in " ".join(lm) for word in ("peft", "bf16", "optimizer", "empty_cache", "offload"))
    images = changes("images")
    assert not any(word.startswith("data.batch_size") for word in images), "there the batch is the loader's"
    assert sum("micro_batch_size=" in word for word in images) == 2
    assert set(images) - set(changes("images", "run/batch_norm")) == {
        word for word in images if "micro_batch" in word
    }

    low = {*changes("low_memory")}
    assert {"~callbacks.gradient_checkpointing", "callbacks.gradient_checkpointing.policy=selective"} < low
    assert "+callbacks=gradient_checkpointing" not in low, "it is on"


def test_a_technique_that_is_worth_it_in_some_runs_is_tried_in_those() -> None:
    assert "+callbacks=tiled_conv" not in changes("images")
    assert "+callbacks=tiled_conv" in changes("images", "peak/convolution")
    offload = "+callbacks=gradient_checkpointing callbacks.gradient_checkpointing.policy=offload"
    assert offload not in changes("lm")
    assert offload in changes("lm", "run/cuda")
