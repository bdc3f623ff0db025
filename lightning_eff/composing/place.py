"""Where recipes lie, and what they list: read from the files, before Hydra composes anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_eff.catalog import MANY, RECIPES
from lightning_eff.errors import UsageError


@dataclass(frozen=True)
class Place:
    """Where a recipe is looked for: a user's own folders ahead of the package's.

    Args:
        folders: What `--config-dir` named.
    """

    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folders: Iterable[str]) -> Place:
        """Return the place of folders that must exist.

        Raises:
            UsageError: One does not.
        """
        for folder in folders:
            if not Path(folder).is_dir():
                text = f"--config-dir {folder}: no such folder"
                raise UsageError(text)
        return cls(tuple(Path(folder).resolve() for folder in folders))

    def main(self, recipe: str) -> Path:
        """Return the folder that holds the recipe; Hydra wants a primary config in its main folder."""
        found = (folder for folder in self.folders if (folder / f"{recipe}.yaml").is_file())
        return next(found, RECIPES)

    def overrides(self, recipe: str) -> list[str]:
        """Return the override that lets Hydra look into the other folders too."""
        others = [folder.as_uri() for folder in self.folders if folder != self.main(recipe)]
        return [f"hydra.searchpath={json.dumps(others)}"] if others else []


def recipe_chain(recipe: str, place: Place) -> Iterator[tuple[str, list[Any]]]:
    """Yield a recipe and those that it builds on, each with its list of defaults, the last word first."""
    own, shipped = place.main(recipe) / f"{recipe}.yaml", RECIPES / f"{recipe}.yaml"
    file = own if own.is_file() else shipped
    if not file.is_file():
        return
    written: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    defaults: list[Any] = written.get("defaults", []) if isinstance(written, dict) else []
    yield recipe, defaults
    for entry in reversed(defaults):
        if isinstance(entry, str) and entry not in ("_self_", recipe):
            yield from recipe_chain(entry, place)


def listed_options(defaults: list[Any], group: str) -> list[str] | None:
    """Return the options of a group that a list of defaults names; None where it does not name the group.

    Example:
        >>> listed_options(["lm", {"callbacks": ["a", "b"]}, {"override precision": "mixed"}], "callbacks")
        ['a', 'b']
    """
    for entry in reversed(defaults):
        if isinstance(entry, dict):
            options = {str(key).removeprefix("override "): value for key, value in entry.items()}
            if group in options:
                value = options[group]
                return [str(each) for each in (value if isinstance(value, list) else [value])]
    return None


def listed_groups(recipe: str, place: Place) -> set[str]:
    """Return the groups of many options that a recipe lists, itself or by what it builds on."""
    chain = list(recipe_chain(recipe, place))
    return {group for group in MANY if any(listed_options(d, group) is not None for _, d in chain)}
