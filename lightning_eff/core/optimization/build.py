"""Build a module's `configure_optimizers` from an optimizer and a schedule.

`callbacks/optimizer_choice` calls `configure`; through this callback, run.py applies the groups `optimizer`
and `scheduler` of a recipe. Norms and biases get no weight decay. Hidden matrices are marked for optimizers
that treat them differently. If the module's own optimizer is replaced, its parameter groups are kept, with
each group's fraction of the learning rate. The module's own schedule cannot be kept, because a scheduler is
tied to its optimizer; it also holds per-group lists and sometimes other schedulers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,  # pyright: ignore[reportPrivateUsage]
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_eff.core.errors import ConfigError, suggest_name
from lightning_eff.core.optimization.composite import OptimizerFactory

SchedulerFactory = Callable[..., LRScheduler]


def factory_keywords(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a `functools.partial`, and of partials among its keyword arguments."""
    keywords: dict[str, Any] = dict(getattr(factory, "keywords", {}))
    for inner in [value for value in keywords.values() if isinstance(value, functools.partial)]:
        # Outer keywords have precedence over keywords of inner partials.
        keywords = factory_keywords(inner) | keywords
    return keywords


def optimizer_classes(factory: Callable[..., Any]) -> list[type]:
    """Return the classes that a factory constructs, outermost first; empty for a plain function."""
    kind: Any = getattr(factory, "func", factory)
    found: list[type] = [kind] if isinstance(kind, type) else []
    for value in getattr(factory, "keywords", {}).values():
        if isinstance(value, (functools.partial, type)):
            found += optimizer_classes(value)
    return found


def build(
    module: nn.Module, optimizer: OptimizerFactory, own: Sequence[Mapping[str, Any]] | None = None
) -> Optimizer:
    """Build the optimizer for `module`; `own` has the groups of the module's own optimizer, or is None."""
    keywords, kinds = factory_keywords(optimizer), optimizer_classes(optimizer)
    if kinds:
        signatures = [inspect.signature(kind).parameters for kind in kinds]
        decay = next((s["weight_decay"].default for s in signatures if "weight_decay" in s), 0.0)
    else:  # a plain function does not show its class, so build an optimizer of an unused parameter
        probe = optimizer([nn.Parameter(torch.zeros(1, 1))])
        kinds, decay = [type(probe)], probe.param_groups[0].get("weight_decay")
    needs_hidden = any(getattr(kind, "hidden_groups", False) for kind in kinds)
    hidden = hidden_matrices(module, keywords.get("rest")) if needs_hidden else None
    decays = bool(keywords.get("weight_decay", decay))
    groups = parameter_groups(module, decays=decays, hidden=hidden, own=own)
    # No optimizer accepts `lr_fraction` as an option, so it is removed here and applied to the rates below.
    popped = [(group.pop("lr_fraction", None), group["params"]) for group in groups]
    fraction_of = {parameter: fraction for fraction, parameters in popped for parameter in parameters}
    built = optimizer(groups)
    if own is not None:
        for group in built.param_groups:
            # All parameters of a group have the same fraction, so read it from the first parameter.
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
    """Return the optimizer and its schedule in a form that Lightning accepts.

    Args:
        module: The module whose `configure_optimizers` is replaced.
        optimizer: Function of parameter groups, for example `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        scheduler: Function of the optimizer; the schedule is stepped after each optimizer step. If the
            keyword `total_steps` of the function is None, the Trainer's number of steps is passed. If
            `scheduler` is None or "none", the rate stays constant; only "none" may replace the module's own
            schedule.
        own_method: The module's own `configure_optimizers`, whose parameter groups are kept.

    Raises:
        ConfigError: The module has its own schedule, and `scheduler` is None.
    """
    groups: list[dict[str, Any]] | None = None
    configured = own_method() if own_method is not None else None
    if configured is not None:
        optimizers, schedules, _ = _configure_optimizers(configured)
        if len(optimizers) != 1:
            allowed = "a module that defines a single optimizer"
            raise ConfigError(key="optimizer", value=f"{len(optimizers)} optimizers", allowed=allowed)
        own: Any = optimizers[0]
        if scheduler is None and (any(schedules) or any("initial_lr" in group for group in own.param_groups)):
            name = type(module).__name__
            allowed = f"a schedule, since {name}'s own is bound to the replaced optimizer"
            remedy = "OptimizerChoice(optimizer=..., scheduler=functools.partial(StepLR, step_size=10))"
            remedies = [remedy, 'OptimizerChoice(optimizer=..., scheduler="none"), for a constant rate']
            raise ConfigError(key="scheduler", value=None, allowed=allowed, remedies=remedies)
        # The replaced optimizer may have hooks on the parameters (optimizer/in_backward.py).
        if hasattr(own, "close"):
            own.close()
        groups = _groups_of(own)
    built = build(module, optimizer, groups)
    if scheduler is None or scheduler == "none":
        return [built], []
    # If the scheduler's parameter `total_steps` is None, pass the Trainer's number of steps.
    keywords = getattr(scheduler, "keywords", {})
    parameter = inspect.signature(getattr(scheduler, "func", scheduler)).parameters.get("total_steps")
    default = "unknown" if parameter is None else parameter.default
    filled: dict[str, Any] = {}
    if keywords.get("total_steps", default) is None:
        # Lightning returns -1 or infinity if it cannot estimate the number of steps.
        steps = module.trainer.estimated_stepping_batches
        filled["total_steps"] = int(steps) if 0 < steps < float("inf") else None
    return [built], [{"scheduler": scheduler(built, **filled), "interval": "step"}]


