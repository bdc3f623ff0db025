"""Where recipes lie, and what they list: read from the files, before Hydra composes anything."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import ListConfig, OmegaConf

from lightning_eff.config.strict_yaml import MAX_DEPTH, YamlDocument, is_file, read_mapping, read_yaml
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS, RECIPES
from lightning_eff.core.errors import ConfigError, UsageError, check_path

PACKAGE, FOLDER = "pkg://", "file://"
"""How Hydra's search path marks a Python package, which it imports, and a folder."""
SEARCH_PATH = "hydra.searchpath"
Chain = Sequence[tuple[str, Sequence[Any]]]
"""A recipe and those that it builds on, each with its list of defaults, the last word first."""


@dataclass(frozen=True)
class RecipePath:
    """Where a recipe is looked for: a user's own folders ahead of the package's.

    Args:
        folders: What `--config-dir` named.
        packages: Python packages with options that it named, as `pkg://NAME`.
    """

    folders: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> RecipePath:
        """Return the place of packages and of folders, all of which must exist.

        Raises:
            UsageError: One does not.
            ConfigError: One is no path.
        """
        packages = tuple(word for word in words if word.startswith(PACKAGE))
        folders = [word for word in words if word not in packages]
        for package in packages:
            if not _is_package(package.removeprefix(PACKAGE)):
                text = f"--config-dir {package}: no such package"
                raise UsageError(text)
        for folder in folders:
            check_path("--config-dir", folder)
            if not Path(folder).is_dir():
                text = f"--config-dir {folder}: no such folder"
                raise UsageError(text)
        return cls(tuple(Path(folder).resolve() for folder in folders), packages)

    def words(self) -> list[str]:
        """Return what names the same place on another command line."""
        return [word for each in (*self.folders, *self.packages) for word in ("--config-dir", str(each))]

    def main(self, recipe: str) -> Path:
        """Return the folder that holds the recipe; Hydra wants a primary config in its main folder."""
        found = (folder for folder in self.folders if is_file(folder / f"{recipe}.yaml"))
        return next(found, RECIPES)

    def overrides(self, recipe: str) -> list[str]:
        """Return the override that lets Hydra look into the other folders and packages too."""
        others = [f"{FOLDER}{folder}" for folder in self.folders if folder != self.main(recipe)]
        others += self.packages
        return [f"{SEARCH_PATH}={json.dumps(others)}"] if others else []


def _is_package(name: str) -> bool:
    """Say whether there is a package with a folder; a module has none. Its parents alone are imported."""
    try:
        spec = importlib.util.find_spec(name.replace("/", "."))
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.submodule_search_locations is not None


def read_chain(
    recipe: str, place: RecipePath, overrides: Iterable[Override] = ()
) -> tuple[Chain, Mapping[str, str]]:
    """Read the files that Hydra will compose.

    Args:
        recipe: Its name; a chain without files, if there is none.
        place: Where it is looked for.
        overrides: Whose options are read too.

    Returns:
        The recipe and those that it builds on; and each file that is listed and not there, with FILE:LINE.

    Raises:
        UsageError: A file cannot be read, or builds on itself; file and line are named.
        ConfigError: Hydra is to look into a package that the user did not name.
    """
    chosen = list(overrides)
    main = place.main(recipe)
    searched = [item.value() for item in chosen if item.key_or_group == SEARCH_PATH]
    primary = main / f"{recipe}.yaml"
    searched += [_search_path_of(read_mapping(primary))] if is_file(primary) else []
    more = [_checked(entry, place) for entries in searched if isinstance(entries, list) for entry in entries]
    walk = _Walk([main, CONF, RECIPES, *more])
    found = [pair for name in (recipe, *_options_in(chosen)) for pair in walk.visit(name)]
    chain = [(name, [entry for _, entry in doc.defaults]) for name, doc in found if "/" not in name]
    return chain, walk.missed


