"""How a recipe and its overrides become one checked dictionary.

Hydra composes; this module makes its silences audible. An override of a known group's key may set any
parameter of the class behind it, and every key, class and type is held against that class afterwards
(`config/validate.py`), so nothing is dropped or added unseen.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from typing_extensions import override
from yaml import YAMLError

from lightning_eff.config import validate
from lightning_eff.config.folders import check_folders, check_inside
from lightning_eff.config.hydra_section import check_hydra
from lightning_eff.config.overrides import allow_new_keys, parse_overrides
from lightning_eff.config.recipes import FOLDER, Chain, RecipePath, listed_groups, listed_options, read_chain
from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS, RECIPES, parameter_keys, recipes
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, UsageError, check_path, suggest_name
from lightning_eff.core.remedies import keep_overrides

log = logging.getLogger(__name__)

VERSION_BASE = "1.3"
HYDRA_DEFAULTS = {
    "hydra.run.dir": (
        "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}",
        "${output_root}/${hydra.job.config_name}/${now:%Y-%m-%d_%H-%M-%S-%f}",
    ),
    "hydra.sweep.dir": (
        "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}",
        "${output_root}/${hydra.job.config_name}/sweep_${now:%Y-%m-%d_%H-%M-%S-%f}",
    ),
    "hydra/job_logging": ("default", "none"),
    "hydra/hydra_logging": ("default", "none"),
}
"""Where Hydra's own default is replaced: its value, ours. Another value in a recipe or override stays."""


class ConfSearchPath(SearchPathPlugin):
    """Adds this package's conf/ and recipes/ to the places where Hydra looks for groups and configs."""

    @override
    def manipulate_search_path(self, search_path: Any) -> None:
        for folder in (CONF, RECIPES):
            search_path.append(provider="lightning_eff", path=f"{FOLDER}{folder}")


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
        hydra: What it must be given besides, so that run folders lie where they belong.
    """

    values: dict[str, Any]
    run_dir: Path
    overrides: list[str]
    hydra: list[str]


@keep_overrides()
def compose_recipe(recipe: str, overrides: Sequence[str], place: RecipePath | None = None) -> Composed:
    """Compose and check one run; nothing is created or instantiated.

    Args:
        recipe: Name of a file in recipes/ or in a folder of `place`, without its ending.
        overrides: In Hydra's grammar, without sweeps.
        place: Folders of the user's own.

    Raises:
        UsageError: Hydra cannot compose it: an unknown recipe, option or key, or a malformed override.
        EnvironmentLacksError: Its launcher for SLURM is asked for and not installed.
        ConfigError: It composes, and a key, class, type or path in it is not usable.
    """
    try:
        return _composed(recipe, overrides, place or RecipePath())
    except OmegaConfBaseException as error:
        raise UsageError(_unresolved(error)) from error


def _composed(recipe: str, overrides: Sequence[str], place: RecipePath) -> Composed:
    parsed = parse_overrides([*overrides, *place.overrides(recipe)])
    chain, missed = read_chain(recipe, place, parsed)
    lines = allow_new_keys(parsed, listed=listed_groups(chain))
    cfg = _compose(recipe, lines, place, missed)
    hydra = _replace_defaults(cfg)
    check_hydra(OmegaConf.to_container(cfg.hydra, resolve=False))
    run_dir = _run_dir(cfg)
    _check_keys(cfg)
    _check_asked(cfg, parsed)
    explicit = {str(item.key_or_group) for item in parsed if not item.is_delete()}
    _drop_foreign(cfg, explicit=explicit)
    _drop_settings_of_absent(cfg, explicit, chain)
    values = _resolve(cfg)
    validate.check_config_values(values)
    check_folders(values, Path(values["output_root"]))
    return Composed(values, run_dir, lines, hydra)


def _unresolved(error: OmegaConfBaseException) -> str:
    """Say which key has no value, or none that can be made out."""
    key = str(getattr(error, "full_key", "") or "config")
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: this recipe needs a value of yours\n  try: {key}=..."
    return f"{key}: {next(iter(str(error).splitlines()), type(error).__name__)}"


def _replace_defaults(cfg: DictConfig) -> list[str]:
    """Put ours where the recipe left Hydra's default; return the overrides that do the same for Hydra."""
    hydra: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    now = {
        "hydra.run.dir": hydra["run"]["dir"],
        "hydra.sweep.dir": hydra["sweep"]["dir"],
        **{key: hydra["runtime"]["choices"].get(key) for key in HYDRA_DEFAULTS if "/" in key},
    }
    ours = {key: mine for key, (stock, mine) in HYDRA_DEFAULTS.items() if now[key] == stock}
    for key, mine in ours.items():
        if "/" not in key:
            OmegaConf.update(cfg, key, mine)
    return [f"{key}={mine}" for key, mine in ours.items()]


