"""Optimizers that may step on slices of flat vectors are found by trying them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

from lightning_eff.strategy._zero.optimizer import is_elementwise

ELEMENTWISE = [
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax,
    partial(optim.SGD, momentum=0.9, nesterov=True), partial(optim.AdamW, amsgrad=True, weight_decay=0.3),
]  # fmt: skip
MATRIX = [optim.Muon, optim.Adafactor, optim.LBFGS]


def made(kind: Any, *shapes: tuple[int, ...]) -> Any:
    return kind([torch.ones(shape, requires_grad=True) for shape in shapes or [(4, 4)]], lr=0.01)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=str)
def test_elementwise_optimizers_are_accepted(kind: Any) -> None:
    optimizer = made(kind)
    before = optimizer.param_groups[0]["params"][0].clone()
    assert is_elementwise(optimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
    assert not any(state for state in optimizer.state.values() if kind is not optim.Adagrad)


@pytest.mark.parametrize("kind", MATRIX)
def test_matrix_optimizers_are_rejected(kind: Any) -> None:
    assert not is_elementwise(made(kind))


@pytest.mark.parametrize("name", ["Lamb", "Prodigy", "SOAP", "LARS", "StableAdamW"])
def test_library_optimizers_with_norms_or_bases_are_rejected(name: str) -> None:
    import pytorch_optimizer

    assert not is_elementwise(made(getattr(pytorch_optimizer, name)))


def test_blockwise_quantized_state_is_rejected() -> None:
    import bitsandbytes

    assert not is_elementwise(made(bitsandbytes.optim.AdamW8bit))


def test_every_group_is_tried() -> None:
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


def test_a_schedule_on_the_optimizer_is_not_stepped() -> None:
    optimizer = made(optim.SGD)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert is_elementwise(optimizer)
    assert not hasattr(optimizer, "_opt_called") or not optimizer._opt_called


def test_a_learning_rate_of_0_is_replaced() -> None:
    """A warm-up begins at 0, and a group may have a rate of 0."""
    for kind, expected in ((optim.AdamW, True), (optim.Muon, False)):
        optimizer = made(kind)
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0.0
        assert is_elementwise(optimizer) is expected
        weights = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]
        groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.0}]
        assert is_elementwise(kind(groups, lr=0.1)) is expected
    assert is_elementwise(optim.AdamW(weights, lr=torch.tensor(0.0), fused=False))
