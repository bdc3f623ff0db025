"""Check Hydra's own section: it may name installed plugins and a sweeper's sampler, and run no other code."""

from __future__ import annotations

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
SAMPLER, SAMPLER_BASE = "hydra.sweeper.sampler", "optuna.samplers.BaseSampler"
CALLED = "hydra.sweeper.custom_search_space"
"""Where Optuna's sweeper takes the name of a function."""
LOG_CLASSES = re.compile(r"hydra\.(job|hydra)_logging\.(handlers|formatters|filters)\.")
"""Keys from which Python's logging builds classes, or writes to a file."""
_MAKES_A_MAPPING = re.compile(r"\$\{(?!(now|hydra|oc\.env|python_version):|[\w.@/\[\]]+\})")
"""An interpolation whose resolver may return a mapping, and so a `_target_`; the excluded ones do not."""


def check_hydra(section: Any) -> None:
    """Check the classes in Hydra's own section, which is not resolved yet.

    Raises:
        ConfigError: A class is not expected there, is no plugin, or depends on a resolver.
    """
    for name, kind in HYDRA_PLUGINS.items():
        node = section.get(name.rpartition(".")[2])
        target = node.get("_target_") if isinstance(node, Mapping) else node
        known = [f"{plugin.__module__}.{plugin.__name__}" for plugin in Plugins.instance().discover(kind)]
        if target not in known:
            hint = suggest_name(str(target), known)
            allowed = f"a {kind.__name__} that is installed as a Hydra plugin; {hint}"
            key = f"{name}._target_"
            raise ConfigError(key, target, allowed=allowed)
    # LD_PRELOAD or PYTHONPATH would run code in a worker. Hydra adds what `env_copy` names.
    if variables := [*(section["job"].get("env_set") or ())]:
        allowed = "none, nor in env_copy: set environment variables where you start the run"
        raise ConfigError("hydra.job.env_set", variables, allowed=allowed)
    for path, key, value in walk_leaves({"hydra": section}):
        owner = path.removesuffix("._target_")
        if path == CALLED and value is not None:
            raise ConfigError(path, value, allowed="null: no function is called by its name")
        if isinstance(value, str) and _MAKES_A_MAPPING.match(value):
            raise ConfigError(path, value, allowed="a value, or the name of one in ${}")
        if LOG_CLASSES.match(path) or (key == "_target_" and owner not in (*HYDRA_PLUGINS, SAMPLER)):
            raise ConfigError(path, value, allowed="no class here")
        if (
            key == "_target_"
            and owner == SAMPLER
            and not issubclass(resolve_class(owner, value), resolve_class(owner, SAMPLER_BASE))
        ):
            raise ConfigError(path, value, allowed=f"a class derived from {SAMPLER_BASE}")
