"""Check what a config may instantiate: each `_target_`, its parameters and their types, before any call.

A group instantiates only classes of the group's base, a nested `_target_` only classes of `NESTED_BASES`.
Functions are rejected: most of what a config could do harm with is one. Naming a class imports its module,
which is the user's own, trusted Python. Types are checked against the constructor's annotations by beartype;
what an annotation cannot express, the constructor checks itself.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_eff.config.targets import resolve_class
from lightning_eff.core.arguments import check_value
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS
from lightning_eff.core.errors import ConfigError, suggest_name

GROUP_BASES = {
    "model": "lightning.pytorch.LightningModule",
    "data": "lightning.pytorch.LightningDataModule",
    "callbacks": "lightning.pytorch.Callback",
    "monitors": "lightning.pytorch.Callback",
    "precision": "lightning.pytorch.plugins.precision.Precision",
    "strategy": "lightning.pytorch.strategies.Strategy",
    "checkpoint_io": "lightning.pytorch.plugins.io.CheckpointIO",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "logger": "lightning.pytorch.loggers.Logger",
    "launch": "lightning_eff.launch.ray.Ray",
}
MODULE_OPTIMIZER = "lightning_eff.optimizer.module.ModuleOptimizer"
"""What `optimizer=module` names in the place of an optimizer: a callback that keeps the module's own."""
IGNORE_ARGUMENTS = ("lightning.pytorch.core.datamodule", "lightning.pytorch.core.module")
"""Modules of constructors that take any argument and use none: what a class without its own inherits."""
RUN_TYPES = {
    "seed": int, "ckpt_path": str | None, "output_root": str, "run_dir": str, "plan_longest": bool,
    "optimized_metric": str | None, "task_name": str | None, "tags": list[str] | None,
}  # fmt: skip
RUN_KEYS = tuple(RUN_TYPES)
TOP_LEVEL = (*RUN_KEYS, "trainer", *GROUP_BASES)
"""Keys at the top level of a composed config."""
CALLED_LATER = ("torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler")
"""Classes that become partials: their first argument (parameters, optimizer) exists only in `fit`."""
NESTED_BASES = (
    "torch.nn.Module",
    "torch.utils.data.Dataset",
    "torch.utils.data.Sampler",
    *CALLED_LATER,
    "lightning.pytorch.Callback",
    "lightning.pytorch.loggers.Logger",
)
DIRECTIVES = ("_target_", "_partial_", "_recursive_", "_convert_")
"""Hydra's own keys. `_args_` is rejected: positional arguments cannot be checked by name."""
_KIND = inspect.Parameter


def check_config_values(values: dict[str, Any]) -> None:
    """Check every class, key and type of a composed config; optimizers and schedulers become partials.

    Raises:
        ConfigError: A value cannot be used.
    """
    for path, _, value in walk_leaves(values):
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(path, value, allowed="a number")
        if isinstance(value, int) and abs(value) >= 2**64:
            raise ConfigError(path, f"{str(value)[:12]}...", allowed="a whole number of at most 64 bits")
    for key, hint in RUN_TYPES.items():
        check_value(key, values.get(key), hint)
    if not 0 <= values["seed"] < 2**32:
        raise ConfigError(key="seed", value=values["seed"], allowed="a whole number from 0 to 2**32 - 1")
    _check_trainer(values.get("trainer"))
    for required in ("model", "data", "optimizer"):
        if not isinstance(values.get(required), dict):
            allowed = "an option of this group, for example in the recipe"
            raise ConfigError(required, values.get(required), allowed=allowed)
    for group, base in GROUP_BASES.items():
        for path, node in _nodes(group, values.get(group)):
            _check_node(path, node, (base,))


