"""Models that are rejected before sharding, in one process; the error names the parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import nn

from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.strategy._shared import checks
from lightning_eff.strategy._zero_config import check_run
from tests.support.models import Deep


def model(change: Callable[[Any], object] = lambda deep: None) -> Any:
    deep = Deep()
    change(deep)
    return deep


def tied_copy(deep: Any) -> nn.Linear:
    copy = nn.Linear(16, 16)
    copy.weight = deep.blocks[0].linear.weight
    return copy


def scalar() -> nn.Parameter:
    return nn.Parameter(torch.tensor(1.5))


def fit_of(deep: Any, precision: str = "32-true", clip: GradClipAlgorithmType | None = None) -> Any:
    plugin = SimpleNamespace(precision=precision)
    config = {"zero_optimization": {"stage": 3}}
    strategy = SimpleNamespace(precision_plugin=plugin, config=config)
    state = SimpleNamespace(fn=TrainerFn.FITTING)
    return SimpleNamespace(
        lightning_module=deep,
        strategy=strategy,
        state=state,
        gradient_clip_algorithm=clip,
        gradient_clip_val=1.0,
    )


CHECKS: dict[str, Callable[[Any], object]] = {
    "parameters": lambda deep: checks.check_parameters(checks.ZERO, deep),
    "groups": lambda deep: checks.check_groups(deep, list(deep.blocks)),
    "hooks": checks.check_hooks,
    "run": lambda deep: check_run(fit_of(deep)),
}


@pytest.mark.parametrize(
    ("change", "check", "name"),
    [
        (lambda deep: deep.register_parameter("gain", scalar()), "parameters", "gain"),
        (lambda deep: deep.blocks[2].register_module("linear", tied_copy(deep)), "groups", "blocks.2.linear"),
        (lambda deep: deep.register_module("copy", tied_copy(deep)), "groups", "copy.weight"),
        (
            lambda deep: deep.second.bias.register_post_accumulate_grad_hook(lambda _: None),
            "hooks",
            "second.bias",
        ),
        (lambda deep: deep.first.double(), "parameters", "first.weight"),
        (lambda deep: deep.requires_grad_(requires_grad=False), "run", "Deep"),
        (lambda deep: setattr(deep, "first", torch.compile(deep.first, backend="eager")), "run", "first"),
    ],
)
def test_unsuitable_parameters_are_named_with_remedies(
    change: Callable[[Any], object], check: str, name: str
) -> None:
    with pytest.raises(ConflictError, match=re.escape(name)):
        CHECKS[check](model(change))
    CHECKS[check](model())


def test_runs_that_zero_would_change_are_rejected() -> None:
    deep = model()
    check_run(fit_of(deep, clip=GradClipAlgorithmType.NORM))
    with pytest.raises(ConfigError, match=r"trainer\.gradient_clip_algorithm='value'"):
        check_run(fit_of(deep, clip=GradClipAlgorithmType.VALUE))
    deep.statistics = nn.BatchNorm1d(4)
    check_run(fit_of(deep))
    with pytest.raises(ConflictError, match="statistics"):
        check_run(fit_of(deep, "bf16-mixed"))


def test_a_weight_may_be_tied_within_a_block() -> None:
    deep = model(lambda deep: deep.blocks[0].register_module("copy", tied_copy(deep)))
    checks.check_groups(deep, list(deep.blocks))


def test_an_optimizer_of_unsharded_parameters_is_rejected() -> None:
    deep = model()
    old = deep.second.weight
    groups = [{"params": [deep.first.weight]}, {"params": [deep.first.bias, old], "lr": 0.1}]
    checks.check_optimizer(torch.optim.SGD(groups, lr=0.1), deep)
    deep.second.weight = nn.Parameter(torch.zeros(3, 16))
    with pytest.raises(ConflictError, match="group 1, position 1"):
        checks.check_optimizer(torch.optim.SGD(groups, lr=0.1), deep)
