"""Print the command that a config of another tool is here, and what of it has no counterpart."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import EXIT_OK, UsageError, check_path
from lightning_eff.core.text import print_json, text_table

MAX_VALUE_CHARACTERS = 40


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    if not options.word:
        text = "migrate: expected a file\n  try: lightning-eff migrate training_args.json"
        raise UsageError(text)
    check_path("FILE", options.word)
    from lightning_eff.commands._migration.collecting import CONTROL
    from lightning_eff.report.summary import json_safe

    found = migration(Path(options.word), options.source)
    if options.json:
        print_json(json_safe(found))
    else:
        sys.stdout.writelines(f"{CONTROL.sub('?', line)}\n" for line in _lines(found))
    return EXIT_OK


def migration(file: Path, source: str | None = None) -> dict[str, Any]:
    """Return what a file of another tool is here, as plain values.

    Args:
        file: JSON or YAML.
        source: The tool; None recognizes it.

    Raises:
        UsageError: The file cannot be read, or is none of a known tool.
    """
    from lightning_eff.commands._migration import command, reading, settings
    from lightning_eff.commands._migration.collecting import Collected

    content = reading.read_file(file)
    name = source or reading.recognize(content, file)
    tool = reading.SOURCES[name]
    found = Collected(file.parent)
    found.add(content, tool.table)
    settings.settle(found)
    built = command.build(tool.recipe, found.units)
    return {
        "source": name,
        "title": tool.title,
        "file": str(file),
        "recipe": built.recipe,
        "command": shlex.join(built.words()),
        "overrides": built.overrides,
        "notes": built.notes,
        "no_counterpart": [asdict(finding) for finding in [*found.lacking, *built.refused]],
        "not_needed": found.unneeded,
        "unknown": [{"key": key, "nearest": nearest} for key, nearest in found.unknown],
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what the verb prints."""
    yield f"{found['file']}: {found['title']}"
    yield ""
    yield found["command"]
    for note in found["notes"]:
        yield f"  {note}"
    rows = [[row["key"], _shown(row["value"]), row["reason"]] for row in found["no_counterpart"]]
    yield from _section("no counterpart", ["key", "value", "why, or what is nearest"], rows)
    rows = [[row["key"], row["nearest"]] for row in found["unknown"]]
    yield from _section("unknown keys", ["key", "nearest"], rows)
    if found["not_needed"]:
        yield ""
        yield f"not needed here: {', '.join(found['not_needed'])}"


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield ""
        yield f"{title}:"
        yield text_table(header, rows)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."
