"""What may stand in Hydra's own section: its plugins, callbacks and log handlers, and no other class."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper

from lightning_eff.config.targets import resolve_class
from lightning_eff.config.validate import walk_leaves
from lightning_eff.core.errors import ConfigError, suggest_name

HYDRA_PLUGINS: Mapping[str, type[Plugin]] = {"hydra.launcher": Launcher, "hydra.sweeper": Sweeper}
HYDRA_BASES = {
    "hydra.callbacks": "hydra.experimental.callback.Callback",
    "hydra.sweeper.sampler": "optuna.samplers.BaseSampler",
}
"""Classes in Hydra's own section beside its plugins: where they stand, and what they are."""
_MAKES_A_MAPPING = re.compile(r"\$\{(?!(now|hydra|oc\.env|python_version):|[\w.@/\[\]]+\})")
"""A value that is one interpolation, and not of a resolver that returns texts: it may bring a `_target_`."""


def check_hydra(section: Any) -> None:
    """Check the classes in Hydra's own section: plugins, callbacks and log handlers.

    Args:
        section: Plain dictionaries, interpolations as they are written.

    Raises:
        ConfigError: A class is not of the expected base, is where none is expected, or cannot be told before
            the run; or a log configuration names a factory.
    """
    callbacks = section.get("callbacks") or {}
    if not isinstance(callbacks, Mapping):
        raise ConfigError(key="hydra.callbacks", value=callbacks, allowed="callbacks by name")
    nodes = {f"hydra.callbacks.{name}": node for name, node in callbacks.items() if node is not None}
    nodes |= {path: section.get(path.rpartition(".")[2]) for path in HYDRA_PLUGINS}
    for path, node in nodes.items():
        _check_hydra_target(path, node.get("_target_") if isinstance(node, Mapping) else node)
    for path, key, value in walk_leaves(section, "hydra"):
        owner = path.removesuffix("._target_")
        if key == "_target_" and owner not in nodes:
            _check_hydra_target(owner, value)
        elif isinstance(value, str) and _MAKES_A_MAPPING.match(value):
            raise ConfigError(path, value, allowed="a value, or the name of one in ${}")
    for part in ("job_logging", "hydra_logging"):
        _check_logging(section.get(part) or {}, f"hydra.{part}")


def _check_hydra_target(path: str, target: object) -> None:
    """Refuse a class of Hydra's section that is not of the kind that belongs there."""
    kind = HYDRA_PLUGINS.get(path)
    if kind is not None:
        known = [f"{each.__module__}.{each.__name__}" for each in Plugins.instance().discover(kind)]
        if target not in known:
            allowed = (
                f"a {kind.__name__} that is installed as Hydra's plugin; {suggest_name(str(target), known)}"
            )
            raise ConfigError(key=f"{path}._target_", value=target, allowed=allowed)
        return
    base = HYDRA_BASES.get(re.sub(r"^hydra\.callbacks\.[^.]+$", "hydra.callbacks", path))
    if base is None:
        raise ConfigError(key=f"{path}._target_", value=target, allowed="no class here")
    if not issubclass(resolve_class(path, target), resolve_class(path, base)):
        raise ConfigError(key=f"{path}._target_", value=target, allowed=f"a class derived from {base}")


def _check_logging(node: Any, part: str) -> None:
    for path, key, value in walk_leaves(node, part):
        if key == "()":
            raise ConfigError(path, value, allowed="no factory in a log configuration")
        if key == "class" and not issubclass(resolve_class(path, value), logging.Handler):
            raise ConfigError(path, value, allowed="a class derived from logging.Handler")
        if key == "filename" and not re.fullmatch(r"\$\{hydra\.runtime\.output_dir\}/[^/]+", str(value)):
            raise ConfigError(
                path, value, allowed="a file ${hydra.runtime.output_dir}/NAME in the run's folder"
            )
