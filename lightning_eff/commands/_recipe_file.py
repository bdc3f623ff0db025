"""Find a recipe that a word names by its file, in the file's folder; the parser calls it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_eff.core import catalog
from lightning_eff.core.errors import UsageError, check_path, suggest_name

SUFFIX = ".yaml"
OF_RUNS = ("validate", "test", "predict", "generate")
"""Verbs that accept a run's folder instead of a recipe."""


def find_recipe(verb: str, word: str, config_dir: Sequence[str]) -> tuple[str, list[str]]:
    """Return a recipe's name, and the user's folders in search order.

    A word with a slash or the ending `.yaml` is a file; its folder is searched first. Below a folder of
    `config_dir`, such a word may also name a recipe.

    Raises:
        UsageError: There is no such file.

    Example:
        >>> find_recipe("train", "lm", ["mine"])
        ('lm', ['mine'])
        >>> find_recipe("train", "lm.yaml", [])
        Traceback (most recent call last):
        lightning_eff.core.errors.UsageError: train: there is no file lm.yaml here...
    """
    folders = list(config_dir)
    if "/" not in word and not word.endswith((SUFFIX, ".yml")):
        return word, folders
    check_path("RECIPE", word)
    file = Path(f"{word.removesuffix(SUFFIX)}{SUFFIX}")
    if file.is_file():
        return file.stem, [str(file.parent), *folders]
    if any(Path(folder, file).is_file() for folder in folders):
        return word.removesuffix(SUFFIX), folders
    raise UsageError(f"{verb}: {_missing(verb, word, file)}")


def words_of(word: str, config_dir: Sequence[str]) -> list[str]:
    """Return the words that name the same recipe in another command, given the results of `find_recipe`.

    Example:
        >>> words_of("mine/my.yaml", ["mine", "parts"]), words_of("lm", [])
        (['mine/my.yaml', '--config-dir', 'parts'], ['lm'])
    """
    own = str(Path(word).parent) if "/" in word or word.endswith(SUFFIX) else None
    return [word, *(part for folder in config_dir if folder != own for part in ("--config-dir", folder))]


def _missing(verb: str, word: str, file: Path) -> str:
    """Return the error for a missing file, with the recipes that exist instead."""
    path = Path(word)
    found = [each.stem for each in (path if path.is_dir() else file.parent).glob(f"*{SUFFIX}")]
    if path.is_dir():
        a_run = (
            f"neither a run's folder, which would have a {catalog.RESOLVED}, nor"
            if verb in OF_RUNS
            else "not"
        )
        return f"{word} is a folder, {a_run} a recipe's file; of recipes in it {suggest_name('', found)}"
    if path.suffix == ".yml" and path.is_file():
        return f"{word}: a recipe's file ends in {SUFFIX}\n  try: mv {word} {path.with_suffix(SUFFIX)}"
    if file.parent == Path() and file.stem in [entry.name for entry in catalog.recipes()]:
        return f"there is no file {file} here\n  try: lightning-eff {verb} {file.stem}"
    return f"there is no file {file}; of recipes {suggest_name(file.stem, found)}"