def _compose(
    recipe: str, overrides: Sequence[str], place: RecipePath, missed: Mapping[str, str]
) -> DictConfig:
    register()
    try:
        with _no_hydra_yet(), initialize_config_dir(str(place.main(recipe)), version_base=VERSION_BASE):
            return compose(recipe, overrides=list(overrides), return_hydra_config=True)
    except MissingConfigException as error:
        if str(error.missing_cfg_file).startswith("hydra/launcher/submitit"):
            text = f"{error.missing_cfg_file}: hydra's launcher for SLURM is missing"
            text += "\n  try: pip install 'lightning-eff[slurm]'"
            raise EnvironmentLacksError(text) from error
        raise UsageError(_missing(recipe, place, error, missed)) from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError, RecursionError) as error:
        raise UsageError(_compose_error(error)) from error


@contextmanager
def _no_hydra_yet() -> Generator[None]:
    """Compose also from inside a job that Hydra runs: it allows one at a time."""
    running = GlobalHydra.instance()
    before, running.hydra = running.hydra, None
    try:
        yield
    finally:
        running.hydra = before


def _missing(recipe: str, place: RecipePath, error: MissingConfigException, missed: Mapping[str, str]) -> str:
    wanted = str(error.missing_cfg_file or recipe)
    own = [file.stem for folder in place.folders for file in folder.glob("*.yaml")]
    known = [*own, *(entry.name for entry in recipes())]
    if wanted == recipe:
        way = " (--config-dir DIR adds a folder of your own)" if not place.folders else ""
        return f"recipe {recipe!r} does not exist: {suggest_name(recipe, known)}{way}"
    where = f"{missed[wanted]}: " if wanted in missed else ""
    group, _, option = wanted.rpartition("/")
    if not group:
        return f"{where}{wanted}: no such recipe; {suggest_name(wanted, known)}"
    options = error.options or [file.stem for file in (CONF / group).glob("*.yaml")]
    return f"{where}{group}={option}: no such option; {suggest_name(option, options)}"


def _compose_error(error: Exception) -> str:
    """Say what Hydra could not do, with the nearest key; its advice to append a misspelt key is left out."""
    if isinstance(error, RecursionError):
        return "the config is nested too deep, or its defaults never end"
    cause = error.__cause__
    first = next(iter(str(error).splitlines() or str(cause or "").splitlines()), type(error).__name__)
    if first.startswith("Could not override '"):
        return _unknown_key(first.split("'")[1])
    if first.startswith("Multiple values for "):
        return _given_twice(first.split()[3].rstrip("."))
    reason = f" ({str(cause).splitlines()[0]})" if str(error) and cause is not None and str(cause) else ""
    return f"{first}{reason}"


def _unknown_key(key: str) -> str:
    """Say what could be meant by a key that a recipe does not have."""
    if key in TOP_LEVEL:
        return f"{key}: this recipe does not have it\n  try: +{key}=..."
    paths = [path for path in parameter_keys() if path.endswith(f".{key}")]
    close = f"did you mean {' or '.join(paths[:3])}?" if paths else suggest_name(key, TOP_LEVEL)
    return f"{key}: no such key; {close}"


def _given_twice(group: str) -> str:
    """Say how a group is chosen once."""
    if group in MULTI_CHOICE_GROUPS:
        return f"{group} is given more than once; try: {group}=[one,other] in one list, with + to append"
    way = f"leave one of them out, or write `override {group}: OPTION`"
    return f"{group} is given more than once, and takes one option: {way}"


