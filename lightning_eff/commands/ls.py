"""Show recipes and techniques, one line each; `ls NAME` shows one of them whole."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_eff.core import catalog
from lightning_eff.core.errors import EXIT_OK, UsageError, suggest_name
from lightning_eff.core.text import text_table

USAGE = """lightning-eff ls [WORD|NAME] [--json]
lightning-eff ls NAME --explain DEVICE [--json]

  ls               all recipes, techniques and options
  ls WORD          those whose name or line contains the word
  ls NAME          the card of one: what it saves and costs, conflicts, options
  --explain h200   what tiles make of it there, below the card of a technique that depends on them:
                   h100, h200, a100, rtx4090, b200 or cpu
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = argparse.ArgumentParser(prog="lightning-eff ls", add_help=False, allow_abbrev=False)
    for flag in ("--json", "--debug"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--explain")
    parser.error = _usage_error  # pyright: ignore[reportAttributeAccessIssue]
    given, words = parser.parse_known_args(arguments)
    unknown = [word for word in words if word.startswith("-")] + words[1:]
    if unknown:
        _usage_error(f"unknown argument {unknown[0]!r}")
    word = words[0] if words else ""
    named = _named(word)
    explanation = _explain(named, given.explain) if given.explain is not None else ""
    if named is not None:
        _show_card(named, explanation, as_json=given.json)
        return EXIT_OK
    found = [entry for entry in catalog.entries() if word.lower() in f"{entry.name} {entry.summary}".lower()]
    if not found:
        names = {entry.name for entry in catalog.entries()}
        names |= {name.rpartition("/")[2] for name in names}
        text = f"ls: nothing is called {word!r}; {suggest_name(word, names)}"
        raise UsageError(text)
    if given.json:
        sys.stdout.write(json.dumps({"rows": [entry.as_dict() for entry in found]}, indent=1) + "\n")
    else:
        rows = [[entry.name, entry.kind, entry.summary] for entry in found]
        sys.stdout.write(text_table(["name", "kind", "what it is"], rows) + "\n")
    return EXIT_OK


def _usage_error(message: str) -> NoReturn:
    text = f"ls: {message}\n{USAGE}"
    raise UsageError(text)


def _explain(entry: catalog.Entry | None, device: str) -> str:
    """Ask a technique's module for its explanation: only here anything heavy is imported."""
    if entry is None or not catalog.has_explanation(entry):
        names = [each.name for each in catalog.options() if catalog.has_explanation(each)]
        text = (
            f"ls --explain {device}: expected one of {', '.join(names)}\n"
            f"  try: lightning-eff ls {names[-1]} --explain {device}"
        )
        raise UsageError(text)
    from lightning_eff.report.tile_explanation import known_device

    module = importlib.import_module(f"lightning_eff.{entry.name.replace('/', '.')}")
    return module.explain(known_device("--explain ", device))


def _named(word: str) -> catalog.Entry | None:
    """Return the one entry that is meant: by its whole name, or by its last part when only one has it."""
    every = catalog.entries()
    exact = [entry for entry in every if entry.name == word]
    short = [entry for entry in every if entry.name.rpartition("/")[2] == word]
    if exact:
        return exact[0]
    return short[0] if len(short) == 1 else None


def _show_card(entry: catalog.Entry, explanation: str, *, as_json: bool) -> None:
    card = catalog.entry_details(entry)
    if as_json:
        extra = {"explanation": explanation.splitlines()} if explanation else {}
        sys.stdout.write(json.dumps(card | extra, indent=1) + "\n")
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
