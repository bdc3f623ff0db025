"""Changes that DeepSpeed ignores; two ranks are in tests/test_strategies.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_eff.core.errors import ConflictError, ConflictWarning
from lightning_eff.strategy._zero.parameters import ParameterGuard
from tests.support.models import Net


@torch.no_grad()
def clamp(net: Any) -> None:
    net.second.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net.first.requires_grad_(requires_grad=True), r"first\.weight was unfrozen during"),
        (lambda net: net.second.requires_grad_(requires_grad=False), r"second\.weight was frozen during"),
        (clamp, r"second\.weight was changed in place"),
    ],
)
def test_changes_that_deepspeed_ignores_are_rejected(change: Callable[[Any], object], message: str) -> None:
    net = Net()
    net.first.requires_grad_(requires_grad=False)
    guard = ParameterGuard(net)
    guard.check()
    net.first.weight.mul_(0.9).add_(0.1)  # a frozen one may change, as by a teacher's average
    net(torch.zeros(2, 8)).sum().backward()
    guard.check()
    change(net)
    with pytest.raises(ConflictError, match=rf"{message}[\s\S]*try: FSDP2\(\)"):
        guard.check()


def test_a_step_that_changes_a_parameter_in_place_is_no_change() -> None:
    net = Net()
    guard = ParameterGuard(net)
    clamp(net)  # as DeepSpeed's step does with a parameter that is alone in its group
    guard.begin()
    guard.check()


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step"])
def test_hooks_that_read_gradients_are_warned_of(name: str) -> None:
    net: Any = type("Watched", (Net,), {name: lambda self, *_: None})()
    with pytest.warns(ConflictWarning, match=rf"Watched\.{name} finds no gradients[\s\S]*try: FSDP2\(\)"):
        ParameterGuard(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ParameterGuard(Net())
