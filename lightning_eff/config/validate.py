"""Check a composed config before any object is built: classes, their parameters and types, and folders.

A group instantiates only subclasses of the group's base class. A nested `_target_` instantiates only
subclasses of `_nested_bases`. Functions are rejected, because calling an arbitrary function is the most
dangerous thing that a config could do. The check of a class imports its module, which is trusted code of the
user. Types are checked by beartype against the constructor's annotations; the constructor checks all other
conditions. A run writes only below `output_root`. Hydra's own section may name installed plugins and a
sweeper's sampler, but no other code. `resolution.py` calls this module.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig

from lightning_eff.core.arguments import check_value
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, check_path, suggest_name

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
"""Class that `optimizer=module` names: a callback that keeps the module's own optimizer."""
IGNORE_ARGUMENTS = ("lightning.pytorch.core.datamodule", "lightning.pytorch.core.module")
"""Modules of base classes with a constructor that accepts all arguments and ignores them."""
RUN_TYPES = {
    "seed": int, "ckpt_path": str | None, "output_root": str, "run_dir": str, "plan_longest": bool,
    "optimized_metric": str | None, "task_name": str | None, "tags": list[str] | None,
}  # fmt: skip
RUN_KEYS = tuple(RUN_TYPES)
TOP_LEVEL = (*RUN_KEYS, "trainer", *GROUP_BASES)
"""Top-level keys of a composed config."""
DIRECTIVES = ("_target_", "_partial_", "_recursive_", "_convert_")
"""Hydra's own keys. `_args_` is rejected, because positional arguments cannot be checked by name."""
_KIND = inspect.Parameter
EXTRAS = {
    "torchao": "optimizers",
    "bitsandbytes": "optimizers",
    "schedulefree": "optimizers",
    "pytorch_optimizer": "optimizers",
}
"""For each package that an option may need: the extra of `lightning-eff` that installs this package."""
WRITTEN_FOLDERS = (
    "run_dir", "default_root_dir", "dirpath", "save_dir", "cache_dir", "root_dir", "log_dir", "dir",
    "offline_directory",
)  # fmt: skip
"""Keys whose value is a folder to which a run writes."""
WRITTEN_NAMES = ("name", "version", "filename", "sub_dir")
"""Keys whose value is appended to a folder to which a run writes."""
HYDRA_PLUGINS: Mapping[str, type[Plugin]] = {"hydra.launcher": Launcher, "hydra.sweeper": Sweeper}
SAMPLER, SAMPLER_BASE = "hydra.sweeper.sampler", "optuna.samplers.BaseSampler"
CALLED = "hydra.sweeper.custom_search_space"
"""Key in the settings of Optuna's sweeper. The value is the name of a function, which Optuna's sweeper
calls."""
LOG_CLASSES = re.compile(r"hydra\.(job|hydra)_logging\.(handlers|formatters|filters)\.")
"""Keys with which Python's logging builds classes or writes to a file."""
_MAKES_A_MAPPING = re.compile(r"\$\{(?!(now|hydra|oc\.env|python_version):|[\w.@/\[\]]+\})")
"""An interpolation with a resolver that may return a mapping, and so a `_target_`. The pattern excludes
resolvers that cannot return a mapping."""


def check_config_values(values: dict[str, Any]) -> None:
    """Check every class, key and type of a composed config; turn optimizers and schedulers into partials.

    Raises:
        ConfigError: A value cannot be used.
    """
    # YAML reads `.nan` as a float, which an annotation without a range would accept.
    for path, _, value in walk_leaves(values):
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(path, value, allowed="a number")
        if isinstance(value, int) and abs(value) >= 2**64:
            raise ConfigError(path, f"{str(value)[:12]}...", allowed="a whole number of at most 64 bits")
    for key, hint in RUN_TYPES.items():
        check_value(key, values.get(key), hint)
    if not 0 <= values["seed"] < 2**32:
        raise ConfigError(key="seed", value=values["seed"], allowed="a whole number from 0 to 2**32 - 1")
    for required in ("model", "data", "optimizer"):
        if not isinstance(values.get(required), dict):
            allowed = "an option of this group, for example in the recipe"
            raise ConfigError(required, values.get(required), allowed=allowed)
    nodes = [
        (*each, base) for group, base in GROUP_BASES.items() for each in _nodes(group, values.get(group))
    ]
    for path, node, _ in nodes:
        _check_own_keys(path, node)
    # `_check_trainer` imports Lightning, which takes seconds, so the errors above are reported first.
    _check_trainer(values.get("trainer"))
    for path, node, base in nodes:
        _check_node(path, node, (resolve_class(path, base),))


