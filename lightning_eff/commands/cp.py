"""Copy a recipe's file, to edit it; `train FILE` runs the copy, at first with the same composed config."""

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
    chain = RecipeLoader(options.recipe, path).read_chain()  # for its errors
    source = path.folder_of(options.recipe) / f"{options.recipe}{SUFFIX}"
    target = _target(options.file, source)
    built_on = [name for name in chain.recipes if name != options.recipe]
    if target.stem in built_on:
        text = f"another name: {options.recipe} builds on {target.stem}, and the copy would build on itself"
        remedies = [f"lightning-eff cp {options.recipe} {target.parent / f'my_{target.name}'}"]
        raise ConfigError(key="FILE", value=options.file, allowed=text, remedies=remedies)
    text = source.read_text(encoding="utf-8")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        allowed = "a file that does not exist yet: nothing is overwritten"
        raise ConfigError(key="FILE", value=options.file, allowed=allowed) from error
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror or error})"
        raise ConfigError(key="FILE", value=options.file, allowed=allowed) from error
    # The copy needs these folders; its own folder is searched without being named.
    needed = [folder for folder in path.folders if folder != target.parent.resolve()]
    words = ["lightning-eff", "train", str(target), *RecipePath(tuple(needed)).options()]
    if options.json:
        print_json(
            {
                "recipe": options.recipe,
                "source": str(source),
                "file": str(target),
                "command": words,
            }
        )
    else:
        sys.stdout.write(printable(f"{target} is a copy of {source}\n  try: {shlex.join(words)}\n"))
    return EXIT_OK


def _target(word: str, source: Path) -> Path:
    """Return the file to write, in an existing folder, with a name that `train` accepts."""
    check_path("FILE", word)
    target = Path(word)
    if target.is_dir():
        allowed, remedies = f"a file that ends in {SUFFIX}; this is a folder", [str(target / source.name)]
    elif target.suffix != SUFFIX:
        allowed, remedies = f"a file that ends in {SUFFIX}", [f"{word}{SUFFIX}"]
    elif "=" in word or word.startswith("~"):  # the command line would read it as an override
        allowed, remedies = "a path without = and without ~ at its front", []
    elif not target.parent.is_dir():
        allowed = f"a file in a folder that exists; {target.parent} does not"
        remedies = [f"mkdir -p {shlex.quote(str(target.parent))}"]
    else:
        return target
    raise ConfigError(key="FILE", value=word, allowed=allowed, remedies=remedies)