def _groups_of(own: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of the replaced optimizer, each with its fraction of the learning rate."""
    rates = [float(g.get("max_lr", g.get("initial_lr", g.get("lr", 0.0)))) for g in own.param_groups]
    default = float(own.defaults.get("lr", 0.0))
    # Fractions are relative to the default rate or, if no group uses the default, to the largest rate.
    base = default if default in rates else max(rates)
    groups: list[dict[str, Any]] = []
    for group, rate in zip(own.param_groups, rates, strict=True):
        kept = {"params": group["params"]}
        if base and rate != base:
            kept["lr_fraction"] = rate / base
        # If nothing has a weight decay, a group's 0.0 excludes no parameter.
        if any(each.get("weight_decay") for each in (own.defaults, *own.param_groups)):
            kept["weight_decay"] = group.get("weight_decay")
        groups.append(kept)
    return groups


def parameter_groups(
    module: nn.Module,
    *,
    decays: bool,
    hidden: set[Tensor] | None = None,
    own: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups with weight decay (matrices) and without weight decay.

    Args:
        module: Module whose trainable parameters are split; a shared parameter is counted once.
        decays: Whether the optimizer has a weight decay.
        hidden: Parameters to mark with `hidden: True`; other parameters get `hidden: False`. If None, no
            parameter is marked.
        own: Groups of the module's own optimizer, each of which is split; a key `lr_fraction` is kept.
            Parameters outside of all groups are left out. Frozen parameters in a group are kept.

    Raises:
        ConfigError: No parameter is trainable.

    Example:
        >>> [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2), decays=True)]
        [1, 1]
    """
    candidates = own if own is not None else [{"params": list(module.parameters())}]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, candidate in enumerate(candidates):
        for parameter in candidate["params"]:
            if own is None and not parameter.requires_grad:
                continue
            # Matrices get weight decay, unless the module's own optimizer excluded their group.
            is_decayed = not decays or (parameter.dim() >= 2 and candidate.get("weight_decay") != 0.0)
            options: dict[str, Any] = {} if is_decayed else {"weight_decay": 0.0}
            options |= {"hidden": parameter in hidden} if hidden is not None else {}
            options |= {"lr_fraction": candidate["lr_fraction"]} if "lr_fraction" in candidate else {}
            # Parameters that share an old group and the same options also share a new group.
            key = (index, *options.items())
            groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    if not any(parameter.requires_grad for group in groups.values() for parameter in group["params"]):
        allowed = "a module with a trainable parameter"
        raise ConfigError(key="model", value=type(module).__name__, allowed=allowed)
    # Within each group of `own`, parameters with weight decay come first.
    order = sorted(groups, key=lambda key: (key[0], "weight_decay" in groups[key]))
    return [groups[key] for key in order]


def hidden_matrices(module: nn.Module, rest: Sequence[str] | None = None) -> set[Tensor]:
    """Return the hidden layers' matrices, excluding embeddings and the output layer.

    Only a 2-D parameter whose own name contains `weight` counts as a matrix. A linear layer counts as the
    output layer if it has as many outputs as the largest embedding has entries. For a model without an
    embedding, name the output layer in `rest`.

    Args:
        module: Module whose parameters are searched.
        rest: Patterns for names of further parameters that are not hidden, for example in a classifier.

    Raises:
        ConfigError: A pattern matches no parameter.

    Example:
        >>> layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> len(hidden_matrices(layers)), hidden_matrices(layers, ["2.*"]) == {layers[0].weight}
        (2, True)
    """
    patterns = [rest] if isinstance(rest, str) else list(rest or ())
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            allowed = f"a parameter's name; {suggest_name(pattern, names)}"
            raise ConfigError(key="optimizer.rest", value=pattern, allowed=allowed)
    tables = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    # The largest embedding is the vocabulary; smaller embeddings may be positions or token types.
    vocabulary = max((table.num_embeddings for table in tables), default=0)
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == vocabulary]
    excluded = {parameter for layer in [*tables, *heads] for parameter in layer.parameters(recurse=False)}
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2
        and not parameter.is_complex()
        and "weight" in name.rpartition(".")[2]
        and parameter not in excluded
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
