"""The tables of docs/migration/, from the YAML that `lightning-eff migrate` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lightning_eff.commands._migration.tables import Row, read_table

BEGIN = "migration/"


def tables(source: str) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, head and rows of each section of a tool; keys with the same row share a line."""
    head = ["theirs", "here", "note"]
    sections = read_table(source.removeprefix(BEGIN)).sections
    return [(title, head, lines(section)) for title, section in sections.items()]


def lines(section: Mapping[str, Row]) -> list[list[str]]:
    """Return keys, overrides and note of each row, in Markdown."""
    keys_by_row: dict[str, list[str]] = {}
    rows = {repr(row): row for row in section.values()}
    for key, row in section.items():
        keys_by_row.setdefault(repr(row), []).append(f"`{key}`")
    return [[", ".join(keys), here(rows[row]), note(rows[row])] for row, keys in keys_by_row.items()]


def here(row: Row) -> str:
    """Return the overrides of a row; VALUE is the key's value."""
    if isinstance(row.ours, Mapping):
        by_words: dict[str, list[str]] = {}
        for value, words in row.ours.items():
            by_words.setdefault(words, []).append("any other" if value == "*" else f"`{value}`")
        return "<br>".join(f"{', '.join(values)}: {code(words)}" for words, values in by_words.items())
    if row.convert:
        return "see note"
    return code(row.ours) if row.ours else "not needed" if row.same else "-"


def code(words: str) -> str:
    """Return overrides as code."""
    if words.startswith("!"):
        return f"-, {words[1:].strip()}"
    shown = re.sub(
        r"\{key\}", "NAME", re.sub(r"\{(value|text|dataset|whole|number|fraction)\}", "VALUE", words)
    )
    recipe, _, rest = shown.replace("{inverse}", "1/VALUE").removeprefix("recipe=").partition(" ")
    if shown.startswith("recipe="):
        return f"the recipe `{recipe}` with `{rest}`"
    return f"`{shown.replace('{inverse}', '1/VALUE')}`" if shown else "nothing"


def note(row: Row) -> str:
    """Return the note of a row."""
    default = f"default, also written: `{row.default}`" if row.always and row.default is not None else ""
    lacks = f"other values: {row.lacks}" if row.ours and row.lacks else row.lacks
    needs = f"only with `{row.needs}`" if row.needs else ""
    return "; ".join(part for part in (row.note, row.same, lacks, needs, default) if part)
