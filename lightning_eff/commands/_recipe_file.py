"""Find the recipe that a word on the command line names, either by the recipe's name or by its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_eff.core.errors import UsageError, check_path, suggest_name

SUFFIX = ".yaml"


def find_recipe(verb: str, word: str, config_dir: Sequence[str]) -> tuple[str, list[str]]:
    """Return a recipe's name, and the user's folders in search order.

    If the word contains a slash or ends in `.yaml`, it names a file, and the folder of this file is searched
    first. The file may also lie below one of the folders in `config_dir`.

    Raises:
        UsageError: The file does not exist.

    Example:
        >>> find_recipe("train", "lm", ["mine"])
        ('lm', ['mine'])
        >>> find_recipe("train", "lm.yaml", [])
        Traceback (most recent call last):
        lightning_eff.core.errors.UsageError: train: there is no file lm.yaml; of recipes there are none
    """
    folders = list(config_dir)
    if "/" not in word and not word.endswith(SUFFIX):
        return word, folders
    check_path("RECIPE", word)
    file = Path(f"{word.removesuffix(SUFFIX)}{SUFFIX}")
    if file.is_file():
        return file.stem, [str(file.parent), *folders]
    if any(Path(folder, file).is_file() for folder in folders):
        return word.removesuffix(SUFFIX), folders
    found = [each.stem for each in file.parent.glob(f"*{SUFFIX}")]
    raise UsageError(f"{verb}: there is no file {file}; of recipes {suggest_name(file.stem, found)}")


def words_of(word: str, config_dir: Sequence[str]) -> list[str]:
    """Return the command-line words with which another command finds the same recipe.

    Args:
        word: The recipe as typed.
        config_dir: The folders that `find_recipe` returned.

    Example:
        >>> words_of("mine/my.yaml", ["mine", "parts"]), words_of("lm", [])
        (['mine/my.yaml', '--config-dir', 'parts'], ['lm'])
    """
    own = str(Path(word).parent) if "/" in word or word.endswith(SUFFIX) else None
    return [word, *(part for folder in config_dir if folder != own for part in ("--config-dir", folder))]
