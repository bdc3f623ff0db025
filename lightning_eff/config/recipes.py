"""Find recipes, and read the defaults lists that a recipe builds on before Hydra composes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from lightning_eff.config.strict_yaml import MAX_DEPTH, YamlDocument, file_error, is_file, read_yaml
from lightning_eff.core.catalog import CONF, RECIPES
from lightning_eff.core.errors import ConfigError, UsageError, check_path, suggest_name

FOLDER = "file://"
"""How Hydra's search path marks a folder."""
SEARCH_PATH = "hydra.searchpath"
EXPERIMENT = "experiment/"
"""Folder of the user's files that change a recipe as a whole."""


@dataclass(frozen=True)
class RecipePath:
    """Where recipes and options are searched: the user's folders first, then this package's."""

    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[str]) -> RecipePath:
        """Return the path for the values of `--config-dir`, which must be existing folders."""
        for entry in entries:
            check_path("--config-dir", entry)
            if not Path(entry).is_dir():
                text = f"--config-dir {entry}: no such folder"
                raise UsageError(text)
        return cls(tuple(Path(entry).resolve() for entry in entries))

    def options(self) -> list[str]:
        """Return the command-line options that stand for this path."""
        return [word for folder in self.folders for word in ("--config-dir", str(folder))]

    def names(self) -> list[str]:
        """Return the names of all recipes."""
        return [file.stem for folder in (*self.folders, RECIPES) for file in folder.glob("*.yaml")]

    def folder_of(self, recipe: str) -> Path:
        """Return the folder that holds a recipe: Hydra needs the primary config in its main folder."""
        found = (folder for folder in self.folders if is_file(folder / f"{recipe}.yaml"))
        return next(found, RECIPES)

    def overrides(self, recipe: str) -> list[str]:
        """Return the override that adds the remaining folders to Hydra's search path."""
        others = [f"{FOLDER}{folder}" for folder in self.folders if folder != self.folder_of(recipe)]
        return [f"{SEARCH_PATH}={json.dumps(others)}"] if others else []


@dataclass(frozen=True)
class RecipeChain:
    """A recipe, the recipes that it builds on and the experiment, if any, each with its defaults list.

    Later choices come first.
    """

    recipes: Sequence[tuple[str, Sequence[Any]]] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """FILE:LINE of each entry that names no file."""
    keys: Mapping[str, set[str]] = field(default_factory=dict[str, set[str]])
    """What each file of a group brings: the names under which its options stand in the config."""
    settings: frozenset[str] = frozenset()
    """`GROUP.KEY` of each setting in recipes and experiments of the user; not those of shipped recipes."""

    def options(self, group: str) -> set[str] | None:
        """Return all options of a group that the recipes list; None if none of them lists the group."""
        lists = [listed_options(defaults, group) for _, defaults in self.recipes]
        found = [options for options in lists if options is not None]
        return {name for options in found for name in options} if found else None

    def names(self, group: str, options: Iterable[str]) -> set[str]:
        """Return the names that options of a group have in the config; a file may bring several."""
        return {name for option in options for name in self.keys.get(f"{group}/{option}", {option})}

    def overrides(self, group: str) -> bool:
        """Return whether a defaults list replaces what others list of a group."""
        return any(is_override(entry, group) for _, defaults in self.recipes for entry in defaults)


def read_chain(recipe: str, path: RecipePath, overrides: Iterable[Override] = ()) -> RecipeChain:
    """Read the files that Hydra is going to compose, options that the overrides choose among them.

    Raises:
        UsageError: There is no such recipe; a file cannot be read, or builds on itself, with file and line.
        ConfigError: It sets Hydra's search path, which may name packages: Hydra would import them.
    """
    overrides = list(overrides)
    main = path.folder_of(recipe)
    primary = main / f"{recipe.removesuffix('.yaml')}.yaml"
    if not primary.exists():
        hint = " (--config-dir DIR adds a folder of your own)" if not path.folders else ""
        close = suggest_name(recipe, path.names())
        if is_file(Path(primary.name)):
            close = f"did you mean the file {primary.name} here?"
        text = f"recipe {recipe!r} does not exist: {close}{hint}"
        raise UsageError(text)
    walk = _Walk([main, CONF, RECIPES, *path.folders])
    searched = [item.value() for item in overrides if item.key_or_group == SEARCH_PATH]
    if is_file(primary):
        content: dict[str, Any] = walk.read(primary, expect_mapping=True).content
        # With interpolations resolved, as in Hydra.
        searched.append(OmegaConf.select(OmegaConf.create(content), SEARCH_PATH))
    for value in searched:
        if value is not None:
            raise ConfigError(SEARCH_PATH, value, allowed="nothing here: --config-dir DIR adds a folder")
    chosen = [
        f"{item.key_or_group}/{name}"
        for item in overrides
        for name in _as_list(item.value())
        if isinstance(name, str) and "." not in item.key_or_group
    ]
    visited = [pair for name in (*chosen, recipe) for pair in walk.visit(name)]
    recipes = [(name, [entry for _, entry in defaults]) for name, defaults in visited if is_recipe(name)]
    return RecipeChain(recipes, walk.missing, walk.keys, frozenset(walk.settings))