def _nodes(group: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and dictionary of each class that a group instantiates."""
    if value is None or (group == "strategy" and isinstance(value, str)):
        return
    if not isinstance(value, dict):
        raise ConfigError(group, value, allowed="an option of this group; lightning-eff ls lists them")
    if group == "launch" and "_target_" not in value:
        raise ConfigError(group, value, allowed="an option beside it", remedies=["launch=ray"])
    if group not in MULTI_CHOICE_GROUPS or (group == "logger" and "_target_" in value):
        yield group, value  # the only logger of a run of earlier versions has no name
        return
    for name, node in value.items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            allowed = f"an option in the list: {name!r} is not in {group}"
            options = [file.stem for file in (CONF / group).glob("*.yaml")]
            allowed += "" if name in options else f"; {suggest_name(name, options)}"
            remedies = [f"+{group}={name}"] if name in options else []
            raise ConfigError(key=f"{group}.{name}", value=node, allowed=allowed, remedies=remedies)
        if node is not None:
            yield f"{group}.{name}", node


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, dict):
        allowed = "trainer=default or another option of this group"
        raise ConfigError(key="trainer", value=trainer, allowed=allowed)
    from lightning.pytorch import Trainer

    for key in {"callbacks", "logger", "plugins", "strategy", "precision"} & trainer.keys():
        group = "precision" if key == "plugins" else key
        allowed = f"nothing here: a recipe sets it through the group {group!r}"
        raise ConfigError(key=f"trainer.{key}", value=trainer[key], allowed=allowed)
    own = ("num_nodes",) if trainer.get("num_nodes") == "auto" else ()  # Lightning has no such value
    _check_parameters("trainer", {k: v for k, v in trainer.items() if k not in own}, Trainer, partial=False)
    clip = trainer.get("gradient_clip_val")
    if clip is not None and clip < 0:
        allowed = "a number of at least 0, or null for no clipping"
        raise ConfigError(key="trainer.gradient_clip_val", value=clip, allowed=allowed)


def foreign_keys(path: str, target: object, keys: Iterable[object]) -> list[str]:
    """Return those of `keys` that are not parameters of a class.

    Example:
        >>> foreign_keys("model", "torch.nn.Linear", ["in_features", "vocab_size", "_target_"])
        ['vocab_size']
    """
    parameters, takes_any = _parameters(resolve_class(path, target))
    known = {*parameters, *DIRECTIVES}
    return [] if takes_any else sorted(str(key) for key in keys if str(key) not in known)


def _check_node(path: str, node: dict[str, Any], bases: Sequence[str]) -> None:
    target = node.get("_target_")
    found = resolve_class(path, target)
    is_kept = path == "optimizer" and target == MODULE_OPTIMIZER
    if not is_kept and not any(issubclass(found, resolve_class(path, base)) for base in bases):
        expected = bases[0] if len(bases) == 1 else f"one of {', '.join(bases)}"
        raise ConfigError(key=f"{path}._target_", value=target, allowed=f"a class derived from {expected}")
    if issubclass(found, tuple(resolve_class(path, base) for base in CALLED_LATER)):
        node["_partial_"] = True
    _check_parameters(path, node, found, partial=bool(node.get("_partial_")))


def _check_parameters(path: str, node: dict[str, Any], owner: type, *, partial: bool) -> None:
    """Check a node's keys and types; of a partial, the first parameter is not the config's to set."""
    parameters, takes_any = _parameters(owner)
    names = list(parameters)[1 if partial else 0 :]
    try:
        hints = typing.get_type_hints(owner.__init__, include_extras=True)
    except (NameError, TypeError, AttributeError):  # an annotation that cannot be evaluated at run time
        hints = {}
    for key, value in node.items():
        if key in DIRECTIVES:
            continue
        if key == "_args_" or (key not in names and not takes_any):
            allowed = f"a parameter of {owner.__name__}; {suggest_name(key, names)}"
            raise ConfigError(key=f"{path}.{key}", value=value, allowed=allowed)
        if not _check_nested(f"{path}.{key}", value):
            check_value(f"{path}.{key}", value, hints.get(key, Any), none="null")
    variadic = (_KIND.VAR_KEYWORD, _KIND.VAR_POSITIONAL)
    needed = [name for name in names if name not in node and parameters[name].kind not in variadic]
    missing = [name for name in needed if parameters[name].default is _KIND.empty]
    if missing and not partial:
        allowed = f"a value: {owner.__name__} has no default for it"
        raise ConfigError(key=f"{path}.{missing[0]}", value=None, allowed=allowed)


def _check_nested(path: str, value: Any) -> bool:
    """Check every `_target_` below a value; return whether there was one."""
    if isinstance(value, dict) and "_target_" in value:
        _check_node(path, value, NESTED_BASES)
        return True
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return any([_check_nested(*child) for child in children])  # noqa: C419 - every child is to be checked


def _parameters(owner: type) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Return a constructor's parameters, and whether it takes any keyword."""
    if getattr(owner.__init__, "__module__", "") in IGNORE_ARGUMENTS:  # a slot of C has none
        return {}, False
    _, *others = inspect.signature(
        owner.__init__
    ).parameters.items()  # the first one, by whatever name, is self
    parameters = dict(others)
    return parameters, any(parameter.kind is _KIND.VAR_KEYWORD for parameter in parameters.values())


def walk_leaves(node: Any) -> list[tuple[str, str, Any]]:
    """Return path, last key and value of everything that is neither mapping nor list, in order.

    Example:
        >>> walk_leaves({"a": {"b": 1}, "c": [2]})
        [('a.b', 'b', 1), ('c[0]', 'c', 2)]
    """
    leaves: list[tuple[str, str, Any]] = []
    nodes: list[tuple[str, str, Any]] = [("", "", node)]
    while nodes:
        path, name, value = nodes.pop()
        if isinstance(value, Mapping):
            inside = [(f"{path}.{key}".lstrip("."), str(key), item) for key, item in value.items()]
            nodes += reversed(inside)
        elif isinstance(value, list):
            nodes += reversed([(f"{path}[{index}]", name, item) for index, item in enumerate(value)])
        else:
            leaves.append((path, name, value))
    return leaves
