"""Groups that are kept from a module's own optimizer, decays, and what a factory says of itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.build import build
from lightning_eff.optimizer.in_backward import InBackward
from tests.support.models import Net, make_loader, make_trainer

ADAMW = functools.partial(torch.optim.AdamW, lr=1.0, weight_decay=0.5)


def fitted(model: Net, factory: Any, **keywords: Any) -> Any:
    callbacks = [OptimizerChoice(optimizer=factory, **keywords)]
    trainer = make_trainer(callbacks=callbacks, max_steps=1)
    trainer.fit(model, make_loader())
    return trainer.optimizers[0]


def test_a_decay_is_a_keyword_or_a_default() -> None:
    layer = nn.Linear(2, 2)
    assert len(build(layer, functools.partial(torch.optim.AdamW, lr=0.1)).param_groups) == 2
    assert len(build(layer, functools.partial(torch.optim.AdamW, weight_decay=0.0)).param_groups) == 1
    assert len(build(layer, torch.optim.SGD).param_groups) == 1
    assert len(build(layer, functools.partial(InBackward, lr=0.1)).param_groups) == 2
    assert len(build(layer, functools.partial(InBackward, weight_decay=0.0)).param_groups) == 1


def shares(model: Net) -> Any:
    head = {"params": model.second.parameters(), "lr": 0.4}
    return torch.optim.SGD([{"params": model.first.parameters()}, head], lr=0.1)


def no_default_rate(model: Net) -> Any:
    rates = {model.first: 3e-5, model.second: 3e-4}
    return torch.optim.AdamW([{"params": layer.parameters(), "lr": lr} for layer, lr in rates.items()])


def no_decay(model: Net) -> Any:
    groups = [{"params": [model.first.weight], "weight_decay": 0.0}, {"params": [model.second.weight]}]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def no_decay_by_default(model: Net) -> Any:
    groups = [{"params": [model.first.weight]}, {"params": [model.second.weight], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("own", "factory", "key", "expected"),
    [
        (shares, ADAMW, "lr", [1.0, 1.0, 4.0, 4.0]),
        (no_default_rate, functools.partial(torch.optim.SGD, lr=0.1), "lr", [0.01, 0.01, 0.1, 0.1]),
        (no_decay, ADAMW, "weight_decay", [0.0, 0.5]),
        (no_decay_by_default, ADAMW, "weight_decay", [0.0, 0.5]),
    ],
)
def test_a_modules_own_groups_keep_their_shares_and_what_they_leave_out(
    net: Callable[..., Net], own: Any, factory: Any, key: str, expected: list[float]
) -> None:
    model = net()
    model.configure_optimizers = lambda: own(model)
    optimizer = fitted(model, factory)
    found = {id(p): group[key] for group in optimizer.param_groups for p in group["params"]}
    assert [found[id(p)] for p in model.parameters() if id(p) in found] == pytest.approx(expected)


def test_several_optimizers_of_the_module_are_rejected(net: Callable[..., Net]) -> None:
    model = net()
    model.configure_optimizers = lambda: [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigError, match="optimizer"):
        fitted(model, ADAMW)


@pytest.mark.parametrize("form", ["lists", "dict", "stepped by the module"])
def test_a_modules_own_schedule_must_be_given_again(net: Callable[..., Net], form: str) -> None:
    model = net()

    def configure() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        both = {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        forms = {"lists": ([optimizer], [schedule]), "dict": both}
        return forms.get(form, optimizer)

    model.configure_optimizers = configure
    with pytest.raises(ConfigError, match="scheduler=None"):
        fitted(model, ADAMW)
    dropped: Any = fitted(model, ADAMW, scheduler="none").param_groups
    assert all("initial_lr" not in group for group in dropped)
    half = functools.partial(torch.optim.lr_scheduler.ConstantLR, factor=0.5)
    assert [group["lr"] for group in fitted(model, ADAMW, scheduler=half).param_groups] == [0.5, 0.5]


def test_shares_are_kept_of_rates_that_a_schedule_had_set(net: Callable[..., Net]) -> None:
    model = net()

    def configure() -> Any:
        groups = [{"params": model.first.parameters(), "lr": 0.01}, {"params": model.second.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.1], total_steps=9)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    model.configure_optimizers = configure
    constant = torch.optim.lr_scheduler.ConstantLR
    optimizer = fitted(model, functools.partial(torch.optim.SGD, lr=1.0), scheduler=constant)
    assert [group["initial_lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 1.0])
