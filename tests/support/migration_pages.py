"""The tables of docs/migration/, from those that `lightning-eff migrate` looks up."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_eff.commands._migration import (
    accelerate,
    axolotl,
    deepspeed,
    lightning,
    torchtune,
    transformers,
)
from lightning_eff.commands._migration.rows import NO_CHOICE, Row, Table

BEGIN = "migration/"
SECTIONS: dict[str, dict[str, Table]] = {
    "transformers": {
        "Arguments of transformers 5": transformers.FIELDS,
        "Arguments of transformers 4": transformers.OLDER,
        "Of TRL's SFTConfig and ModelConfig": transformers.TRL,
    },
    "accelerate": {"Keys of Accelerate's config": accelerate.TABLE},
    "deepspeed": {"Keys of a DeepSpeed config": deepspeed.TABLE},
    "lightning": {
        "Arguments of Trainer": lightning.ARGUMENTS,
        "Keys of a LightningCLI config": lightning.CONFIG,
    },
    "torchtune": {"Keys of a torchtune config": torchtune.TABLE},
    "axolotl": {"Keys of an Axolotl config": axolotl.TABLE},
}
"""Tables of each source, by their headings."""


def tables(source: str) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, head and rows of each table of a source; keys with the same row share a line."""
    head = ["theirs", "here", "note"]
    return [(title, head, lines(table)) for title, table in SECTIONS[source.removeprefix(BEGIN)].items()]


def lines(table: Table) -> list[list[str]]:
    """Return key, what it is here, and the note, in Markdown."""
    by_row: dict[str, tuple[list[str], Row]] = {}
    for key, row in table.items():
        by_row.setdefault(repr(row) if row.kind != "override" else key, ([], row))[0].append(f"`{key}`")
    return [[", ".join(keys), here(row), note(row)] for keys, row in by_row.values()]


def here(row: Row) -> str:
    """Return the overrides of a row."""
    if row.kind != "override":
        return "not needed" if row.kind == "unneeded" else "-"
    if not isinstance(row.here, Mapping):
        return code(row.here)
    by_text: dict[str, list[str]] = {}
    for value, text in row.here.items():
        by_text.setdefault(text, []).append("any other" if value == "*" else f"`{value}`")
    if list(row.here) == ["true", "false"] and not row.here["false"]:
        return code(row.here["true"])
    return "<br>".join(f"{', '.join(values)}: {code(text)}" for text, values in by_text.items())


def code(text: str) -> str:
    """Return overrides as code; VALUE is the value of the key."""
    shown = text.replace("{s}", "VALUE").replace("{key}", "ARGUMENT").replace("{}", "VALUE")
    recipe, _, rest = shown.removeprefix("recipe=").partition(" ")
    if shown.startswith("recipe="):
        return f"the recipe `{recipe}`" + (f" with `{rest}`" if rest else "")
    return f"`{shown}`" if shown else "nothing"


def note(row: Row) -> str:
    """Return the note of a row, with the reason for other values."""
    others = f"other values: {row.others}" if row.others != NO_CHOICE and row.others != row.note else ""
    return "; ".join(part for part in (row.note, others) if part)
