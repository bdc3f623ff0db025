"""How a recipe and its overrides become one checked dictionary.

Hydra composes; this module makes its silences audible. An override of a known group's key may set any
parameter of the class behind it, and every key, class and type is held against that class afterwards
(`signatures.py`), so nothing is dropped or added unseen.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from lightning_eff import signatures
from lightning_eff.catalog import CONF, MANY, RECIPES, recipes
from lightning_eff.errors import ConfigError, UsageError, nearest

log = logging.getLogger(__name__)

VERSION_BASE = "1.3"

RUN_KEYS = ("seed", "ckpt_path", "output_root", "run_dir")
TOP_LEVEL = (*RUN_KEYS, "trainer", *signatures.GROUP_BASES)
WRITTEN_FOLDERS = ("run_dir", "default_root_dir", "dirpath", "save_dir", "cache_dir", "root_dir", "log_dir")
"""Keys whose value is a folder that a run writes into."""


class ConfSearchPath(SearchPathPlugin):
    """Adds this package's conf/ to the places where Hydra looks for groups."""

    @override
    def manipulate_search_path(self, search_path: Any) -> None:
        search_path.append(provider="lightning_eff", path=CONF.as_uri())


def register() -> None:
    """Let any Hydra app of this process use the groups in conf/; calling it again does nothing.

    Example:
        >>> register()
    """
    plugins = Plugins.instance()
    if ConfSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(ConfSearchPath)


@dataclass(frozen=True)
class Composed:
    """A recipe with its overrides, as Hydra composed it and as it is used.

    Args:
        values: Plain dictionaries, lists and numbers, resolved and checked; what is instantiated.
        run_dir: This run's folder, absolute, not created yet.
        overrides: What Hydra must be given to compose the same again.
    """

    values: dict[str, Any]
    run_dir: Path
    overrides: tuple[str, ...]


def compose_recipe(recipe: str, overrides: Sequence[str]) -> Composed:
    """Compose and check one run; nothing is created or instantiated.

    Args:
        recipe: Name of a file in recipes/ or in a folder of `hydra.searchpath`, without its ending.
        overrides: In Hydra's grammar, without sweeps.

    Raises:
        UsageError: Hydra cannot compose it: an unknown recipe, option or key, or a malformed override.
        ConfigError: It composes, and a key, class, type or path in it is not usable.
    """
    parsed = parse_overrides(overrides)
    lines = tuple(loosened(parsed))
    cfg = _compose(recipe, lines)
    _check_hydra(cfg.hydra)
    run_dir = _run_dir(cfg)
    _check_asked(cfg, parsed)
    values = _resolve(cfg)
    dropped = signatures.check_groups(values, explicit=_explicit(parsed))
    for key in dropped:
        log.warning("%s left out: the class that was put in its group's _target_ has no such parameter", key)
    _check_folders(values, Path(values["output_root"]))
    return Composed(values, run_dir, (*lines, f'hydra.run.dir="{run_dir}"'))


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides of Hydra's grammar.

    Raises:
        UsageError: One of them is not of that grammar.
    """
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        text = f"{error.override}: not an override; expected key=value, group=option, +key=value or ~key"
        raise UsageError(text) from error


def loosened(overrides: Sequence[Override]) -> list[str]:
    """Let overrides of known groups set keys that the group's YAML does not list; the class is asked later.

    Example:
        >>> loosened(parse_overrides(["trainer.max_time=00:01:00:00", "seed=3", "~callbacks"]))
        ['++trainer.max_time=00:01:00:00', 'seed=3', '~callbacks']
    """
    lines: list[str] = []
    for item in overrides:
        line = str(item.input_line)
        group, _, key = str(item.key_or_group).partition(".")
        if key and not item.is_delete() and group in TOP_LEVEL:
            line = "++" + line.lstrip("+")
        lines.append(line)
    return lines


def _compose(recipe: str, overrides: Sequence[str]) -> DictConfig:
    register()
    try:
        with initialize_config_dir(str(RECIPES), version_base=VERSION_BASE):
            return compose(recipe, overrides=list(overrides), return_hydra_config=True)
    except MissingConfigException as error:
        raise UsageError(_missing(recipe, error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_compose_error(error)) from error


def _missing(recipe: str, error: MissingConfigException) -> str:
    wanted = str(error.missing_cfg_file or recipe)
    if wanted == recipe:
        return f"recipe {recipe!r} does not exist: {nearest(recipe, [entry.name for entry in recipes()])}"
    group, _, option = wanted.rpartition("/")
    options = error.options or [file.stem for file in (CONF / group).glob("*.yaml")]
    return f"{group}={option}: no such option; {nearest(option, options)}"


def _compose_error(error: Exception) -> str:
    """Say what Hydra could not do, with the nearest key; its advice to append a misspelt key is left out."""
    first = str(error).splitlines()[0]
    if first.startswith("Could not override '"):
        key = first.split("'")[1]
        return f"{key}: no such key; {nearest(key, TOP_LEVEL)}"
    cause = error.__cause__
    reason = f" ({str(cause).splitlines()[0]})" if cause is not None and str(cause) else ""
    return f"{first}{reason}"


def _explicit(overrides: Sequence[Override]) -> set[str]:
    return {str(item.key_or_group) for item in overrides if not item.is_delete()}


def _check_asked(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Hold what was asked for against what is there: Hydra drops some forms without a word."""
    for key in cfg:
        if key not in (*TOP_LEVEL, "hydra"):
            group, _, option = str(key).partition("/")
            remedy = [f"{group}=[{option}] or +{group}={option}"] if option and group in MANY else []
            raise ConfigError(
                str(key), "", allowed=f"a known key; {nearest(str(key), TOP_LEVEL)}", remedies=remedy
            )
    for item in overrides:
        group = str(item.key_or_group)
        if group in MANY and not item.is_delete():
            value: Any = item.value()
            names = value if isinstance(value, list) else [value]
            present = list(cfg.get(group) or {})
            for name in names:
                if name is not None and str(name) not in present:
                    whole = ",".join([*present, str(name)])
                    text = f"{group} that holds {name!r}; Hydra left it out of {present}"
                    raise ConfigError(
                        group, str(item.get_value_string()), allowed=text, remedies=[f"{group}=[{whole}]"]
                    )


