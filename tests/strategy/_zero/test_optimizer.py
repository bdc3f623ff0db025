"""Which optimizers may be given stretches of vectors, tried and not listed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from lightning_eff.strategy._zero.optimizer import is_elementwise

ALONE = [
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax,
    partial(optim.SGD, momentum=0.9, nesterov=True), partial(optim.AdamW, amsgrad=True, weight_decay=0.3),
]  # fmt: skip
WHOLE = [optim.Muon, optim.Adafactor, optim.LBFGS]


def made(kind: Any, *shapes: tuple[int, ...]) -> Any:
    return kind([torch.ones(shape, requires_grad=True) for shape in shapes or [(4, 4)]], lr=0.01)


@pytest.mark.parametrize("kind", ALONE, ids=str)
def test_each_element_alone(kind: Any) -> None:
    optimizer = made(kind)
    before = optimizer.param_groups[0]["params"][0].clone()
    assert is_elementwise(optimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
    assert not any(state for state in optimizer.state.values() if kind is not optim.Adagrad)


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_matrices(kind: Any) -> None:
    assert not is_elementwise(made(kind))


@pytest.mark.parametrize("name", ["Lamb", "Prodigy", "SOAP", "LARS", "StableAdamW"])
def test_norms_rates_and_bases_of_whole_tensors_in_a_library(name: str) -> None:
    import pytorch_optimizer

    assert not is_elementwise(made(getattr(pytorch_optimizer, name)))


def test_states_in_blocks() -> None:
    import bitsandbytes

    assert not is_elementwise(made(bitsandbytes.optim.AdamW8bit))


def test_a_second_group_is_tried_too() -> None:
    class Careful(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if group["whole"] and parameter.grad is not None:
                        parameter.grad.div_(parameter.grad.norm())
            return super().step(closure)

    weights = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
    groups = [{"params": [weight], "whole": bool(index)} for index, weight in enumerate(weights)]
    assert not is_elementwise(Careful(groups, lr=0.1))
    assert is_elementwise(Careful([groups[0] | {"params": [torch.ones(2, requires_grad=True)]}], lr=0.1))


def test_one_with_a_schedule_is_tried_by_its_own_step() -> None:
    optimizer = made(optim.SGD)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert is_elementwise(optimizer)
    assert not hasattr(optimizer, "_opt_called") or not optimizer._opt_called


def test_a_rate_of_0_says_nothing_of_the_rule() -> None:
    """A warm-up begins at 0, and a group may be switched off by it."""
    for kind, expected in ((optim.AdamW, True), (optim.Muon, False)):
        optimizer = made(kind)
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0.0
        assert is_elementwise(optimizer) is expected
        weights = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]
        groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.0}]
        assert is_elementwise(kind(groups, lr=0.1)) is expected
    assert is_elementwise(optim.AdamW(weights, lr=torch.tensor(0.0), fused=False))