def _nodes(group: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the settings of each class that a group instantiates."""
    # A strategy may also be one of Lightning's names, such as `ddp`.
    if value is None or (group == "strategy" and isinstance(value, str)):
        return
    if not isinstance(value, dict):
        raise ConfigError(group, value, allowed="an option of this group; lightning-eff ls lists them")
    if group == "launch" and "_target_" not in value:
        raise ConfigError(group, value, allowed="an option as well as its settings", remedies=["launch=ray"])
    if group not in MULTI_CHOICE_GROUPS:
        yield group, value
        return
    options = [file.stem for file in (CONF / group).glob("*.yaml")]
    listed = [name for name, node in value.items() if isinstance(node, dict) and "_target_" in node]
    for name, node in value.items():
        if name in listed:
            yield f"{group}.{name}", node
        elif node is not None:
            allowed = f"an option in the list: {name!r} is not in {group}"
            if listed and name not in options and not isinstance(node, dict):
                allowed = f"a setting of one option: {' or '.join(f'{group}.{own}.{name}' for own in listed)}"
            elif name not in options:
                allowed += f"; {suggest_name(name, options)}"
            remedies = [f"+{group}={name}"] if name in options else []
            raise ConfigError(key=f"{group}.{name}", value=node, allowed=allowed, remedies=remedies)


def _check_own_keys(path: str, node: Mapping[str, Any]) -> None:
    """Reject a key that is not in the YAML of a class of this package; the YAML lists all parameters."""
    # A technique's YAML has the name of its module.
    module, _, class_name = str(node.get("_target_")).rpartition(".")
    file = CONF / path.partition(".")[0] / f"{module.rpartition('.')[2]}.yaml"
    written: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not module.startswith("lightning_eff.") or written.get("_target_") != node.get("_target_"):
        return
    names = [key for key in written if not key.startswith("_")]
    for key in (key for key in node if key not in (*written, *DIRECTIVES)):
        allowed = f"a parameter of {class_name}; {suggest_name(key, names)}"
        raise ConfigError(key=f"{path}.{key}", value=node[key], allowed=allowed)


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, dict):
        allowed = "trainer=default or another option of this group"
        raise ConfigError(key="trainer", value=trainer, allowed=allowed)
    from lightning.pytorch import Trainer

    for key in {"callbacks", "logger", "plugins", "strategy", "precision"} & trainer.keys():
        group = "precision" if key == "plugins" else key
        allowed = f"nothing here: a recipe sets it through the group {group!r}"
        raise ConfigError(key=f"trainer.{key}", value=trainer[key], allowed=allowed)
    own = ("num_nodes",) if trainer.get("num_nodes") == "auto" else ()  # Lightning does not accept this value
    _check_parameters("trainer", {k: v for k, v in trainer.items() if k not in own}, Trainer, partial=False)
    clip = trainer.get("gradient_clip_val")
    if clip is not None and clip < 0:
        allowed = "a number of at least 0, or null for no clipping"
        raise ConfigError(key="trainer.gradient_clip_val", value=clip, allowed=allowed)


def foreign_keys(path: str, target: object, keys: Iterable[object]) -> list[str]:
    """Return the keys in `keys` that are not parameters of a class.

    Example:
        >>> foreign_keys("model", "torch.nn.Linear", ["in_features", "vocab_size", "_target_"])
        ['vocab_size']
    """
    parameters, takes_any = _parameters(resolve_class(path, target))
    known = {*parameters, *DIRECTIVES}
    return [] if takes_any else sorted(str(key) for key in keys if str(key) not in known)


def _check_node(path: str, node: dict[str, Any], bases: tuple[type, ...]) -> None:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    target = node.get("_target_")
    found = resolve_class(path, target)
    is_kept = path == "optimizer" and target == MODULE_OPTIMIZER
    if not is_kept and not issubclass(found, bases):
        names = [f"{base.__module__}.{base.__qualname__}" for base in bases]
        expected = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        raise ConfigError(key=f"{path}._target_", value=target, allowed=f"a class derived from {expected}")
    # Optimizers and schedulers become partials: their first argument exists only during `fit`.
    if issubclass(found, (Optimizer, LRScheduler)):
        node["_partial_"] = True
    _check_parameters(path, node, found, partial=bool(node.get("_partial_")))


def _check_parameters(path: str, node: dict[str, Any], owner: type, *, partial: bool) -> None:
    """Check a node's keys and types; the config cannot set the first parameter of a partial."""
    parameters, takes_any = _parameters(owner)
    names = list(parameters)[1 if partial else 0 :]
    try:
        hints = typing.get_type_hints(owner.__init__, include_extras=True)
    except (NameError, TypeError, AttributeError):  # an annotation cannot be evaluated at run time
        hints = {}
    for key, value in node.items():
        if key in DIRECTIVES:
            continue
        if key == "_args_" or (key not in names and not takes_any):
            allowed = f"a parameter of {owner.__name__}; {suggest_name(key, names)}"
            raise ConfigError(key=f"{path}.{key}", value=value, allowed=allowed)
        if not (isinstance(value, (dict, list)) and _check_nested(f"{path}.{key}", value)):
            check_value(f"{path}.{key}", value, hints.get(key, Any), none="null")
    variadic = (_KIND.VAR_KEYWORD, _KIND.VAR_POSITIONAL)
    # `*args` and `**kwargs` have no default, but need no value.
    needed = [name for name in names if name not in node and parameters[name].kind not in variadic]
    missing = [name for name in needed if parameters[name].default is _KIND.empty]
    if missing and not partial:
        allowed = f"a value: {owner.__name__} has no default for it"
        raise ConfigError(key=f"{path}.{missing[0]}", value=None, allowed=allowed)


def _check_nested(path: str, value: Any) -> bool:
    """Check every `_target_` inside a mapping or list; return whether there is a `_target_`."""
    if isinstance(value, dict) and "_target_" in value:
        _check_node(path, value, _nested_bases())
        return True
    children = [(f"{path}.{key}", item) for key, item in value.items()] if isinstance(value, dict) else []
    if isinstance(value, list):
        children = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    # A list, not a generator: `any` would stop at the first `_target_`, and all must be checked.
    inside = [_check_nested(*child) for child in children if isinstance(child[1], (dict, list))]
    return any(inside)


def _nested_bases() -> tuple[type, ...]:
    # Imported here, because these imports take seconds and many errors are found earlier.
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset, Sampler

    return Module, Dataset, Sampler, Optimizer, LRScheduler, Callback, Logger


def _parameters(owner: type) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Return a constructor's parameters, and whether it accepts any keyword."""
    if getattr(owner.__init__, "__module__", "") in IGNORE_ARGUMENTS:  # a C slot has no __module__
        return {}, False
    _, *others = inspect.signature(
        owner.__init__
    ).parameters.items()  # the first parameter is self, whatever its name is
    parameters = dict(others)
    return parameters, any(parameter.kind is _KIND.VAR_KEYWORD for parameter in parameters.values())


def walk_leaves(node: Any) -> list[tuple[str, str, Any]]:
    """Return path, last key and value of each leaf (neither mapping nor list), in order.

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
            # Reversed, because `pop` takes the last node first.
            nodes += reversed(inside)
        elif isinstance(value, list):
            nodes += reversed([(f"{path}[{index}]", name, item) for index, item in enumerate(value)])
        else:
            leaves.append((path, name, value))
    return leaves


def resolve_class(path: str, target: object) -> type:
    """Return the class that a `_target_` names.

    Raises:
        ConfigError: The name cannot be imported, or is not the name of a class.
        EnvironmentLacksError: A package of `EXTRAS` that the class needs is not installed.

    Example:
        >>> resolve_class("model", "os.system")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: model._target_='os.system': expected a class, ...
    """
    key = f"{path}._target_"
    try:
        with patch("hydra.utils.log.error"):  # the error that is raised below has the same content
            found: Any = get_object(str(target))
    except (Exception, SystemExit) as error:  # the user's module may raise anything at import
        cause = error.__cause__ or error
        missing = str(cause.name).partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if missing in EXTRAS:
            text = f"{key}={target!r} needs the package {missing}"
            raise EnvironmentLacksError(
                f"{text}\n  try: pip install 'lightning-eff[{EXTRAS[missing]}]'"
            ) from error
        module, _, name = str(target).rpartition(".")
        text = (str(cause).splitlines() or [""])[0] or type(cause).__name__
        reason = f"{text} (the current folder is on the import path)"
        if module in sys.modules:  # the module was imported, so only the name is wrong
            classes = [each for each, value in vars(sys.modules[module]).items() if isinstance(value, type)]
            reason = f"{module} has no {name!r}: {suggest_name(name, classes)}"
        raise ConfigError(key, target, allowed=f"a class that can be imported; {reason}") from error
    if isinstance(found, type):
        return found
    kind = "module" if inspect.ismodule(found) else "function" if callable(found) else type(found).__name__
    raise ConfigError(key, target, allowed=f"a class, not a {kind}")


def check_inside(key: str, value: str, root: Path) -> None:
    """Reject a path that is not below `root` after following symbolic links."""
    check_path(key, value)
    # A symbolic link inside `root` may lead to a folder outside of `root`.
    resolved = Path(value).resolve()
    if not resolved.is_relative_to(root):
        allowed = f"a folder under output_root={str(root)!r}"
        root_option = "--output-root " if key.startswith("--") else "output_root="
        raise ConfigError(key, value, allowed=allowed, remedies=[f"{root_option}{resolved.parent}"])


def check_folders(values: Mapping[str, Any], root: Path) -> None:
    """Reject folders outside of `root`, and names that lead out of their folder."""
    check_path("output_root", root)
    if values.get("task_name") == "":
        raise ConfigError(key="task_name", value="", allowed="a name, which becomes a folder's name")
    for path, key, value in walk_leaves(values):
        if not isinstance(value, str):
            continue
        # The folders of a user's data module are only read; the shipped ones write to `cache_dir`.
        if key in WRITTEN_FOLDERS and (key == "cache_dir" or not path.startswith("data.")):
            check_inside(path, value, root.resolve())
        # `model.name` is only read; it is the name of a hub model, or a folder.
        if key in WRITTEN_NAMES and path != "model.name" and {"..", "/"} & {*Path(value).parts}:
            raise ConfigError(path, value, allowed="a name that does not leave its folder")


def check_write_access(root: Path) -> None:
    """Reject an output root that cannot be written to or created."""
    # The run would create missing folders, so check the nearest folder that exists.
    existing = next(folder for folder in (root.resolve(), *root.resolve().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        allowed = f"a folder with write access; {existing} has none"
        raise ConfigError(key="output_root", value=str(root), allowed=allowed)


def check_run_dir(cfg: DictConfig) -> None:
    """Reject a run's or a sweep's folder that is outside of `output_root`."""
    root = cfg.get("output_root")
    if not str(root or "").strip():
        allowed = "a folder; a recipe that builds on baseline has one"
        raise ConfigError(key="output_root", value=root, allowed=allowed, remedies=["output_root=outputs"])
    check_path("output_root", str(root))
    # A recipe could otherwise start a sweep that the command line has not requested.
    if cfg.hydra.mode == RunMode.MULTIRUN:
        raise ConfigError(key="hydra.mode", value="MULTIRUN", allowed="RUN; the option -m runs a sweep")
    folders = {"hydra.run.dir": cfg.hydra.run.dir, "hydra.sweep.dir": cfg.hydra.sweep.dir}
    if cfg.hydra.output_subdir is not None:
        folders["hydra.output_subdir"] = Path(cfg.hydra.run.dir) / str(cfg.hydra.output_subdir)
    for key, value in folders.items():
        check_inside(key, str(value), Path(str(root)).resolve())


def check_hydra(section: Any) -> None:
    """Check the classes in Hydra's own section, whose interpolations are not resolved yet.

    Raises:
        ConfigError: A key names a class but must not, a class is not a plugin, or a resolver could return a
            class.
    """
    for name, kind in HYDRA_PLUGINS.items():
        node = section.get(name.rpartition(".")[2])
        target = node.get("_target_") if isinstance(node, Mapping) else node
        known = [f"{plugin.__module__}.{plugin.__name__}" for plugin in Plugins.instance().discover(kind)]
        if target not in known:
            hint = suggest_name(str(target), known)
            allowed = f"a {kind.__name__} that is installed as a Hydra plugin; {hint}"
            raise ConfigError(f"{name}._target_", target, allowed=allowed)
    # LD_PRELOAD or PYTHONPATH would run code in a worker. Hydra adds variables in `env_copy` to `env_set`.
    if variables := [*(section["job"].get("env_set") or ())]:
        allowed = "no variables, here or in env_copy: set them where you start the run"
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
