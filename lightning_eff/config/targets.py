"""Resolve the dotted name in a `_target_` to the class it names, and reject anything that is not a class."""

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
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "comet_ml": "comet",
}
"""Packages that an option may need, and this package's extra that installs them."""


def resolve_class(path: str, target: object) -> type:
    """Return the class that a `_target_` names.

    Raises:
        ConfigError: It is not an importable name, or names something that is not a class.
        EnvironmentLacksError: It belongs to a package that is not installed, or its module needs one.

    Example:
        >>> resolve_class("model", "os.system")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: model._target_='os.system': expected a class, ...
    """
    key = f"{path}._target_"
    names = target.split(".") if isinstance(target, str) else []
    if not isinstance(target, str) or len(names) < 2 or not all(name.isidentifier() for name in names):
        raise ConfigError(key, target, allowed="the dotted name of a class, for example my_project.Net")
    found: Any = _import_module(key, target, names[0])
    for count, name in enumerate(names[1:], start=2):
        if hasattr(found, name):
            found = getattr(found, name)
        elif inspect.ismodule(found):
            public = [attribute for attribute in vars(found) if not attribute.startswith("_")]
            found = _import_module(key, target, ".".join(names[:count]), public)
        else:
            raise ConfigError(key, target, allowed=f"a class; {found!r} has no {name!r}")
    if isinstance(found, type):
        return found
    kind = "module" if inspect.ismodule(found) else "function" if callable(found) else type(found).__name__
    raise ConfigError(key, target, allowed=f"a class, not a {kind}")


def _import_module(key: str, target: str, module: str, siblings: Sequence[str] = ()) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        missing = str(error.name or "") if isinstance(error, ModuleNotFoundError) else None
        extra = EXTRAS.get((missing or "").partition(".")[0])
        if extra is not None:
            text = f"{key}={target!r} needs the package {str(missing).partition('.')[0]}"
            text += f"\n  try: pip install 'lightning-eff[{extra}]'"
            raise EnvironmentLacksError(text) from error
        if not missing or not f"{module}.".startswith(f"{missing}."):  # an import inside the module failed
            allowed = f"a class that can be imported; importing its module fails: {error}"
            raise ConfigError(key, target, allowed=allowed) from error
        parent, _, name = module.rpartition(".")
        reason = f"{parent} has no {name!r}" if parent else f"no module {module!r}"
        hint = suggest_name(name, siblings) if siblings else "the current folder is on the import path"
        raise ConfigError(key, target, allowed=f"a class that can be imported; {reason}: {hint}") from error
