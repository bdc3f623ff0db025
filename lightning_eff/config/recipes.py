"""Find recipes and options in folders, load them with Hydra, and return a recipe's own choices."""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import (
    Overrides,
    _create_defaults_list,  # pyright: ignore[reportPrivateUsage]
)
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override
from yaml import YAMLError

from lightning_eff.config import hydra_errors
from lightning_eff.config.strict_yaml import RecipeFiles, YamlDocument, is_file
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS, RECIPES
from lightning_eff.core.errors import ConfigError, UsageError, check_path, suggest_name

SEARCH_PATH = "hydra.searchpath"
EXPERIMENT = "experiment"
"""Group of the user's experiments; an experiment is a file that changes several groups of a recipe."""
COMPOSITION_ERRORS = (
    *(HydraException, OmegaConfBaseException, YAMLError),
    *(ValueError, OSError, RecursionError, AssertionError),
)
"""Errors that Hydra 1.3 raises for a config that it cannot compose."""
SHIPPED = tuple(f"file://{folder}" for folder in (CONF, RECIPES))
RECIPE, TASK = "${hydra.job.config_name}", "${task_name}"
"""Interpolations that name a folder of runs: `TASK` if `task_name` is set, else `RECIPE`."""
RUN_DIR = f"${{output_root}}/{RECIPE}/${{now:%Y-%m-%d_%H-%M-%S-%f}}"
HYDRA_FOLDERS = {
    "hydra.run.dir": ("outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}", RUN_DIR),
    "hydra.sweep.dir": (
        "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}",
        f"${{output_root}}/{RECIPE}/sweep_${{now:%Y-%m-%d_%H-%M-%S-%f}}",
    ),
}
"""Hydra's default folders and their replacements; another value in a recipe or override is kept."""


class ConfSearchPath(SearchPathPlugin):
    """Adds this package's conf/ and recipes/ to Hydra's search path."""

    @override
    def manipulate_search_path(self, search_path: Any) -> None:
        for folder in (CONF, RECIPES):
            search_path.append(provider="lightning_eff", path=f"file://{folder}")


def register() -> None:
    """Make the groups in conf/ available to every Hydra app of this process; a second call does nothing.

    Example:
        >>> register()
    """
    plugins = Plugins.instance()
    if ConfSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(ConfSearchPath)


@dataclass(frozen=True)
class RecipePath:
    """Search path of recipes and options: the user's folders first, then the folders of this package."""

    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[str]) -> RecipePath:
        """Return the search path for the values of `--config-dir`, which must be existing folders."""
        for entry in entries:
            check_path("--config-dir", entry)
            if not Path(entry).is_dir():
                raise UsageError(f"--config-dir {entry}: no such folder")
        return cls(tuple(Path(entry).resolve() for entry in entries))

    def options(self) -> list[str]:
        """Return the command-line options that reproduce this path."""
        return [word for folder in self.folders for word in ("--config-dir", str(folder))]

    def names(self) -> list[str]:
        """Return the names of all recipes."""
        return [file.stem for folder in (*self.folders, RECIPES) for file in folder.glob("*.yaml")]

    def folder_of(self, recipe: str) -> Path:
        """Return the folder that contains a recipe, to use as Hydra's main folder."""
        found = (folder for folder in self.folders if is_file(folder / f"{recipe}.yaml"))
        return next(found, RECIPES)


@dataclass(frozen=True)
class RecipeChain:
    """The choices of a recipe and its experiment.

    The choices include the user's overrides of single-option groups, but not of multi-option groups.
    """

    recipe: str
    files: CachingConfigRepository
    chosen: Overrides
    """Hydra's record of choices, including choices that another recipe or an experiment has overridden."""
    groups: Collection[str]
    """Groups that the recipe lists; an override may replace the choice of such a group."""
    recipes: Sequence[str]
    """The recipe, its base recipes, and the experiment."""
    listed: Mapping[str, Sequence[tuple[str, str]]]
    """For each group: pairs of an option and the recipe that lists this option."""

    def options(self, group: str) -> list[str]:
        """Return the options that the recipes list for a group."""
        return [option for option, _ in self.listed.get(group, ())]

    def overriding(self, group: str) -> str | None:
        """Return the recipe or experiment that replaces the choice of other recipes for a group, or None."""
        metadata = self.chosen.override_metadata.get(group)
        return metadata.containing_config_path if metadata is not None else None

    def setter(self, group: str, name: str | None = None) -> str:
        """Return the recipe that chooses an option of a group; `name` is None for a single-option group."""
        own = [recipe for option, recipe in self.listed.get(group, ()) if name in (None, option)]
        return self.overriding(group) or next(iter(own), self.recipe)

    def names(self, group: str, options: Iterable[str]) -> set[str]:
        """Return the config keys of some options; the file of one option may define several keys."""
        return {name for option in options for name in self._names(group, option)}

    def _names(self, group: str, option: str) -> set[str]:
        loaded = self.files.load_config(f"{group}/{option}")
        if loaded is None:
            return {option}
        package = loaded.header["package"] or ""
        parent, _, own = package.rpartition(".")
        # The file begins with `# @package callbacks.NAME`.
        if parent == group:
            return {own}
        if "_target_" in loaded.config or package:
            return {option}
        # A file that combines options defines its own keys and the keys of the options that it lists.
        inside = [each for each in loaded.defaults_list or () if isinstance(each, ConfigDefault)]
        others = [str(each.path).removeprefix(f"/{group}/") for each in inside if not each.is_self()]
        return {str(key) for key in loaded.config} | self.names(group, others)

    def settings(self) -> set[str]:
        """Return `GROUP.KEY` of each setting in the user's own recipes and experiments."""
        loaded = (self.files.load_config(name) for name in self.recipes)
        own: list[Any] = [each.config for each in loaded if each and each.path not in SHIPPED]
        groups = [(group, node) for config in own for group, node in config.items_ex(resolve=False)]
        return {f"{group}.{key}" for group, node in groups if isinstance(node, DictConfig) for key in node}


