"""What of a model is refused by name before it is divided; one process is enough, nothing is divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from lightning_eff.core.errors import ConflictError
from lightning_eff.strategy._fsdp2 import shard
from lightning_eff.strategy._shared import checks
from tests.support.models import Deep


def model(change: Callable[[Any], object] = lambda deep: None) -> Any:
    deep = Deep()
    change(deep)
    return deep


def scalar(deep: Any) -> None:
    deep.gain = nn.Parameter(torch.tensor(1.5))


def empty(deep: Any) -> None:
    deep.blocks[1].rest = nn.Parameter(torch.zeros(0, 8))


def tied(deep: Any) -> None:
    deep.blocks[2].linear.weight = deep.blocks[0].linear.weight


def tied_outside(deep: Any) -> None:
    deep.copy = nn.Linear(16, 16)
    deep.copy.weight = deep.blocks[0].linear.weight


def tied_within(deep: Any) -> None:
    deep.blocks[0].copy = nn.Linear(16, 16)
    deep.blocks[0].copy.weight = deep.blocks[0].linear.weight


def hooked(deep: Any) -> None:
    deep.second.bias.register_hook(lambda gradient: gradient)


def hooked_after(deep: Any) -> None:
    deep.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)


CHECKS: dict[str, Callable[[Any], object]] = {
    "sizes": lambda deep: checks.check_sizes(checks.ZERO, deep),
    "groups": lambda deep: checks.check_groups(deep, list(deep.blocks)),
    "hooks": checks.check_hooks,
    "formats": checks.check_formats,
    "trained": checks.check_trained,
    "wrapped": checks.check_wrapped,
}


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (scalar, "sizes", "deepspeed_zero: gain has no axis"),
        (empty, "sizes", r"deepspeed_zero: blocks\.1\.rest is 0 x 8, and what has no elements"),
        (tied, "groups", r"blocks\.0\.linear\.weight and blocks\.2\.linear\.weight are one weight"),
        (tied_outside, "groups", r"blocks\.0\.linear\.weight and copy\.weight are one weight"),
        (
            lambda deep: deep.blocks[1].norm.double(),
            "groups",
            r"1\.norm\.weight \(float64\) and blocks\.1\.lin",
        ),
        (hooked, "hooks", r"fsdp2: second\.bias has a hook on its gradient"),
        (hooked_after, "hooks", r"fsdp2: second\.bias has a hook on its gradient"),
        (lambda deep: deep.first.double(), "formats", r"first\.weight is float64, and DeepSpeed"),
        (lambda deep: deep.first.to(torch.complex64), "formats", r"first\.weight is complex64"),
        (lambda deep: deep.requires_grad_(requires_grad=False), "trained", "Deep has no parameter that is"),
        (
            lambda deep: setattr(deep, "first", torch.compile(deep.first, backend="eager")),
            "wrapped",
            r"first is compiled[\s\S]*try: DeepSpeedZero\(stage=2\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_it_is_named_with_what_would_do(change: Callable[[Any], object], check: str, message: str) -> None:
    with pytest.raises(ConflictError, match=rf"{message}[\s\S]*try: ") as raised:
        CHECKS[check](model(change))
    assert len(str(raised.value).splitlines()) >= 3, "a remedy or two"
    CHECKS[check](model())


def test_a_weight_may_be_in_one_block_twice() -> None:
    deep = model(tied_within)
    checks.check_groups(deep, list(deep.blocks))


def test_an_optimizer_that_holds_what_was_there_before_is_refused() -> None:
    deep = model()
    old = deep.second.weight
    before = {name: ref(parameter) for name, parameter in deep.named_parameters()}
    groups = [{"params": [deep.first.weight]}, {"params": [deep.first.bias, old], "lr": 0.1}]
    checks.check_optimizer(torch.optim.SGD(groups, lr=0.1), deep, before)
    deep.second.weight = nn.Parameter(torch.zeros(3, 16))
    with pytest.raises(
        ConflictError, match=r"SGD holds second\.weight \(group 1, place 1, \(3, 16\)\), which is"
    ):
        checks.check_optimizer(torch.optim.SGD(groups, lr=0.1), deep, before)


def test_what_hangs_on_parameters_goes_to_those_in_their_place() -> None:
    deep, other = model(), model()
    deep.second.weight.slow = True
    shard.mark(other, shard.marks_of(deep))
    assert [name for name, p in other.named_parameters() if getattr(p, "slow", False)] == ["second.weight"]


def test_a_weight_in_parts_is_explained_and_other_errors_are_left_alone() -> None:
    text = (
        "aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    )
    with (
        pytest.raises(ConflictError, match=r"in parts[\s\S]*try: one backward"),
        shard.parts_explained(),
    ):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="another"), shard.parts_explained():
        raise RuntimeError("another")
