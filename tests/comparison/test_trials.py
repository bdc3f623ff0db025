"""Which trials there are, and what makes each of the recipe: the same model, data, seed and global batch."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.comparison import trials
from lightning_eff.comparison.trials import BARE, Batch, Trial
from lightning_eff.config import composition
from lightning_eff.core import catalog
from lightning_eff.core.errors import UsageError

LM = {"data": {"batch_size": 16}, "trainer": {}, "callbacks": {}}


def named(found: list[Trial]) -> dict[str, Trial]:
    return {each.name: each for each in found}


def test_every_technique_has_a_row_without_a_list_of_them() -> None:
    found = named(trials.alone(LM, optimizers=False))
    callbacks = [e.name.partition("/")[2] for e in catalog.options() if e.name.startswith("callbacks/")]
    assert set(callbacks) - {"optimizer_choice"} <= found.keys()
    assert {"baseline", "precision=bf16_mixed", "strategy=fsdp2", "optimizer=in_backward"} <= found.keys()
    assert not {"precision=fp32", "strategy=auto", "optimizer=adamw", "optimizer_choice"} & found.keys()
    more = named(trials.alone(LM, optimizers=True))
    assert {"optimizer=lion", "optimizer=adamw_8bit_bnb"} <= more.keys() - found.keys()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LM, Batch(16, 16)),
        ({"data": {"batch_size": 8}, "trainer": {"devices": 2}}, Batch(16, 8)),
        ({"data": {"batch_size": 8}, "trainer": {"accumulate_grad_batches": 3}}, Batch(24, 24)),
        ({"data": {"batch_size": 8}, "trainer": {}}, Batch(None, None)),
        (
            {
                "data": {"batch_size": 4},
                "trainer": {"devices": 2, "num_nodes": 2},
                "callbacks": {"gradient_accumulation": {"global_batch_size": 64}},
            },
            Batch(64, 16),
        ),
    ],
)
def test_a_step_has_as_many_samples_in_every_row(values: dict[str, Any], expected: Batch) -> None:
    assert Batch.of(values) == expected


@pytest.mark.parametrize("name", ["baseline", "gradient_accumulation", "micro_batch", "precision=bf16_mixed"])
def test_a_row_composes_with_the_global_batch_of_the_recipe(name: str) -> None:
    recipe = composition.compose_recipe("low_memory", []).values
    trial = named(trials.alone(recipe, optimizers=False))[name]
    composed = composition.compose_recipe("low_memory", trial.overrides()).values
    assert Batch.of(composed).whole == Batch.of(recipe).whole == 16
    listed = set(composed.get("callbacks") or {})
    assert listed == ({name} if "=" not in name and name != "baseline" else set())
    same = ("model", "seed", "optimizer", "scheduler")
    assert [composed[key] for key in same] == [recipe[key] for key in same]


def test_a_batch_is_cut_into_parts_that_divide_it() -> None:
    for size, part in ((16, 4), (6, 2), (10, 5), (7, 7), (1, 1)):
        values = {"data": {"batch_size": size}, "trainer": {}}
        found = named(trials.alone(values, optimizers=False))
        assert found["gradient_accumulation"].settings == (
            f"data.batch_size={part}",
            f"callbacks.gradient_accumulation.global_batch_size={size}",
        )


def test_a_row_of_ones_own_is_on_top_of_the_baseline() -> None:
    line = (
        "optimizer=muon +callbacks=micro_batch callbacks.micro_batch.micro_batch_size=2 precision=bf16_mixed"
    )
    trial = trials.row_of(line, LM)
    assert trial.name == line
    assert trial.overrides() == [
        "callbacks=[micro_batch]", "precision=bf16_mixed", "strategy=auto", "optimizer=muon",
        "data.batch_size=16", "callbacks.micro_batch.micro_batch_size=2",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="not an override"):
        trials.row_of("muon", LM)


def choice(group: str, option: str) -> Trial:
    return Trial(f"{group}={option}", (), tuple({**BARE, group: option}.items()))


def test_what_helped_is_combined_the_best_first_as_far_as_it_fits() -> None:
    bf16, fp16 = choice("precision", "bf16_mixed"), choice("precision", "fp16_mixed")
    recompute, compiled = Trial("a", ("a",), tuple(BARE.items())), Trial("b", ("b",), tuple(BARE.items()))
    both = trials.combined(
        [bf16, recompute, fp16, compiled], lambda trial: "b" not in (trial.callbacks or ())
    )
    assert both is not None
    assert both.overrides() == ["callbacks=[a]", "precision=bf16_mixed", "strategy=auto"]
    assert trials.combined([bf16], lambda _: True) is None, "that is a row already"
    assert trials.combined([], lambda _: True) is None


def test_settings_of_both_are_kept_and_the_later_one_wins() -> None:
    one = Trial("a", ("a",), tuple(BARE.items()), ("data.batch_size=16",))
    other = Trial("b", ("b",), tuple(BARE.items()), ("data.batch_size=4", "callbacks.b.x=1"))
    both = trials.combined([one, other], lambda _: True)
    assert both is not None
    assert both.settings == ("data.batch_size=4", "callbacks.b.x=1")