def _drop_foreign(cfg: DictConfig, *, explicit: set[str]) -> None:
    """Leave out, and name, what a group's YAML has and the class that an override put there has not."""
    for group in validate.GROUP_BASES:
        node = cfg.get(group)
        if f"{group}._target_" not in explicit or not isinstance(node, DictConfig):
            continue
        given = {key for key in node if f"{group}.{key}" in explicit}
        foreign = validate.foreign_keys(group, node.get("_target_"), set(node) - given)
        with open_dict(node):
            for key in foreign:
                del node[key]
        if foreign:
            log.warning("%s: %s has no %s; left out", group, node.get("_target_"), ", ".join(foreign))


def _drop_settings_of_absent(cfg: DictConfig, explicit: Collection[str], chain: Chain) -> None:
    """Leave out what a recipe sets of an option that it lists, and that an override took out of the list."""
    for group in MULTI_CHOICE_GROUPS:
        node = cfg.get(group)
        if group not in explicit or not isinstance(node, DictConfig):
            continue
        given = {key.split(".")[1] for key in explicit if key.startswith(f"{group}.")}
        listed = {name for _, defaults in chain for name in listed_options(defaults, group) or ()}
        absent = [name for name in listed - given if name in node and "_target_" not in node[name]]
        with open_dict(node):
            for name in absent:
                del node[name]
        with open_dict(cfg):
            if not node:
                del cfg[group]


def _check_keys(cfg: DictConfig) -> None:
    """Refuse top-level keys that nothing reads, and options that did not land under their name."""
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    for key in content:
        if key not in (*TOP_LEVEL, "hydra"):
            group, _, option = str(key).partition("/")
            remedy = (
                [f"{group}=[{option}] or +{group}={option}"]
                if option and group in MULTI_CHOICE_GROUPS
                else []
            )
            allowed = f"a known key; {suggest_name(str(key), TOP_LEVEL)}"
            raise ConfigError(str(key), content[key], allowed=allowed, remedies=remedy)
    for group in MULTI_CHOICE_GROUPS:
        if "_target_" in (cfg.get(group) or {}):
            allowed = f"options that land under their name: begin the YAML with `# @package {group}.NAME`"
            raise ConfigError(key=group, value=cfg[group]["_target_"], allowed=allowed)


def _check_asked(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Hold what was asked for against what is there: Hydra drops some forms without a word."""
    removed = {str(item.key_or_group) for item in overrides if item.is_delete()}
    for item in overrides:
        group = str(item.key_or_group)
        if group in MULTI_CHOICE_GROUPS and not item.is_delete():
            value: Any = item.value()
            names = value if isinstance(value, list) else [value]
            present = list(cfg.get(group) or {})
            for name in names:
                if name is not None and str(name) not in present and f"{group}.{name}" not in removed:
                    whole = ",".join([*present, str(name)])
                    text = f"{group} that holds {name!r}; Hydra left it out of {present}"
                    raise ConfigError(
                        group, str(item.get_value_string()), allowed=text, remedies=[f"{group}=[{whole}]"]
                    )


def _resolve(cfg: DictConfig) -> dict[str, Any]:
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    resolved = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    if not isinstance(resolved, dict):
        raise ConfigError(key="config", value=resolved, allowed="a mapping")
    return {str(key): value for key, value in resolved.items()}


def _run_dir(cfg: DictConfig) -> Path:
    """Return the run's folder, under `output_root`, and let `${run_dir}` mean it."""
    root = cfg.get("output_root")
    if not str(root or "").strip():
        allowed = "a folder; a recipe that builds on baseline has one"
        raise ConfigError(key="output_root", value=root, allowed=allowed, remedies=["output_root=outputs"])
    check_path("output_root", str(root))
    root = Path(str(root)).resolve()
    subdir = cfg.hydra.output_subdir
    folders = {"hydra.run.dir": cfg.hydra.run.dir, "hydra.sweep.dir": cfg.hydra.sweep.dir}
    if subdir is not None:
        folders["hydra.output_subdir"] = Path(cfg.hydra.run.dir) / str(subdir)
    for key, value in folders.items():
        check_inside(key, str(value), root)
    run_dir = Path(str(cfg.hydra.run.dir)).resolve()
    with read_write(cfg.hydra.runtime), open_dict(cfg.hydra.runtime):
        cfg.hydra.runtime.output_dir = str(run_dir)
    HydraConfig.instance().set_config(cfg)
    return run_dir
