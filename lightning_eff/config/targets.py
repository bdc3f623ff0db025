"""From the dotted name in a `_target_` to the class that it names; everything else is refused."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, suggest_name

EXTRAS = {
    "torchao": "optimizers",
    "bitsandbytes": "optimizers",
    "schedulefree": "optimizers",
    "pytorch_optimizer": "optimizers",
}
"""Packages that an option may need, and the extra of ours that installs them."""


def resolve_class(path: str, target: object) -> type:
    """Return the class that a `_target_` names.

    Raises:
        ConfigError: It is no importable name, or what it names is no class.
        EnvironmentLacksError: It belongs to a package that is not installed, or needs one.

    Example:
        >>> resolve_class("model", "torch.nn.Linear").__name__
        'Linear'
        >>> resolve_class("model", "os.system")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: model._target_='os.system': expected a class, ...
    """
    key = f"{path}._target_"
    if (
        not isinstance(target, str)
        or not all(part.isidentifier() for part in target.split("."))
        or "." not in target
    ):
        raise ConfigError(key, target, allowed="the dotted name of a class, for example my_project.Net")
    found = _locate(key, target)
    if not isinstance(found, type):
        kind = (
            "module" if inspect.ismodule(found) else "function" if callable(found) else type(found).__name__
        )
        raise ConfigError(key, target, allowed=f"a class, not a {kind} of this name")
    return found


def _locate(key: str, target: str) -> Any:
    parts = target.split(".")
    found: Any = _import(key, target, parts[0])
    for count, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and inspect.ismodule(found):
            known = [name for name in vars(found) if not name.startswith("_")]
            found = _import(key, target, ".".join(parts[:count]), known)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            raise ConfigError(key, target, allowed=f"a class; {found!r} has no {part!r}")
    return found


def _import(key: str, target: str, module: str, known: Sequence[str] = ()) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        _raise_if_an_extra(key, target, str(error.name).partition(".")[0])
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(
                key, target, allowed=f"a class that can be imported; its module says: {error}"
            ) from error
        parent, _, name = module.rpartition(".")
        place = f"{parent} has no {name!r}" if parent else f"there is no module {module!r}"
        hint = suggest_name(name, known) if known else "the current folder is on the import path"
        raise ConfigError(key, target, allowed=f"a class that can be imported; {place}: {hint}") from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(
            key, target, allowed=f"a class that can be imported; its module says: {error}"
        ) from error


def _raise_if_an_extra(key: str, target: str, package: str) -> None:
    if package in EXTRAS:
        remedy = f"pip install 'lightning-eff[{EXTRAS[package]}]'"
        text = f"{key}={target!r} needs the package {package}\n  try: {remedy}"
        raise EnvironmentLacksError(text)
