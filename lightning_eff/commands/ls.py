"""List recipes and techniques, one line each; `ls NAME` describes an entry in full."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from lightning_eff.core import catalog
from lightning_eff.core.errors import EXIT_OK, UsageError, suggest_name
from lightning_eff.core.text import print_json, printable, text_table


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    folders: tuple[Path, ...] = ()
    if options.config_dir:
        from lightning_eff.config.recipes import RecipePath  # imports Hydra

        folders = RecipePath.of(options.config_dir).folders
    word, entries = options.word, [*catalog.recipes(folders), *catalog.options(folders)]
    # A word names an entry by its full name, or by the last part of the name if that part is unique.
    exact = [entry for entry in entries if entry.name == word]
    short = [entry for entry in entries if entry.name.rpartition("/")[2] == word]
    if exact or len(short) == 1:
        card = catalog.entry_details([*exact, *short][0], folders)
        if options.json:
            print_json(card)
            return EXIT_OK
        lines = [f"{card['name']} ({card['kind']})", f"use: {card['use']}", "", card["text"].rstrip()]
        rows = [[row["key"], row["default"], row["meaning"]] for row in card.get("parameters", [])]
        lines += ["", text_table(["option", "default", "meaning"], rows)] if rows else []
        sys.stdout.write(printable("\n".join(lines)) + "\n")
        return EXIT_OK
    found = [entry for entry in entries if word.lower() in f"{entry.name} {entry.summary}".lower()]
    if not found:
        names = {entry.name for entry in entries}
        names |= {name.rpartition("/")[2] for name in names}
        raise UsageError(f"ls: nothing is called {word!r}; {suggest_name(word, names)}")
    if options.json:
        print_json({"rows": [asdict(entry) for entry in found]})
    else:
        rows = [[entry.name, entry.kind, entry.summary] for entry in found]
        sys.stdout.write(text_table(["name", "kind", "summary"], rows) + "\n")
    return EXIT_OK
