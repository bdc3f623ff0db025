"""Which trials there are, and what makes each of the recipe: the same model, data, seed and global batch."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.comparison import trial_plan
from lightning_eff.comparison.trial_plan import BARE, PlannedTrial, StepSize
from lightning_eff.config import composition
from lightning_eff.core import catalog
from lightning_eff.core.errors import UsageError

LM = {"data": {"batch_size": 16}, "trainer": {}, "callbacks": {}}


def named(found: list[PlannedTrial]) -> dict[str, PlannedTrial]:
    return {each.name: each for each in found}


def test_every_technique_has_a_row_without_a_list_of_them() -> None:
    found = named(trial_plan.single_technique_trials(LM, optimizers=False))
    callbacks = [e.name.partition("/")[2] for e in catalog.options() if e.name.startswith("callbacks/")]
    assert set(callbacks) - {"optimizer_choice"} <= found.keys()
    assert {"baseline", "precision=bf16_mixed", "strategy=fsdp2", "optimizer=in_backward"} <= found.keys()
    assert not {"precision=fp32", "strategy=auto", "optimizer=adamw", "optimizer_choice"} & found.keys()
    more = named(trial_plan.single_technique_trials(LM, optimizers=True))
    assert {"optimizer=lion", "optimizer=adamw_8bit_bnb"} <= more.keys() - found.keys()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LM, StepSize(16, 16)),
        ({"data": {"batch_size": 8}, "trainer": {"devices": 2}}, StepSize(16, 8)),
        ({"data": {"batch_size": 8}, "trainer": {"accumulate_grad_batches": 3}}, StepSize(24, 24)),
        ({"data": {"num_rows": 8}, "trainer": {}}, StepSize(None, None)),
        (
            {
                "data": {"batch_size": 4},
                "trainer": {"devices": 2, "num_nodes": 2},
                "callbacks": {"gradient_accumulation": {"global_batch_size": 64}},
            },
            StepSize(64, 16),
        ),
    ],
)
def test_a_step_has_as_many_samples_in_every_row(values: dict[str, Any], expected: StepSize) -> None:
    assert StepSize.of(values) == expected


@pytest.mark.parametrize("name", ["baseline", "gradient_accumulation", "micro_batch", "precision=bf16_mixed"])
def test_a_row_composes_with_the_global_batch_of_the_recipe(name: str) -> None:
    recipe = composition.compose_recipe("low_memory", []).values
    trial = named(trial_plan.single_technique_trials(recipe, optimizers=False))[name]
    composed = composition.compose_recipe("low_memory", trial.overrides()).values
    assert StepSize.of(composed).num_samples == StepSize.of(recipe).num_samples == 16
    listed = set(composed.get("callbacks") or {})
    assert listed == ({name} if "=" not in name and name != "baseline" else set())
    same = ("model", "seed", "optimizer", "scheduler")
    assert [composed[key] for key in same] == [recipe[key] for key in same]


def test_a_batch_is_cut_into_parts_that_divide_it() -> None:
    for size, part in ((16, 4), (6, 2), (10, 5), (7, 7), (1, 1)):
        values = {"data": {"batch_size": size}, "trainer": {}}
        found = named(trial_plan.single_technique_trials(values, optimizers=False))
        assert found["gradient_accumulation"].settings == (
            f"data.batch_size={part}",
            f"callbacks.gradient_accumulation.global_batch_size={size}",
        )


def test_a_row_of_ones_own_is_on_top_of_the_baseline() -> None:
    line = (
        "optimizer=muon +callbacks=micro_batch callbacks.micro_batch.micro_batch_size=2 precision=bf16_mixed"
    )
    trial = trial_plan.user_trial(line, LM)
    assert trial.name == line
    assert trial.overrides() == [
        "callbacks=[micro_batch]", "precision=bf16_mixed", "strategy=auto", "optimizer=muon",
        "data.batch_size=16", "callbacks.micro_batch.micro_batch_size=2",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="not an override"):
        trial_plan.user_trial("muon", LM)


def choice(group: str, option: str) -> PlannedTrial:
    return PlannedTrial(f"{group}={option}", (), tuple({**BARE, group: option}.items()))


def test_what_helped_is_combined_the_best_first_as_far_as_it_fits() -> None:
    bf16, fp16 = choice("precision", "bf16_mixed"), choice("precision", "fp16_mixed")
    recompute, compiled = (
        PlannedTrial("a", ("a",), tuple(BARE.items())),
        PlannedTrial("b", ("b",), tuple(BARE.items())),
    )
    both = trial_plan.combine_trials(
        [bf16, recompute, fp16, compiled], lambda trial: "b" not in (trial.callbacks or ())
    )
    assert both is not None
    assert both.overrides() == ["callbacks=[a]", "precision=bf16_mixed", "strategy=auto"]
    assert trial_plan.combine_trials([bf16], lambda _: True) is None, "that is a row already"
    assert trial_plan.combine_trials([], lambda _: True) is None


def test_settings_of_both_are_kept_and_the_later_one_wins() -> None:
    one = PlannedTrial("a", ("a",), tuple(BARE.items()), ("data.batch_size=16",))
    other = PlannedTrial("b", ("b",), tuple(BARE.items()), ("data.batch_size=4", "callbacks.b.x=1"))
    both = trial_plan.combine_trials([one, other], lambda _: True)
    assert both is not None
    assert both.settings == ("data.batch_size=4", "callbacks.b.x=1")
