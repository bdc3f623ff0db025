"""What a config may instantiate: each `_target_`, its parameters and their types, checked before any call.

A group instantiates only classes of the group's base, a nested `_target_` only classes of `NESTED_BASES`.
Functions are refused: most of what a config could do harm with is one. Naming a class imports its module;
that is the user's own, trusted Python. Types are held against the constructor's annotations by beartype.
What an annotation cannot say, the constructor checks itself.
"""

from __future__ import annotations

import inspect
import math
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_eff.config.targets import resolve_class
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
}
RUN_KEYS = ("seed", "ckpt_path", "output_root", "run_dir")
TOP_LEVEL = (*RUN_KEYS, "trainer", *GROUP_BASES)
"""What may stand at the top of a composed config."""
NESTED_BASES = (
    "torch.nn.Module",
    "torch.utils.data.Dataset",
    "torch.utils.data.Sampler",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "lightning.pytorch.Callback",
    "lightning.pytorch.loggers.Logger",
)
PARTIAL_GROUPS = ("optimizer", "scheduler")
"""Groups whose class is called later, with what it works on as first argument."""
CALLED_LATER = ("torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler")
"""Classes that are called with what they work on, also where they are an argument of another."""
DIRECTIVES = ("_target_", "_partial_", "_recursive_", "_convert_")
"""Hydra's own keys. `_args_` is refused: positional arguments cannot be checked by name."""


def check_config_values(values: dict[str, Any]) -> None:
    """Check every class, key and type of a composed config; groups whose class is called later are marked so.

    Args:
        values: The resolved config.

    Raises:
        ConfigError: Something cannot be used.
    """
    _check_numbers(values)
    _check_run(values)
    _check_trainer(values)
    for required in ("model", "data", "optimizer"):
        if not isinstance(values.get(required), dict):
            raise ConfigError(
                required, values.get(required), allowed="an option of this group, for example in the recipe"
            )
    for group, base in GROUP_BASES.items():
        for path, node in _nodes(group, values.get(group)):
            _check_node(path, node, (base,), partial=group in PARTIAL_GROUPS)


