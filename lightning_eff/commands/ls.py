"""List recipes and techniques, one line each; `ls NAME` shows one in full."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lightning_eff.commands._shared import VerbParser, known_device, print_json
from lightning_eff.core import catalog
from lightning_eff.core.errors import EXIT_OK, UsageError, suggest_name
from lightning_eff.core.text import text_table

USAGE = """lightning-eff ls [WORD|NAME] [--json]
lightning-eff ls NAME --explain DEVICE [--json]

  ls               all recipes, techniques and options
  ls WORD          those whose name or summary contains the word
  ls NAME          one in full: what it saves and costs, conflicts, options
  --explain h200   how it tiles on that device, below the card of a technique that depends on tiles:
                   h100, h200, a100, rtx4090, b200 or cpu
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = VerbParser("ls")
    parser.add_argument("--explain")
    options = parser.parse_word(arguments)
    word, entries = options.word, [*catalog.recipes(), *catalog.options()]
    # An entry is named by its full name, or by the last part of it where only one entry has it.
    exact = [entry for entry in entries if entry.name == word]
    short = [entry for entry in entries if entry.name.rpartition("/")[2] == word]
    named = exact[0] if exact else short[0] if len(short) == 1 else None
    explanation = ""
    if options.explain is not None:
        if named is None or not catalog.has_explanation(named):
            names = [option.name for option in catalog.options() if catalog.has_explanation(option)]
            text = (
                f"ls --explain {options.explain}: expected one of {', '.join(names)}\n"
                f"  try: lightning-eff ls {names[-1]} --explain {options.explain}"
            )
            raise UsageError(text)
        # Only this imports a technique's module, which takes seconds.
        module = importlib.import_module(f"lightning_eff.{named.name.replace('/', '.')}")
        explanation = module.explain(known_device("--explain ", options.explain))
    if named is not None:
        _show_card(named, explanation, as_json=options.json)
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


def _show_card(entry: catalog.Entry, explanation: str, *, as_json: bool) -> None:
    card = catalog.entry_details(entry)
    if as_json:
        print_json(card | ({"explanation": explanation.splitlines()} if explanation else {}))
        return
    lines = [f"{entry.name} ({entry.kind})", f"use: {entry.use}"]
    if catalog.has_explanation(entry):
        lines.append(f"tiles: lightning-eff ls {entry.name} --explain h200")
    lines += ["", card["text"].rstrip()]
    rows = [[row["key"], row["default"], row["meaning"]] for row in card.get("parameters", [])]
    if rows:
        lines += ["", text_table(["option", "default", "meaning"], rows)]
    if explanation:
        lines += ["", explanation]
    sys.stdout.write("\n".join(lines) + "\n")
