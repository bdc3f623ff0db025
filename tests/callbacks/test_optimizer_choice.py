"""OptimizerChoice and the function behind it: groups, fused, schedules by optimizer step, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice, attach, build, parameter_groups
from lightning_eff.errors import ConfigError, SlowPathWarning
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from tests.conftest import Net, make_loader, make_trainer

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5, fused=True)


def test_norms_and_biases_get_no_decay_and_each_parameter_one_group(net: Callable[..., Net]) -> None:
    model = net()
    optimizer = build(model, ADAMW)
    decayed, rest = optimizer.param_groups
    assert {id(p) for p in decayed["params"]} == {id(model.first.weight), id(model.second.weight)}
    assert decayed["weight_decay"] == 0.5
    assert rest["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out(net: Callable[..., Net]) -> None:
    model = net()
    model.first.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model, decays=True)) == 4


def test_a_module_without_trainable_parameters_is_refused(net: Callable[..., Net]) -> None:
    with pytest.raises(ConfigError, match="a module with a trainable parameter"):
        build(net().requires_grad_(False), ADAMW)


def test_without_decay_there_is_one_group(net: Callable[..., Net]) -> None:
    assert len(build(net(), functools.partial(torch.optim.SGD, lr=0.1)).param_groups) == 1


class NeverFused(torch.optim.AdamW):
    """Refuses as AdamW does for parameters on a device without a fused kernel."""

    def __init__(self, params: Any, **keywords: Any) -> None:
        if keywords.get("fused"):
            msg = "`fused=True` requires all the params to be floating point Tensors of supported devices"
            raise RuntimeError(msg)
        super().__init__(params, **keywords)


def test_fused_falls_back_with_a_warning_where_it_cannot_run(net: Callable[..., Net]) -> None:
    with pytest.warns(SlowPathWarning, match="fused=True cannot run here"):
        optimizer = build(net(), functools.partial(NeverFused, lr=0.01, weight_decay=0.5, fused=True))
    assert optimizer.defaults["fused"] is None
    assert len(optimizer.param_groups) == 2


def test_another_error_of_the_optimizer_is_not_swallowed(net: Callable[..., Net]) -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        build(net(), functools.partial(torch.optim.AdamW, lr=-1.0, fused=True))


def test_schedule_is_stepped_once_an_optimizer_step(net: Callable[..., Net]) -> None:
    model = net()
    schedule = functools.partial(WarmupDecay, total_steps=None, decay="linear", final_share=0.0)
    attach(model, functools.partial(torch.optim.SGD, lr=1.0), schedule)
    trainer = make_trainer(accumulate_grad_batches=2, max_steps=4)
    trainer.fit(model, make_loader())
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.total_steps == 4
    assert scheduler.last_epoch == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0


def test_the_modules_own_method_comes_back(net: Callable[..., Net]) -> None:
    model = net()
    choice = OptimizerChoice(optimizer=ADAMW)
    trainer = make_trainer(callbacks=[choice], max_steps=1)
    trainer.fit(model, make_loader())
    assert isinstance(trainer.optimizers[0], torch.optim.AdamW)
    assert choice.outcome().did == "AdamW over 6 tensors in 2 groups"
    assert isinstance(model.configure_optimizers(), torch.optim.SGD)


def test_without_an_optimizer_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer=None: expected an optimizer"):
        OptimizerChoice()


def test_manual_optimization_is_refused(net: Callable[..., Net]) -> None:
    model = net()
    model.automatic_optimization = False
    with pytest.raises(ConfigError, match="a module with automatic optimization"):
        attach(model, ADAMW)