def _search_path_of(primary: YamlDocument) -> Any:
    """Return where a recipe lets Hydra look, as Hydra reads it."""
    found = OmegaConf.select(OmegaConf.create(primary.content), SEARCH_PATH)
    return list(found) if isinstance(found, ListConfig) else found


def _checked(entry: object, place: RecipePath) -> Path:
    """Return a folder of Hydra's search path; anything else would be imported.

    Raises:
        ConfigError: It is no folder, and no package that the user named.
    """
    folder = Path(str(entry).removeprefix(FOLDER))
    check_path(SEARCH_PATH, folder)
    if not folder.is_dir() and entry not in place.packages:
        allowed = "folders, and packages that --config-dir names: looking into a package imports it"
        remedies = [f"--config-dir {entry}"] if str(entry).startswith(PACKAGE) else []
        raise ConfigError(key=SEARCH_PATH, value=entry, allowed=allowed, remedies=remedies)
    return folder


def _options_in(overrides: Iterable[Override]) -> Iterator[str]:
    """Yield the files that overrides choose, if they choose any: `group=option`, `group=[one,other]`."""
    for item in overrides:
        value: Any = item.value()
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and "." not in item.key_or_group:
                yield f"{item.key_or_group}/{name}"


class _Walk:
    """Reads files and those in their lists of defaults, each once.

    Args:
        folders: Where they lie, in the order in which Hydra looks.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._done: set[str] = set()
        self.missed: dict[str, str] = {}
        """Files that are listed and not there, each with FILE:LINE of where."""

    def visit(
        self, name: str, above: tuple[str, ...] = (), listed: str | None = None
    ) -> Iterator[tuple[str, YamlDocument]]:
        """Yield a file and those that it lists, the last word first; nothing, where Hydra will miss it.

        Raises:
            UsageError: One cannot be read, or lists itself.
        """
        files = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in self._folders)
        file = next((each for each in files if is_file(each)), None)
        if file is None and listed is not None:
            self.missed[name] = listed
        if file is None or name in self._done:
            return
        document = read_mapping(file) if "/" not in name else read_yaml(file)
        yield name, document
        above = (*above, name)
        for line, entry in reversed(document.defaults):
            for child in _children(entry, name.rpartition("/")[0]):
                if child in above or len(above) > MAX_DEPTH:
                    circle = " -> ".join([*above[-3:], child])
                    raise document.refusal(line, f"defaults that never end: {circle}")
                yield from self.visit(child, above, f"{document.file}:{line}")
        self._done.add(name)


def _children(entry: Any, group: str) -> list[str]:
    """Return the files that an entry of a list of defaults names.

    Example:
        >>> _children({"override /model@net": "gpt"}, "data"), _children("lm", ""), _children("_self_", "")
        (['model/gpt'], ['lm'], [])
    """
    if isinstance(entry, str):
        names = [entry.partition("@")[0]]
    else:
        ((key, options),) = entry.items()
        inner = key.split()[-1].partition("@")[0]
        names = [f"{inner}/{each}" for each in (options if isinstance(options, list) else [options]) if each]
    absolute = [name if name.startswith("/") or not group else f"{group}/{name}" for name in names]
    return [name.lstrip("/") for name in absolute if name.rpartition("/")[2] != "_self_"]


def listed_options(defaults: Sequence[Any], group: str) -> list[str] | None:
    """Return the options of a group that a list of defaults names; None where it does not name the group.

    Example:
        >>> listed_options(["lm", {"callbacks": ["a", "b"]}, {"override precision": "auto"}], "callbacks")
        ['a', 'b']
    """
    for entry in reversed(defaults):
        if isinstance(entry, dict):
            options = {str(key).removeprefix("override "): value for key, value in entry.items()}
            if group in options:
                value = options[group]
                return [str(each) for each in (value if isinstance(value, list) else [value])]
    return None


def listed_groups(chain: Chain) -> set[str]:
    """Return the groups of many options that a recipe lists, itself or by what it builds on."""
    return {
        group for group in MULTI_CHOICE_GROUPS if any(listed_options(d, group) is not None for _, d in chain)
    }