class RecipeLoader(ConfigLoaderImpl):
    """Hydra's loader for one recipe, which reads files under strict rules and composes each config once.

    Hydra 1.3's `run`, `multirun`, `show_cfg` and `load_sweep_config` all call `load_configuration`. For each
    job of a sweep there are two calls: the first validates the job's overrides, and the second launches the
    job.

    Raises:
        UsageError: The recipe does not exist.
    """

    def __init__(self, recipe: str, path: RecipePath) -> None:
        main = path.folder_of(recipe)
        name = f"{recipe.removesuffix('.yaml')}.yaml"
        if not (main / name).exists():
            hint = " (--config-dir DIR adds your own folder)" if not path.folders else ""
            close = suggest_name(recipe, path.names())
            raise UsageError(f"recipe {recipe!r} does not exist: {close}{hint}")
        register()
        search_path = create_config_search_path(str(main))
        # Each folder is inserted right after this package's folders, so the first folder is inserted last.
        for folder in reversed(path.folders):
            if folder != main:
                search_path.append("--config-dir", str(folder), SearchPathQuery("lightning_eff", None))
        super().__init__(search_path)
        self._recipe = recipe
        self._path = path
        self._documents: dict[str, YamlDocument] = {}
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self.repository.sources = [
            RecipeFiles(source.provider, source.path, self._documents)
            if source.scheme() == "file"
            else source
            for source in self.repository.sources
        ]

    @override
    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        # Return a copy, because Hydra changes the config that it runs, and a sweep may repeat a job.
        return copy.deepcopy(self.compose(overrides, run_mode))

    def compose(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
        """Return the config that Hydra composes; calls with the same overrides return the same object.

        Raises:
            UsageError: Hydra cannot compose the config.
            EnvironmentLacksError: A plugin of Hydra is not installed.
        """
        if tuple(overrides) in self._composed:
            return self._composed[tuple(overrides)]
        with self._explained():
            cfg = super().load_configuration(self._recipe, list(overrides), mode, from_shell=False)
        folders: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
        for key, (default, replacement) in HYDRA_FOLDERS.items():
            if folders[key.split(".")[1]]["dir"] == default:
                # Without a task name, the interpolation `${task_name}` has no value.
                named = OmegaConf.select(cfg, "task_name") is not None
                OmegaConf.update(cfg, key, replacement.replace(RECIPE, TASK) if named else replacement)
        self._composed[tuple(overrides)] = cfg
        return cfg

    def read_chain(self, overrides: Iterable[Override] = ()) -> RecipeChain:
        """Read the files that the recipe lists, including the experiment chosen by the overrides.

        Raises:
            UsageError: A file cannot be read, or a recipe is its own base; the text names file and line.
            ConfigError: The recipe or an override sets Hydra's search path.
        """
        overrides = [item for item in overrides if str(item.key_or_group) not in MULTI_CHOICE_GROUPS]
        files = CachingConfigRepository(self.repository)
        searched = [item.value() for item in overrides if item.key_or_group == SEARCH_PATH]
        with self._explained():
            if (primary := files.load_config(self._recipe)) is not None:
                searched.append(OmegaConf.select(primary.config, SEARCH_PATH))
        # An entry `pkg://NAME` would make Hydra import that package.
        for value in searched:
            if value is not None:
                allowed = "nothing here: --config-dir DIR adds a folder"
                raise ConfigError(SEARCH_PATH, value, allowed=allowed)
        with self._explained():
            chosen = Overrides(files, overrides)
            defaults = self._defaults(files, chosen)
            groups = {str(each.config_path).rpartition("/")[0] for each in defaults}
            # Add groups with the choice none: no file belongs to this choice, but the recipe lists the group.
            groups |= {*chosen.known_choices_per_group}
            if EXPERIMENT in chosen.override_metadata and not chosen.override_metadata[EXPERIMENT].used:
                # The recipe does not list the group `experiment`, so append the override's choice.
                value = chosen.override_choices[EXPERIMENT]
                added = GroupDefault(group=EXPERIMENT, value=value, external_append=True)
                chosen = Overrides(files, [item for item in overrides if item.key_or_group != EXPERIMENT])
                chosen.append_group_defaults.append(added)
                defaults = self._defaults(files, chosen)
        paths = [(str(each.config_path), each.parent) for each in defaults]
        recipes = [path for path, _ in paths if "/" not in path or path.startswith(f"{EXPERIMENT}/")]
        listed: dict[str, list[tuple[str, str]]] = {}
        for name, parent in paths:
            group, _, option = name.rpartition("/")
            if group and parent in recipes:  # leave out options that another option's file lists
                listed.setdefault(group, []).append((option, parent))
        return RecipeChain(self._recipe, files, chosen, groups, recipes, listed)

    def _defaults(self, files: CachingConfigRepository, chosen: Overrides) -> list[ResultDefault]:
        """Return each file of the config with the file that lists it; accept overrides without effect."""
        options: Any = {"prepend_hydra": False, "skip_missing": True}
        return _create_defaults_list(files, self._recipe, chosen, **options)[0]

    @contextmanager
    def _explained(self) -> Generator[None]:
        """If files or overrides cannot be composed, turn Hydra's exception into a short error."""
        try:
            yield
        except MissingConfigException as error:
            raise hydra_errors.missing_file(error, self._path.names(), self._documents) from error
        except COMPOSITION_ERRORS as error:
            raise UsageError(hydra_errors.composition_error(error, self._documents)) from error
