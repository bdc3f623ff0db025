"""What ZeRO would not see of a parameter; two ranks in tests/test_strategies.py show that it changes none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_eff.core.errors import ConflictError, ConflictWarning
from lightning_eff.strategy._zero.unseen import Unseen, warn_of_hooks
from tests.support.models import Net


@torch.no_grad()
def clamp(net: Any) -> None:
    net.second.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net.first.requires_grad_(requires_grad=True), r"first\.weight was unfrozen after"),
        (lambda net: net.second.requires_grad_(requires_grad=False), r"second\.weight was frozen after"),
        (clamp, r"second\.weight was changed in place"),
    ],
)
def test_what_a_step_would_not_see_is_refused(change: Callable[[Any], object], message: str) -> None:
    net = Net()
    net.first.requires_grad_(requires_grad=False)
    unseen = Unseen(net)
    unseen.check()
    change(net)
    with pytest.raises(ConflictError, match=rf"{message}[\s\S]*try: FSDP2\(\)"):
        unseen.check()


def test_what_is_frozen_may_be_changed() -> None:
    """By a teacher's average, for example."""
    net = Net()
    net.first.requires_grad_(requires_grad=False)
    unseen = Unseen(net)
    net.first.weight.mul_(0.9).add_(0.1)
    net(torch.zeros(2, 8)).sum().backward()
    unseen.check()


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step"])
def test_hooks_that_look_for_gradients_are_told_that_there_are_none(name: str) -> None:
    net: Any = type("Watched", (Net,), {name: lambda self, *_: None})()
    with pytest.warns(ConflictWarning, match=rf"Watched\.{name} finds no gradients[\s\S]*try: FSDP2\(\)"):
        warn_of_hooks(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_hooks(Net())
