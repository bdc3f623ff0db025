"""Convert another tool's config into a command, and list the keys without a counterpart."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import EXIT_OK, PRE_RUN_ERRORS, UsageError, check_path
from lightning_eff.core.text import print_json, printable, text_table

MAX_VALUE_CHARACTERS = 40
PLACEHOLDERS = {
    "model.name": ("NAME", "NAME is a model on the hub, or its folder"),
    "data.paths": ("PATH", "PATH is a file, a folder, or hf://datasets/OWNER/NAME"),
}
"""For each setting that a language model's recipe needs: a placeholder for files without this setting, and a
note."""


def main(options: argparse.Namespace) -> int:
    """Run the verb; if the resulting command cannot be composed, return the exit code of the error."""
    if not options.word:
        raise UsageError("migrate: expected a file\n  try: lightning-eff migrate training_args.json")
    check_path("FILE", options.word)
    found, code = migration(Path(options.word), options.source)
    if options.json:
        print_json(found)
    else:
        sys.stdout.write(printable("\n".join(_lines(found))) + "\n")
    return code


def migration(file: Path, source: str | None = None) -> tuple[dict[str, Any], int]:
    """Convert another tool's file; return the command as plain values, and the exit code.

    Args:
        file: JSON or YAML file of the tool.
        source: Name of the tool; if None, the tool is detected from the keys.

    Raises:
        UsageError: The file or a file named in it cannot be read, or the file belongs to no known tool.
    """
    from lightning_eff.commands._migration.engine import Migration
    from lightning_eff.commands._migration.tables import read_file, read_table, recognize
    from lightning_eff.config.composition import compose_recipe

    content = read_file(file)
    name = source or recognize(content, file)
    found = Migration(read_table(name), file.parent)
    found.add(content, found.table)
    found.settle()
    notes = [*found.notes, *([found.table.note] if found.table.note else [])]
    missing = [key for key in PLACEHOLDERS if name != "lightning" and not found.word(key)]
    words = [f"{key}={PLACEHOLDERS[key][0]}" for key in missing]
    words += [setting.word for setting in found.settings.values()]
    notes += [PLACEHOLDERS[key][1] for key in missing]
    # Model and data come first, because the user has to fill in their placeholders.
    words.sort(key=lambda word: not word.startswith(("model", "data")))
    # Composing a config imports its classes. Classes that the file names are left out, since their code must
    # not run.
    named = {key for key, _, value in (word.partition("._target_=") for word in words) if value}
    if named:
        notes.append(f"not checked, since that would import your classes: {', '.join(sorted(named))}")
    checked = [word for word in words if not any(word.startswith(f"{key}.") for key in named)]
    rejected, code = "", EXIT_OK
    try:
        compose_recipe(found.recipe, checked, writes=False)
    except PRE_RUN_ERRORS as error:
        rejected, code = str(error), error.exit_code
    return {
        "source": name,
        "title": found.table.title,
        "file": str(file),
        "recipe": found.recipe,
        "command": shlex.join(["lightning-eff", "train", found.recipe, *words]),
        "overrides": words,
        "rejected": rejected,
        "notes": notes,
        "no_counterpart": [
            {"key": each.key, "value": each.value, "reason": why} for each, why in found.lacking
        ],
        "not_needed": found.same,
        "unknown": found.unknown,
    }, code


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that the verb prints."""
    yield f"{found['file']}: {found['title']}"
    yield ""
    yield found["command"]
    yield from (f"  {note}" for note in found["notes"])
    if found["rejected"]:
        yield f"\nThis command cannot run unchanged: {found['rejected']}"
    if found["no_counterpart"]:
        rows = [
            [row["key"], str(row["value"])[:MAX_VALUE_CHARACTERS], row["reason"]]
            for row in found["no_counterpart"]
        ]
        yield "\nno counterpart:"
        yield text_table(["key", "value", "why, or what is nearest"], rows)
    if found["unknown"]:
        yield f"\nunknown keys: {', '.join(found['unknown'])}"
    if found["not_needed"]:
        yield f"\nnot needed here: {', '.join(found['not_needed'])}"
