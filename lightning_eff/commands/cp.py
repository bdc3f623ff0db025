"""Copy a recipe's file for editing; `train FILE` runs the copy, at first with the same composed config."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from lightning_eff.commands._recipe_file import SUFFIX
from lightning_eff.config.recipes import RecipeLoader, RecipePath
from lightning_eff.core.errors import EXIT_OK, ConfigError, check_path
from lightning_eff.core.text import print_json, printable


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    path = RecipePath.of(options.config_dir)
    chain = RecipeLoader(options.recipe, path).read_chain()
    source = path.folder_of(options.recipe) / f"{options.recipe}{SUFFIX}"
    target = _target(options.file, source)
    # A copy with the name of a base recipe would hide the base, and build on itself.
    if target.stem in {*chain.recipes} - {options.recipe}:
        allowed = f"another name: {options.recipe} builds on {target.stem}"
        raise ConfigError(key="FILE", value=options.file, allowed=allowed)
    text = source.read_text(encoding="utf-8")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        allowed = f"a new file that can be written ({error.strerror or error})"
        raise ConfigError(key="FILE", value=options.file, allowed=allowed) from error
    # The copy needs the recipe's folders; the copy's own folder is searched anyway.
    needed = [folder for folder in path.folders if folder != target.parent.resolve()]
    words = ["lightning-eff", "train", str(target), *RecipePath(tuple(needed)).options()]
    if options.json:
        found = {"recipe": options.recipe, "source": str(source), "file": str(target), "command": words}
        print_json(found)
    else:
        sys.stdout.write(printable(f"{target} is a copy of {source}\n  try: {shlex.join(words)}\n"))
    return EXIT_OK


def _target(word: str, source: Path) -> Path:
    """Return the file to write; reject a name that `train` would not accept."""
    check_path("FILE", word)
    target = Path(word) / source.name if Path(word).is_dir() else Path(word)
    if target.suffix != SUFFIX or "=" in word or word.startswith("~"):  # `train` would read an override
        allowed = f"a file that ends in {SUFFIX}, without = and without ~ at its front"
        raise ConfigError(key="FILE", value=word, allowed=allowed)
    return target
