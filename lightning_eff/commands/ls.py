"""List recipes and techniques, one line each; `ls NAME` shows one in full."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from lightning_eff.commands._shared import print_json
from lightning_eff.core import catalog
from lightning_eff.core.errors import EXIT_OK, UsageError, suggest_name
from lightning_eff.core.text import text_table


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    word, entries = options.word, [*catalog.recipes(), *catalog.options()]
    # An entry is named by its full name, or by the last part of it where only one entry has it.
    exact = [entry for entry in entries if entry.name == word]
    short = [entry for entry in entries if entry.name.rpartition("/")[2] == word]
    if exact or len(short) == 1:
        _show_card([*exact, *short][0], as_json=options.json)
        return EXIT_OK
    found = [entry for entry in entries if word.lower() in f"{entry.name} {entry.summary}".lower()]
    if not found:
        names = {entry.name for entry in entries}
        names |= {name.rpartition("/")[2] for name in names}
        text = f"ls: nothing is called {word!r}; {suggest_name(word, names)}"
        raise UsageError(text)
    if options.json:
        print_json({"rows": [asdict(entry) for entry in found]})
    else:
        rows = [[entry.name, entry.kind, entry.summary] for entry in found]
        sys.stdout.write(text_table(["name", "kind", "summary"], rows) + "\n")
    return EXIT_OK


def _show_card(entry: catalog.Entry, *, as_json: bool) -> None:
    card = catalog.entry_details(entry)
    if as_json:
        print_json(card)
        return
    lines = [f"{entry.name} ({entry.kind})", f"use: {entry.use}", "", card["text"].rstrip()]
    rows = [[row["key"], row["default"], row["meaning"]] for row in card.get("parameters", [])]
    if rows:
        lines += ["", text_table(["option", "default", "meaning"], rows)]
    sys.stdout.write("\n".join(lines) + "\n")