def _resolve(cfg: DictConfig) -> dict[str, Any]:
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        resolved = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "config")
        text = f"{key}: {str(error).splitlines()[0]}"
        raise UsageError(text) from error
    if not isinstance(resolved, dict):
        raise ConfigError(key="config", value=resolved, allowed="a mapping")
    return {str(key): value for key, value in resolved.items()}


def _run_dir(cfg: DictConfig) -> Path:
    """Return the run's folder, under `output_root`, and let `${run_dir}` mean it."""
    root = Path(str(cfg.output_root)).resolve()
    subdir = cfg.hydra.output_subdir
    folders = {"hydra.run.dir": cfg.hydra.run.dir, "hydra.sweep.dir": cfg.hydra.sweep.dir}
    if subdir is not None:
        folders["hydra.output_subdir"] = Path(cfg.hydra.run.dir) / str(subdir)
    for key, value in folders.items():
        _check_inside(key, str(value), root)
    run_dir = Path(str(cfg.hydra.run.dir)).resolve()
    with read_write(cfg.hydra.runtime), open_dict(cfg.hydra.runtime):
        cfg.hydra.runtime.output_dir = str(run_dir)
    HydraConfig.instance().set_config(cfg)
    return run_dir


def _check_inside(key: str, value: str, root: Path) -> None:
    if not Path(value).resolve().is_relative_to(root):
        raise ConfigError(
            key,
            value,
            allowed=f"a folder under output_root={str(root)!r}",
            remedies=[f"output_root={Path(value).resolve().parent}"],
        )


def _check_folders(values: Mapping[str, Any], root: Path) -> None:
    """Refuse folders outside `output_root` and a root that cannot be written."""
    for path, key, value in signatures.walk_leaves(values):
        if key in WRITTEN_FOLDERS and isinstance(value, str):
            _check_inside(path, value, root.resolve())
    existing = next(folder for folder in (root.resolve(), *root.resolve().parents) if folder.exists())
    if not existing.is_dir() or not signatures.is_writable(existing):
        raise ConfigError(
            key="output_root", value=str(root), allowed=f"a folder that can be written; {existing} cannot"
        )


def _check_hydra(hydra: DictConfig) -> None:
    """Hold Hydra's own section to the same rule: only classes of the expected base, no factories."""
    plain = OmegaConf.to_container(hydra, resolve=False)
    if isinstance(plain, dict):
        signatures.check_hydra({str(key): value for key, value in plain.items()})


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep over lists of values, in Hydra's order.

    Other sweeps (ranges that a sweeper plugin searches) are known to the plugin alone; each of their runs
    is checked when it starts.

    Example:
        >>> sweep(["seed=1,2", "precision=fp32"])
        [['seed=1', 'precision=fp32'], ['seed=2', 'precision=fp32']]
    """
    choices: list[list[str]] = []
    for item in parse_overrides(overrides):
        if item.is_sweep_override() and not item.is_discrete_sweep():
            return []
        if item.is_sweep_override():
            choices.append([f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()])
        else:
            choices.append([str(item.input_line)])
    return [list(combination) for combination in itertools.product(*choices)]
