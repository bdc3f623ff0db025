"""What Lightning calls as `configure_optimizers`, made from an optimizer, a schedule and a module.

One function, `attach`, serves a recipe's `optimizer` and `scheduler` groups and the callback for a plain
Trainer. Norms and biases get no weight decay. Where the module has an optimizer of its own that is replaced,
its groups stay (which parameters are trained, and at which share of the learning rate), and its schedule
too, unless another is given.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._foreach_utils import (
    _get_fused_kernels_supported_devices,  # pyright: ignore[reportPrivateUsage]
)

from lightning_eff.core.errors import ConfigError, ConflictWarning, SlowPathWarning
from lightning_eff.core.optimization.composite import OptimizerFactory
from lightning_eff.core.optimization.factories import classes, settings
from lightning_eff.core.optimization.kept_schedule import KeptSchedule, Replaced
from lightning_eff.core.optimization.parameter_groups import hidden_matrices, parameter_groups

SchedulerFactory = Callable[..., LRScheduler]


def build(
    module: nn.Module, optimizer: OptimizerFactory, own: Sequence[Mapping[str, Any]] | None = None
) -> Optimizer:
    """Make the optimizer for `module`; `fused=True` falls back, with a warning, where it cannot run.

    Args:
        module: Whose trainable parameters are optimized.
        optimizer: Called with parameter groups.
        own: Groups of the module's own optimizer, see `parameter_groups`.
    """
    keywords, made = settings(optimizer), classes(optimizer) or [type(_probe(optimizer))]
    asks = any(getattr(kind, "hidden_groups", False) for kind in made)
    hidden = hidden_matrices(module, keywords.get("rest")) if asks else None
    groups = parameter_groups(module, decays=_decays(optimizer), hidden=hidden, own=own)
    shares = [group.pop("share", None) for group in groups]
    reason = _unfusable(groups) if getattr(optimizer, "keywords", {}).get("fused") else ""
    if reason:
        text = f"fused=True cannot run here, so the optimizer steps in a loop: {reason}"
        warnings.warn(text, SlowPathWarning, stacklevel=2)
    built = optimizer(groups, **({"fused": None} if reason else {}))
    if own is not None:
        _scale_rates(built, groups, shares)
    built.register_load_state_dict_pre_hook(functools.partial(_refuse_another, keywords))
    return built


def _probe(factory: OptimizerFactory) -> Optimizer:
    """Return an optimizer over nothing to speak of, of a factory that does not say what it makes."""
    return factory([nn.Parameter(torch.zeros(1, 1))])


def _unfusable(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return why one kernel cannot step all parameters; torch finds that out in the first step."""
    devices = _get_fused_kernels_supported_devices()
    for parameter in (p for group in groups for p in group["params"]):
        if not parameter.is_floating_point() or parameter.device.type not in devices:
            return f"a parameter is {parameter.dtype} on {parameter.device.type}"
    return ""