def _nodes(group: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the dictionary of each class that a group instantiates."""
    if value is None or (group == "strategy" and isinstance(value, str)):
        return
    if not isinstance(value, dict):
        raise ConfigError(group, value, allowed="an option of this group; ls shows them")
    if group not in ("callbacks", "monitors"):
        yield group, value
        return
    for name, node in value.items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            text = f"an option that was asked for: {name!r} is not in {group}"
            raise ConfigError(key=f"{group}.{name}", value=node, allowed=text, remedies=[f"+{group}={name}"])
        if node is not None:
            yield f"{group}.{name}", node


def _check_numbers(values: dict[str, Any]) -> None:
    """Refuse numbers that no setting means: what is no number, and whole ones of more than 64 bits."""
    for path, _, value in walk_leaves(values):
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(path, value, allowed="a number")
        if isinstance(value, int) and abs(value) >= 2**64:
            raise ConfigError(path, f"{str(value)[:12]}...", allowed="a whole number of at most 64 bits")


def _check_run(values: dict[str, Any]) -> None:
    hints = {"seed": int, "ckpt_path": str | None, "output_root": str, "run_dir": str}
    for key, hint in hints.items():
        _check_type(key, values.get(key), hint)
    if not 0 <= values["seed"] < 2**32:
        raise ConfigError(key="seed", value=values["seed"], allowed="a whole number from 0 to 2**32 - 1")


def _check_trainer(values: dict[str, Any]) -> None:
    trainer = values.get("trainer")
    if not isinstance(trainer, dict):
        raise ConfigError(
            key="trainer", value=trainer, allowed="trainer=default or another option of this group"
        )
    from lightning.pytorch import Trainer

    ours = {"callbacks", "logger", "plugins", "strategy", "precision"}
    for key in ours & trainer.keys():
        text = (
            f"nothing here: a recipe sets it through the group {'precision' if key == 'plugins' else key!r}"
        )
        raise ConfigError(key=f"trainer.{key}", value=trainer[key], allowed=text)
    _check_parameters("trainer", trainer, Trainer, skip_first=False, partial=True)
    clip = trainer.get("gradient_clip_val")
    if clip is not None and clip < 0:
        allowed = "a number of at least 0, or null for no clipping"
        raise ConfigError(key="trainer.gradient_clip_val", value=clip, allowed=allowed)


def foreign_keys(path: str, target: object, keys: Iterable[object]) -> list[str]:
    """Return those of `keys` that are no parameters of a class.

    Raises:
        ConfigError: `target` names no class.

    Example:
        >>> foreign_keys("model", "torch.nn.Linear", ["in_features", "vocab_size", "_target_"])
        ['vocab_size']
    """
    parameters = _parameters(resolve_class(path, target))
    known = {*parameters, *DIRECTIVES}
    return [] if _takes_anything(parameters) else sorted(str(key) for key in keys if str(key) not in known)


def _check_node(path: str, node: dict[str, Any], bases: Sequence[str], *, partial: bool = False) -> None:
    target = node.get("_target_")
    found = resolve_class(path, target)
    if not any(issubclass(found, resolve_class(path, base)) for base in bases):
        expected = bases[0] if len(bases) == 1 else f"one of {', '.join(bases)}"
        raise ConfigError(key=f"{path}._target_", value=target, allowed=f"a class derived from {expected}")
    if partial or issubclass(found, tuple(resolve_class(path, base) for base in CALLED_LATER)):
        node["_partial_"] = True
    partial = bool(node.get("_partial_"))
    _check_parameters(path, node, found, skip_first=partial, partial=partial)


def _check_parameters(
    path: str, node: dict[str, Any], owner: type, *, skip_first: bool, partial: bool
) -> None:
    parameters = _parameters(owner)
    names = list(parameters)[1 if skip_first else 0 :]
    hints = _hints(owner)
    for key, value in node.items():
        if key in DIRECTIVES:
            continue
        if key not in names and not _takes_anything(parameters):
            raise ConfigError(
                key=f"{path}.{key}",
                value=value,
                allowed=f"a parameter of {owner.__name__}; {suggest_name(key, names)}",
            )
        if not _check_nested(f"{path}.{key}", value):
            _check_type(f"{path}.{key}", value, hints.get(key, Any))
    missing = [
        name for name in names if parameters[name].default is inspect.Parameter.empty and name not in node
    ]
    missing = [
        name for name in missing if parameters[name].kind not in (_KIND.VAR_KEYWORD, _KIND.VAR_POSITIONAL)
    ]
    if missing and not partial:
        raise ConfigError(
            key=f"{path}.{missing[0]}", value=None, allowed=f"a value: {owner.__name__} has no default for it"
        )


def _check_nested(path: str, value: Any) -> bool:
    """Check every `_target_` below a value; say whether there was one."""
    found = False
    if isinstance(value, dict):
        if "_target_" in value:
            _check_node(path, value, NESTED_BASES)
            return True
        for key, item in value.items():
            found |= _check_nested(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found |= _check_nested(f"{path}[{index}]", item)
    return found


def _check_type(path: str, value: Any, hint: Any) -> None:
    from beartype import BeartypeConf
    from beartype.door import is_bearable
    from beartype.roar import BeartypeDecorHintPep585DeprecationWarning

    conf = BeartypeConf(is_pep484_tower=True)
    candidates = [value, tuple(value)] if isinstance(value, list) else [value]
    with warnings.catch_warnings():  # about how a library wrote its annotations
        warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
        fits = any(is_bearable(candidate, hint, conf=conf) for candidate in candidates)
    if isinstance(value, bool) and fits:
        fits = hint is Any or bool in _flat(hint) or not {int, float} & _flat(hint)
    if not fits:
        raise ConfigError(path, value, allowed=_words(hint))


def _flat(hint: Any) -> set[Any]:
    arguments = typing.get_args(hint)
    return {hint}.union(*(_flat(argument) for argument in arguments)) if arguments else {hint}


def _words(hint: Any) -> str:
    text = inspect.formatannotation(hint).replace("typing.", "")
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}.get(
        text, text
    )


_KIND = inspect.Parameter


def _parameters(owner: type) -> Mapping[str, inspect.Parameter]:
    parameters = dict(inspect.signature(owner.__init__).parameters)
    parameters.pop("self", None)
    return parameters


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is _KIND.VAR_KEYWORD for parameter in parameters.values())


def _hints(owner: type) -> Mapping[str, Any]:
    """Return the constructor's annotations; none when one of them cannot be evaluated at run time."""
    try:
        return typing.get_type_hints(owner.__init__)
    except (NameError, TypeError, AttributeError):
        return {}


def walk_leaves(node: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield path, last key and value of everything that is neither mapping nor list.

    Example:
        >>> list(walk_leaves({"a": {"b": 1}, "c": [2]}))
        [('a.b', 'b', 1), ('c[0]', 'c', 2)]
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from walk_leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from walk_leaves(value, f"{path}[{index}]")
    else:
        yield path, path.rpartition(".")[2].partition("[")[0], node
