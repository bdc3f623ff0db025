"""Check the classes in Hydra's own section: only plugins, callbacks and log handlers are allowed."""

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
"""Base class of the remaining classes in Hydra's section, by their path."""
_MAKES_A_MAPPING = re.compile(r"\$\{(?!(now|hydra|oc\.env|python_version):|[\w.@/\[\]]+\})")
"""An interpolation whose resolver may return a mapping, and so a `_target_`; the excluded ones do not."""


def check_hydra(section: Any) -> None:
    """Check the classes in Hydra's own section, not resolved: plugins, callbacks and log handlers.

    Raises:
        ConfigError: A class has another base or is not expected there, depends on a resolver, or a log
            configuration names a factory.
    """
    callbacks = section.get("callbacks") or {}
    if not isinstance(callbacks, Mapping):
        raise ConfigError(key="hydra.callbacks", value=callbacks, allowed="callbacks by name")
    nodes = {f"hydra.callbacks.{name}": node for name, node in callbacks.items() if node is not None}
    nodes |= {path: section.get(path.rpartition(".")[2]) for path in HYDRA_PLUGINS}
    for path, node in nodes.items():
        _check_target(path, node.get("_target_") if isinstance(node, Mapping) else node)
    for path, key, value in walk_leaves(section, "hydra"):
        owner = path.removesuffix("._target_")
        if key == "_target_" and owner not in nodes:
            _check_target(owner, value)
        elif isinstance(value, str) and _MAKES_A_MAPPING.match(value):
            raise ConfigError(path, value, allowed="a value, or the name of one in ${}")
        if not path.startswith(("hydra.job_logging", "hydra.hydra_logging")):
            continue
        if key == "()":
            raise ConfigError(path, value, allowed="no factory in a log configuration")
        if key == "class" and not issubclass(resolve_class(path, value), logging.Handler):
            raise ConfigError(path, value, allowed="a class derived from logging.Handler")
        if key == "filename" and not re.fullmatch(r"\$\{hydra\.runtime\.output_dir\}/[^/]+", str(value)):
            allowed = "a file ${hydra.runtime.output_dir}/NAME in the run's folder"
            raise ConfigError(path, value, allowed=allowed)


def _check_target(path: str, target: object) -> None:
    key, kind = f"{path}._target_", HYDRA_PLUGINS.get(path)
    if kind is not None:
        known = [f"{plugin.__module__}.{plugin.__name__}" for plugin in Plugins.instance().discover(kind)]
        if target not in known:
            hint = suggest_name(str(target), known)
            allowed = f"a {kind.__name__} that is installed as a Hydra plugin; {hint}"
            raise ConfigError(key, target, allowed=allowed)
        return
    base = HYDRA_BASES.get(re.sub(r"^hydra\.callbacks\.[^.]+$", "hydra.callbacks", path))
    if base is None:
        raise ConfigError(key, target, allowed="no class here")
    if not issubclass(resolve_class(path, target), resolve_class(path, base)):
        raise ConfigError(key, target, allowed=f"a class derived from {base}")
