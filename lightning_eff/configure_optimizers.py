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
from fnmatch import fnmatchcase
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_eff.errors import ConfigError, SlowPathWarning
from lightning_eff.facade import OptimizerFactory
from lightning_eff.kept_schedule import KeptSchedule

SchedulerFactory = Callable[..., LRScheduler]
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(
    module: nn.Module,
    *,
    decays: bool,
    hidden: set[Tensor] | None = None,
    own: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into matrices and the rest, which gets no weight decay.

    Args:
        module: Its trainable parameters are taken, each once.
        decays: Whether there is a weight decay to keep from the rest.
        hidden: Parameters to tell from the others, by a key of that name.
        own: Groups that the module's own optimizer had: each is split for itself, and a parameter that is
            in none is left out. Their key `share`, if any, is kept.

    Raises:
        ConfigError: Nothing is trainable.

    Example:
        >>> [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2), decays=True)]
        [1, 1]
    """
    candidates = own if own is not None else [{"params": list(module.parameters())}]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, candidate in enumerate(candidates):
        for parameter in candidate["params"]:
            if not parameter.requires_grad:
                continue
            decayed = not decays or (parameter.dim() >= 2 and candidate.get("weight_decay") != 0.0)
            options: dict[str, Any] = {} if decayed else {"weight_decay": 0.0}
            options |= {"hidden": parameter in hidden} if hidden is not None else {}
            options |= {"share": candidate["share"]} if "share" in candidate else {}
            key = (index, *options.items())
            groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    if not groups:
        raise ConfigError(
            key="model", value=type(module).__name__, allowed="a module with a trainable parameter"
        )
    order = sorted(groups, key=lambda key: (key[0], "weight_decay" in groups[key]))
    return [groups[key] for key in order]


def hidden_matrices(module: nn.Module, rest: Sequence[str] | None = None) -> set[Tensor]:
    """Return the matrices between hidden layers: neither embeddings nor layers as wide as a vocabulary.

    Args:
        module: Whose parameters are looked at.
        rest: Patterns of names of parameters that are not hidden either, a classifier's for example.

    Example:
        >>> layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> len(hidden_matrices(layers)), hidden_matrices(layers, ["2.*"]) == {layers[0].weight}
        (2, True)
    """
    tables = [part for part in module.modules() if isinstance(part, EMBEDDINGS)]
    widths = {table.num_embeddings for table in tables}
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features in widths]
    others: set[Tensor] = {layer.weight for layer in [*tables, *heads]}
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2
        and parameter not in others
        and not any(fnmatchcase(name, pattern) for pattern in rest or ())
    }


def build(
    module: nn.Module, optimizer: OptimizerFactory, own: Sequence[Mapping[str, Any]] | None = None
) -> Optimizer:
    """Make the optimizer for `module`; `fused=True` falls back, with a warning, where it cannot run.

    Args:
        module: Whose trainable parameters are optimized.
        optimizer: Called with parameter groups.
        own: Groups of the module's own optimizer, see `parameter_groups`.
    """
    keywords, made = settings(optimizer), classes(optimizer)
    asks = any(getattr(kind, "hidden_groups", False) for kind in made)
    hidden = hidden_matrices(module, keywords.get("rest")) if asks else None
    groups = parameter_groups(module, decays=_decays(optimizer), hidden=hidden, own=own)
    shares = [group.pop("share", None) for group in groups]
    try:
        built = optimizer(groups)
    except RuntimeError as error:
        if not keywords.get("fused") or "fused" not in str(error):
            raise
        text = f"fused=True cannot run here, so the optimizer steps in a loop: {error}"
        warnings.warn(text, SlowPathWarning, stacklevel=2)
        built = optimizer(groups, fused=None)
    if own is not None:
        _scale_rates(built, groups, shares)
    return built


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
    return bool(next((s["weight_decay"].default for s in signatures if "weight_decay" in s), 0.0))


def settings(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords that a factory was given, those of a factory among them included.

    Example:
        >>> from torch.optim import SGD
        >>> settings(functools.partial(SGD, lr=0.1, momentum=0.9))["momentum"]
        0.9
    """
    keywords: dict[str, Any] = dict(getattr(factory, "keywords", {}))
    for inner in [value for value in keywords.values() if isinstance(value, functools.partial)]:
        keywords = settings(inner) | keywords
    return keywords


def classes(factory: Callable[..., Any]) -> list[type]:
    """Return the classes that a factory makes, the outermost first."""
    kind = getattr(factory, "func", factory)
    keywords: Mapping[str, Any] = getattr(factory, "keywords", {})
    inner = [value for value in keywords.values() if isinstance(value, (functools.partial, type))]
    found = [kind] if isinstance(kind, type) else []
    return [*found, *(each for value in inner for each in classes(value))]


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
    if own is None:
        built = build(module, optimizer)
    else:
        built = build(module, optimizer, _shares(own))
        own.state.clear()
    if scheduler is not None:
        keywords: Mapping[str, Any] = getattr(scheduler, "keywords", {})
        filled: dict[str, Any] = {}
        if "total_steps" in keywords and keywords["total_steps"] is None:
            steps = module.trainer.estimated_stepping_batches
            filled["total_steps"] = int(steps) if 0 < steps < float("inf") else None
        return [built], [{"scheduler": scheduler(built, **filled), "interval": "step"}]
    return [built], [_kept(schedule, built) for schedule in schedules]


def _shares(own: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer that is replaced, with their shares of its learning rate."""
    base = own.defaults.get("lr")
    groups: list[dict[str, Any]] = []
    for group in own.param_groups:
        kept = {key: group[key] for key in ("params", "weight_decay") if key in group}
        rate = group.get("initial_lr", group.get("lr"))
        if base and rate is not None and rate != base and "max_lr" not in group:
            kept["share"] = float(rate) / float(base)
        if not own.defaults.get("weight_decay"):
            kept.pop("weight_decay", None)  # none anywhere: nothing was taken from these parameters alone
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


def _kept(schedule: dict[str, Any], built: Optimizer) -> dict[str, Any]:
    on_plateau = schedule.get("reduce_on_plateau", isinstance(schedule["scheduler"], ReduceLROnPlateau))
    kept = KeptSchedule(schedule["scheduler"], built)
    return schedule | {"scheduler": kept, "reduce_on_plateau": on_plateau}
