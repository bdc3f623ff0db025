"""Show recipes and techniques, one line each; `ls NAME` shows one of them whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lightning_eff import catalog
from lightning_eff.errors import EXIT_OK, UsageError, nearest
from lightning_eff.measure.tables import text_table

USAGE = """lightning-eff ls [WORD|NAME] [--json]

  ls               all recipes, techniques and options
  ls WORD          those whose name or line contains the word
  ls NAME          the card of one: what it saves and costs, conflicts, options
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    words = [argument for argument in arguments if not argument.startswith("-")]
    unknown = [flag for flag in flags if flag != "--json"]
    if unknown or len(words) > 1:
        text = f"ls: unknown argument {[*unknown, *words[1:]][0]!r}\n{USAGE}"
        raise UsageError(text)
    word = words[0] if words else ""
    named = _named(word)
    if named is not None:
        _show_card(named, as_json="--json" in flags)
        return EXIT_OK
    found = [entry for entry in catalog.entries() if word.lower() in f"{entry.name} {entry.summary}".lower()]
    if not found:
        names = {entry.name for entry in catalog.entries()}
        names |= {name.rpartition("/")[2] for name in names}
        text = f"ls: nothing is called {word!r}; {nearest(word, names)}"
        raise UsageError(text)
    if "--json" in flags:
        sys.stdout.write(json.dumps({"rows": [entry.as_dict() for entry in found]}, indent=1) + "\n")
    else:
        rows = [[entry.name, entry.kind, entry.summary] for entry in found]
        sys.stdout.write(text_table(["name", "kind", "what it is"], rows) + "\n")
    return EXIT_OK


def _named(word: str) -> catalog.Entry | None:
    """Return the one entry that is meant: by its whole name, or by its last part when only one has it."""
    every = catalog.entries()
    exact = [entry for entry in every if entry.name == word]
    short = [entry for entry in every if entry.name.rpartition("/")[2] == word]
    if exact:
        return exact[0]
    return short[0] if len(short) == 1 else None


def _show_card(entry: catalog.Entry, *, as_json: bool) -> None:
    card = catalog.card(entry)
    if as_json:
        sys.stdout.write(json.dumps(card, indent=1) + "\n")
        return
    lines = [f"{entry.name} ({entry.kind})", f"use: {entry.use}", "", card["text"].rstrip()]
    rows = [[row["key"], row["default"], row["meaning"]] for row in card.get("parameters", [])]
    if rows:
        lines += ["", text_table(["option", "default", "meaning"], rows)]
    sys.stdout.write("\n".join(lines) + "\n")