def _refuse_another(keywords: Mapping[str, Any], built: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse the state of an optimizer with other groups or options, before it is half loaded.

    Raises:
        ConfigError: It is another's.
    """
    ours, theirs = built.param_groups, saved["param_groups"]
    missing = [key for key in keywords if key in ours[0] and theirs and key not in theirs[0]]
    if len(ours) == len(theirs) and not missing:
        return
    found = f"without {missing[0]!r}" if missing else f"with {len(theirs)} parameter groups"
    raise ConfigError(
        key="optimizer",
        value=type(built).__name__,
        allowed=f"the optimizer that the checkpoint was saved with: its state is one {found}"
        + ("" if missing else f" and not {len(ours)} (norms and biases may be one of their own)"),
    )


def _scale_rates(
    built: Optimizer, groups: Iterable[Mapping[str, Any]], shares: Iterable[float | None]
) -> None:
    """Give every parameter the share of the learning rate that its group had."""
    share_of = {p: share for group, share in zip(groups, shares, strict=True) for p in group["params"]}
    for group in built.param_groups:
        share = share_of[group["params"][0]]
        if share is not None:
            group["lr"] = group["lr"] * share


def _decays(factory: OptimizerFactory) -> bool:
    """Say whether there is a weight decay, as a keyword or as a default."""
    keywords = settings(factory)
    if "weight_decay" in keywords:
        return bool(keywords["weight_decay"])
    signatures = [inspect.signature(kind).parameters for kind in classes(factory)]
    if not signatures:
        return bool(_probe(factory).param_groups[0].get("weight_decay"))
    return bool(next((s["weight_decay"].default for s in signatures if "weight_decay" in s), 0.0))


def attach(
    module: pl.LightningModule,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None = None,
    *,
    keep: Callable[[], Any] | None = None,
) -> None:
    """Replace `configure_optimizers` of `module`.

    Args:
        module: May have the method or not; must use automatic optimization.
        optimizer: Called with parameter groups, for example `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        scheduler: Called with the optimizer and stepped after each of its steps; a `total_steps=None`
            among its keywords is filled with the Trainer's number of steps. None is a constant rate, or what
            `keep` brings.
        keep: The module's own method, whose groups are kept, and whose schedule unless there is another.

    Raises:
        ConfigError: The module optimizes manually.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            key="optimizer",
            value=type(module).__name__,
            allowed="a module with automatic optimization: this one steps optimizers of its own",
        )
    configure: Any = functools.partial(_configure, module, optimizer, scheduler, keep)
    module.configure_optimizers = configure


def _configure(
    module: pl.LightningModule,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None,
    keep: Callable[[], Any] | None,
) -> Any:
    own, schedules = _own(keep()) if keep is not None else (None, [])
    built = build(module, optimizer, _shares(own) if own is not None else None)
    if scheduler is not None:
        filled: dict[str, Any] = {}
        if _lacks_total_steps(scheduler):
            steps = module.trainer.estimated_stepping_batches
            filled["total_steps"] = int(steps) if 0 < steps < float("inf") else None
        if own is not None:
            Replaced(own, built)
        return [built], [{"scheduler": scheduler(built, **filled), "interval": "step"}]
    if own is None:
        return [built], []
    if not schedules and any("initial_lr" in group for group in own.param_groups):
        text = f"a schedule that {type(module).__name__} steps itself does not reach {type(built).__name__}"
        warnings.warn(text, ConflictWarning, stacklevel=2)
    replaced = Replaced(own, built)
    return [built], [_kept(schedule, built, replaced) for schedule in schedules]


def _lacks_total_steps(scheduler: SchedulerFactory) -> bool:
    """Say whether a schedule takes the number of steps, and has not been given it."""
    keywords: Mapping[str, Any] = getattr(scheduler, "keywords", {})
    if "total_steps" in keywords:
        return keywords["total_steps"] is None
    made: Any = getattr(scheduler, "func", scheduler)
    parameter = inspect.signature(made).parameters.get("total_steps")
    return parameter is not None and parameter.default is None


def _shares(own: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer that is replaced, with their shares of its learning rate."""
    rates = [float(g.get("max_lr", g.get("initial_lr", g.get("lr", 0.0)))) for g in own.param_groups]
    default = float(own.defaults.get("lr", 0.0))
    base = default if default in rates else max(rates)
    groups: list[dict[str, Any]] = []
    for group, rate in zip(own.param_groups, rates, strict=True):
        kept = {"params": group["params"]}
        if base and rate != base:
            kept["share"] = rate / base
        if own.defaults.get("weight_decay"):  # if none has a decay, it was not taken from these alone
            kept["weight_decay"] = group.get("weight_decay")
        groups.append(kept)
    return groups


def _own(answer: Any) -> tuple[Optimizer | None, list[dict[str, Any]]]:
    """Return optimizer and schedules of what a `configure_optimizers` may return.

    Raises:
        ConfigError: There are several optimizers.
    """
    if answer is None:
        return None, []
    optimizers, schedules = _listed(answer)
    if len(optimizers) != 1:
        raise ConfigError(
            key="optimizer",
            value=f"{len(optimizers)} optimizers",
            allowed="a module with one optimizer of its own",
        )
    return optimizers[0], schedules


def _listed(answer: Any) -> tuple[list[Optimizer], list[dict[str, Any]]]:
    if isinstance(answer, Mapping):
        schedule = answer.get("lr_scheduler")
        monitor = {"monitor": answer["monitor"]} if "monitor" in answer else {}
        return [answer["optimizer"]], [monitor | _as_dict(schedule)] if schedule is not None else []
    if isinstance(answer, (list, tuple)):
        if len(answer) == 2 and isinstance(answer[0], (list, tuple)):
            schedules = answer[1] if isinstance(answer[1], (list, tuple)) else [answer[1]]
            return list(answer[0]), [_as_dict(schedule) for schedule in schedules]
        parts = [_listed(each) for each in answer]
        return [o for optimizers, _ in parts for o in optimizers], [s for _, found in parts for s in found]
    return [answer], []


def _as_dict(schedule: Any) -> dict[str, Any]:
    return dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule}


def _kept(schedule: dict[str, Any], built: Optimizer, replaced: Replaced) -> dict[str, Any]:
    on_plateau = schedule.get("reduce_on_plateau", isinstance(schedule["scheduler"], ReduceLROnPlateau))
    kept = KeptSchedule(schedule["scheduler"], built, replaced)
    return schedule | {"scheduler": kept, "reduce_on_plateau": on_plateau}
