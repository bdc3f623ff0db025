"""InBackward: freed gradients, exact steps, and rejected settings that need the gradients later."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.optimization.first_gradients import GradientError
from lightning_eff.monitors.gradient_check import GradientCheck
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.report.live_bytes import LiveBytes
from tests.support.models import Net, fit, make_trainer
from tests.support.ranks import is_equal

FACTORY = functools.partial(InBackward, lr=0.01)


def stack(num_layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(num_layers)))


def test_only_one_gradient_exists_at_a_time() -> None:
    model = stack()
    optimizer = InBackward(model.parameters(), lr=0.01, optimizer=functools.partial(torch.optim.SGD))
    live, seen = LiveBytes(), list[int]()
    live.add(model.parameters())
    start = live.now_bytes
    optimizer.register_gradient_hook(lambda parameter, gradient: seen.append(live.now_bytes - start))
    with live:
        model(torch.randn(2, 64)).sum().backward()
    gradient_bytes = 64 * 64 * 4
    assert len(seen) == 8
    assert max(seen) < 2 * gradient_bytes, "one gradient and small activations"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_steps_are_bit_equal_to_the_plain_optimizers_with_tied_weights_too() -> None:
    def make() -> nn.Sequential:
        model = stack(3)
        model[2].weight = model[0].weight
        return model

    ours, theirs = make(), make()
    optimizer = InBackward(ours.parameters(), lr=0.01, weight_decay=0.3)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.3, betas=(0.9, 0.95), fused=True)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, plain)]
    for _ in range(4):
        x = torch.randn(2, 64)
        ours(x).square().sum().backward()
        optimizer.step()
        theirs(x).square().sum().backward()
        plain.step()
        plain.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert is_equal([*ours.parameters()], [*theirs.parameters()])


def test_each_parameters_gradient_is_clipped_by_its_own_norm() -> None:
    model = stack(2)
    optimizer = InBackward(
        model.parameters(), lr=1.0, weight_decay=0.0, optimizer=torch.optim.SGD, max_parameter_norm=0.5
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(4, 64)).square().sum().mul(100.0).backward()
    optimizer.step()
    moved = [(old - new).norm().item() for old, new in zip(before, model.parameters(), strict=True)]
    assert moved == pytest.approx([0.5, 0.5], rel=1e-4)


@pytest.mark.parametrize("end", ["close twice", "forget"])
def test_gradients_are_kept_after_the_optimizer_is_closed_or_deleted(end: str) -> None:
    layer = nn.Linear(2, 2)
    optimizer: Any = InBackward([layer.weight], lr=0.1)
    if end == "close twice":
        optimizer.close()
    optimizer.add_param_group({"params": [layer.bias]})
    if end != "forget":
        optimizer.close()
    del optimizer
    gc.collect()
    layer(torch.ones(1, 2)).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    ("keywords", "found"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"plugins": [AutoPrecision(precision="16-mixed")]}, "scaler"),
        ({"strategy": "ddp", "devices": 2}, "2 devices"),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, "GradientAccumulationScheduler"),
    ],
)
def test_a_setting_that_needs_gradients_after_the_backward_pass_is_rejected(
    keywords: dict[str, Any], found: str
) -> None:
    callbacks = [OptimizerChoice(optimizer=FACTORY), *keywords.pop("callbacks", [])]
    trainer = make_trainer(callbacks=callbacks, **keywords)
    with pytest.raises(ConflictError, match=found):
        rules.raise_rejected(rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer)))


def test_the_gradient_check_gets_gradients_before_they_are_freed(net: Callable[..., Net]) -> None:
    model = net()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(GradientError, match=r"unused.weight, unused.bias"):
        fit(model, OptimizerChoice(optimizer=FACTORY), GradientCheck())
    fit(net(), OptimizerChoice(optimizer=FACTORY), GradientCheck(), max_steps=2)


class Counting(torch.optim.SGD):
    """Counts its steps in its group, like optimizers of some libraries."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_an_inner_optimizer_that_counts_steps_in_its_groups_is_rejected() -> None:
    layer = nn.Linear(2, 2)
    optimizer = InBackward(layer.parameters(), lr=0.1, weight_decay=0.0, optimizer=Counting)
    layer.weight.grad = torch.ones(2, 2)
    with pytest.raises(ConfigError, match="optimizer"):
        optimizer.step()


def test_a_second_gradient_before_the_step_raises_an_error() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(8, 8)
    optimizer = InBackward(layer.parameters(), lr=0.1)
    x = torch.ones(2, 8, requires_grad=True)
    shared = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        shared.sum().backward()
    del optimizer