class _Walk:
    """Reads files and the files in their defaults lists, each once, from folders in search order."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.missing: dict[str, str] = {}
        self.keys: dict[str, set[str]] = {}
        self.settings: set[str] = set()
        self.read = cache(read_yaml)
        self._done: set[str] = set()

    def visit(
        self, name: str, ancestors: tuple[str, ...] = (), listed_at: str | None = None
    ) -> Iterator[tuple[str, Sequence[tuple[int, Any]]]]:
        """Yield each file's name and defaults list, last entry first; nothing for one that does not exist."""
        files = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in self.folders)
        file = next((candidate for candidate in files if is_file(candidate)), None)
        if file is None and listed_at is not None:
            self.missing[name] = listed_at
        if file is None or name in self._done:
            return
        document = self.read(file, expect_mapping="/" not in name)
        defaults = document.defaults
        yield name, defaults
        if is_recipe(name) and not {CONF, RECIPES} & {*file.parents}:  # of the user's own
            content: dict[str, Any] = document.content if isinstance(document.content, dict) else {}
            groups = ((group, node) for group, node in content.items() if isinstance(node, dict))
            self.settings |= {f"{group}.{key}" for group, node in groups for key in node}
        ancestors = (*ancestors, name)
        for line, entry in reversed(defaults):
            for child in _files_of(entry, name.rpartition("/")[0]):
                if child in ancestors or len(ancestors) > MAX_DEPTH:
                    cycle = " -> ".join([*ancestors[-3:], child])
                    raise file_error(file, line, f"defaults that never end: {cycle}")
                yield from self.visit(child, ancestors, f"{file}:{line}")
        self._done.add(name)
        self.keys[name] = self._keys(name, document)

    def _keys(self, name: str, document: YamlDocument) -> set[str]:
        """Return the names that a visited file and those in its defaults list have in their group."""
        group, _, option = name.rpartition("/")
        content: Any = document.content if isinstance(document.content, dict) else {}
        parent, _, own = (document.package or "").rpartition(".")
        if parent == group:
            return {own}
        if "_target_" in content or document.package:
            return {option}
        files = [file for _, entry in document.defaults for file in _files_of(entry, group)]
        inherited = [self.keys.get(file, {file}) for file in files if file.startswith(f"{group}/")]
        return {str(key) for key in content if key != "defaults"}.union(*inherited)


def is_recipe(name: str) -> bool:
    """Return whether a file's name is that of a recipe or an experiment, not of a group's option."""
    return "/" not in name or name.startswith(EXPERIMENT)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _files_of(entry: Any, group: str) -> list[str]:
    """Return the files that an entry of a defaults list names.

    Example:
        >>> _files_of({"override /model@net": "gpt"}, "data"), _files_of("lm", ""), _files_of("_self_", "")
        (['model/gpt'], ['lm'], [])
    """
    if isinstance(entry, str):
        names = [entry.partition("@")[0]]
    else:
        ((key, options),) = entry.items()
        names = [f"{key.split()[-1].partition('@')[0]}/{name}" for name in _as_list(options) if name]
    absolute = [name if name.startswith("/") or not group else f"{group}/{name}" for name in names]
    return [name.lstrip("/") for name in absolute if name.rpartition("/")[2] != "_self_"]


def listed_options(defaults: Sequence[Any], group: str) -> list[str] | None:
    """Return the options of a group in a defaults list; None if the list does not name the group.

    Example:
        >>> listed_options(["lm", {"callbacks": ["a", "b"]}, {"override precision": "fp32"}], "callbacks")
        ['a', 'b']
    """
    for entry in reversed(defaults):
        if isinstance(entry, dict):
            ((key, options),) = entry.items()
            if str(key).split()[-1].lstrip("/") == group:
                return [str(name) for name in _as_list(options)]
    return None


def is_override(entry: Any, group: str) -> bool:
    """Return whether an entry of a defaults list replaces what others list of a group.

    Example:
        >>> is_override({"override /logger": "csv"}, "logger"), is_override({"logger": "csv"}, "logger")
        (True, False)
    """
    keys = [str(key).split() for key in entry] if isinstance(entry, dict) else []
    return any(words[0] == "override" and words[-1].lstrip("/") == group for words in keys)
