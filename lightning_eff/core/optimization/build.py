"""Build what Lightning calls as `configure_optimizers` from an optimizer, a schedule and a module.

One function, `configure`, serves a recipe's `optimizer` and `scheduler` groups and the callback for a plain
Trainer. Norms and biases get no weight decay. If the module's own optimizer is replaced, its groups stay:
which parameters are trained, and at which fraction of the learning rate. Its schedule cannot: a scheduler is
bound to its optimizer, and holds lists by group and other schedulers inside itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,  # pyright: ignore[reportPrivateUsage]
)
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.composite import OptimizerFactory
from lightning_eff.core.optimization.parameter_groups import hidden_matrices, parameter_groups

SchedulerFactory = Callable[..., LRScheduler]


def factory_keywords(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a `functools.partial`, including those of partials among them."""
    keywords: dict[str, Any] = dict(getattr(factory, "keywords", {}))
    for inner in [value for value in keywords.values() if isinstance(value, functools.partial)]:
        keywords = factory_keywords(inner) | keywords
    return keywords


def optimizer_classes(factory: Callable[..., Any]) -> list[type]:
    """Return the classes that a factory makes, the outermost first; none of a plain function."""
    kind: Any = getattr(factory, "func", factory)
    found: list[type] = [kind] if isinstance(kind, type) else []
    for value in getattr(factory, "keywords", {}).values():
        if isinstance(value, (functools.partial, type)):
            found += optimizer_classes(value)
    return found


def build(
    module: nn.Module, optimizer: OptimizerFactory, own: Sequence[Mapping[str, Any]] | None = None
) -> Optimizer:
    """Make the optimizer for `module`, with the groups of its own optimizer if it has one."""
    keywords, kinds = factory_keywords(optimizer), optimizer_classes(optimizer)
    if kinds:
        signatures = [inspect.signature(kind).parameters for kind in kinds]
        decay = next((s["weight_decay"].default for s in signatures if "weight_decay" in s), 0.0)
    else:  # a plain function shows no class: make one optimizer over a parameter of no use
        probe = optimizer([nn.Parameter(torch.zeros(1, 1))])
        kinds, decay = [type(probe)], probe.param_groups[0].get("weight_decay")
    needs_hidden = any(getattr(kind, "hidden_groups", False) for kind in kinds)
    hidden = hidden_matrices(module, keywords.get("rest")) if needs_hidden else None
    decays = bool(keywords.get("weight_decay", decay))
    groups = parameter_groups(module, decays=decays, hidden=hidden, own=own)
    popped = [(group.pop("lr_fraction", None), group["params"]) for group in groups]
    fraction_of = {parameter: fraction for fraction, parameters in popped for parameter in parameters}
    built = optimizer(groups)
    if own is not None:
        for group in built.param_groups:
            fraction = fraction_of[group["params"][0]]
            if fraction is not None:
                group["lr"] = group["lr"] * fraction
    return built


def configure(
    module: pl.LightningModule,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | Literal["none"] | None = None,
    own_method: Callable[[], Any] | None = None,
) -> Any:
    """Return the optimizer and its schedule in one of the forms that Lightning accepts.

    Args:
        module: Whose `configure_optimizers` is replaced.
        optimizer: Called with parameter groups, for example `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        scheduler: Called with the optimizer and stepped after each of its steps; a `total_steps=None`
            among its keywords is filled with the Trainer's number of steps. None is a constant rate, and
            "none" one that may replace a schedule of the module.
        own_method: The module's own, whose groups are kept.

    Raises:
        ConfigError: The module has a schedule of its own, and none is given in its place.
    """
    groups: list[dict[str, Any]] | None = None
    configured = own_method() if own_method is not None else None
    if configured is not None:
        optimizers, schedules, _ = _configure_optimizers(configured)
        if len(optimizers) != 1:
            allowed = "a module with one optimizer of its own"
            raise ConfigError(key="optimizer", value=f"{len(optimizers)} optimizers", allowed=allowed)
        own: Any = optimizers[0]
        if scheduler is None and (any(schedules) or any("initial_lr" in group for group in own.param_groups)):
            name = type(module).__name__
            allowed = f"a schedule, since the one of {name} is bound to the optimizer that is replaced"
            remedy = "OptimizerChoice(optimizer=..., scheduler=functools.partial(StepLR, step_size=10))"
            remedies = [remedy, 'OptimizerChoice(optimizer=..., scheduler="none"), for a constant rate']
            raise ConfigError(key="scheduler", value=None, allowed=allowed, remedies=remedies)
        if hasattr(own, "close"):
            own.close()
        groups = _groups_of(own)
    built = build(module, optimizer, groups)
    if scheduler is None or scheduler == "none":
        return [built], []
    # A schedule that takes the number of steps, and has not been given it, gets the Trainer's.
    keywords = getattr(scheduler, "keywords", {})
    parameter = inspect.signature(getattr(scheduler, "func", scheduler)).parameters.get("total_steps")
    default = "unknown" if parameter is None else parameter.default
    filled: dict[str, Any] = {}
    if keywords.get("total_steps", default) is None:
        steps = module.trainer.estimated_stepping_batches
        filled["total_steps"] = int(steps) if 0 < steps < float("inf") else None
    return [built], [{"scheduler": scheduler(built, **filled), "interval": "step"}]


def _groups_of(own: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer that is replaced, with their fractions of its learning rate."""
    rates = [float(g.get("max_lr", g.get("initial_lr", g.get("lr", 0.0)))) for g in own.param_groups]
    default = float(own.defaults.get("lr", 0.0))
    base = default if default in rates else max(rates)
    groups: list[dict[str, Any]] = []
    for group, rate in zip(own.param_groups, rates, strict=True):
        kept = {"params": group["params"]}
        if base and rate != base:
            kept["lr_fraction"] = rate / base
        if own.defaults.get("weight_decay"):  # without a decay, a group's 0.0 excludes nothing
            kept["weight_decay"] = group.get("weight_decay")
        groups.append(kept)
    return groups
