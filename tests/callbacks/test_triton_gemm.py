"""Linear layers by our GEMM: which are swapped, that training stays what it is, and what the report says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.triton_gemm import TritonGemm, swap, unswap
from lightning_eff.core.errors import ConflictError
from lightning_eff.kernels import linear
from lightning_eff.models.gpt import GPT
from tests.support.language import LanguageModel, assert_same_training, language_model, token_rows
from tests.support.models import Net, fit, seeded
from tests.support.prediction import GPT_OF, choice, loader_for, trainer_of
from tests.support.ranks import is_equal


def layers() -> nn.Module:
    return nn.ModuleDict(
        {
            "wide": nn.Linear(256, 256),
            "narrow": nn.Linear(256, 10),
            "inner": nn.Sequential(nn.Linear(128, 128)),
            "other": nn.Bilinear(128, 128, 128),
            "own": type("Own", (nn.Linear,), {})(256, 256),
        }
    )


def test_layers_are_chosen_by_size_name_and_type() -> None:
    assert list(swap(layers(), min_features=128)) == ["wide", "inner.0"], "no subclass, nothing narrow"
    assert list(swap(layers())) == ["wide"]
    assert list(swap(layers(), min_features=1)) == ["wide", "narrow", "inner.0"]
    assert list(swap(layers(), min_features=128, blocks="inner")) == ["inner.0"]
    assert list(swap(layers(), min_features=128, blocks=["Sequential"])) == ["inner.0"]
    assert list(swap(layers(), min_features=1, blocks=lambda name, _: name == "narrow")) == ["narrow"]
    model = layers()
    assert len(swap(model)) == 1
    assert swap(model) == {}, "a second time there is nothing to do"


def test_a_swap_is_taken_back() -> None:
    model = layers()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    for layer in swap(model, backend="torch", accumulation=linear.Accumulation()).values():
        assert type(layer) is linear.TritonLinear
        unswap(layer)
        unswap(layer)
        assert type(layer) is nn.Linear
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def train(model: LanguageModel, *callbacks: Any, num_steps: int = 50) -> None:
    loader = DataLoader(TensorDataset(*token_rows(40)), batch_size=4)
    fit(model, *callbacks, loader=loader, max_steps=num_steps, gradient_clip_val=0.5)


@pytest.mark.parametrize(
    ("others", "added"),
    [
        # Ten batches an epoch: in steps of 4, 4 and 2, all but the first of each are added.
        (lambda: [GradientAccumulation(global_batch_size=16)], 17 * (3 + 3 + 1) - 1),
        # A batch of four in parts of two: the second of each step is added.
        (lambda: [MicroBatch(micro_batch_size=2)], 50),
        (lambda: [MicroBatch(micro_batch_size="auto")], 0),
    ],
)
@pytest.mark.parametrize("weighted", [True, False])
def test_a_step_of_several_passes_is_what_it_is_without(others: Any, added: int, weighted: bool) -> None:
    """T1 in float64; a gradient that was added twice or lost would be off by a half."""
    plain, ours = language_model(weighted), language_model(weighted)
    train(plain, *others())
    technique = TritonGemm(min_features=1)
    train(ours, technique, *others())
    assert_same_training(ours, plain, None)
    outcome = technique.outcome()
    num_added = outcome.numbers["added_in_place"]
    assert num_added == added if not weighted else 0 <= num_added <= added, "some parts weigh nothing"
    assert outcome.effective is bool(added)
    assert type(ours.out) is nn.Linear


def test_accumulation_can_be_left_out() -> None:
    technique = TritonGemm(min_features=1, accumulate=False)
    ours, plain = language_model(True), language_model(True)
    train(ours, technique, GradientAccumulation(global_batch_size=8), num_steps=5)
    train(plain, GradientAccumulation(global_batch_size=8), num_steps=5)
    assert is_equal([*ours.parameters()], [*plain.parameters()])
    outcome = technique.outcome()
    assert not outcome.effective
    assert (outcome.numbers["added_in_place"], outcome.numbers["left"]) == (0, 1)
    assert list(outcome.numbers["layers"]) == ["out"]


def test_mlps_as_one_function_train_the_same_model() -> None:
    """To the bit, and in micro-batches with gradients that are added in place to T2."""
    make = functools.partial(
        seeded, GPT, vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=2
    )  # fmt: skip
    loader = loader_for(GPT_OF)
    for parts, tolerance in ((False, 0.0), (True, 1e-5)):
        ours, plain, technique = make(), make(), TritonGemm(min_features=1, fuse_mlps=True)
        for model, callbacks in ((ours, [technique]), (plain, [])):
            others = [MicroBatch(micro_batch_size=2)] if parts else []
            extra = {"callbacks": [choice(torch.optim.SGD), *callbacks, *others], "max_steps": 5}
            trainer_of(extra).fit(model, loader)
        found = dict(ours.named_parameters()), dict(plain.named_parameters())
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
        outcome = technique.outcome()
        assert outcome.numbers["mlps"] == ["blocks.0.mlp", "blocks.1.mlp"]
        assert outcome.did.startswith("2 MLPs as one function each; ")
        assert outcome.effective
        assert "blocks.0.mlp.up" not in outcome.numbers["layers"]
        assert "forward" not in vars(ours.blocks[0].mlp)
        assert outcome.numbers["added_in_place"] == (5 * (2 * 4 + 1) if parts else 0)


def test_a_backend_that_cannot_run_stops_the_run() -> None:
    with pytest.raises(ConflictError, match="backend=triton requires a CUDA GPU"):
        fit(Net(), TritonGemm(min_features=1, backend="triton"))
