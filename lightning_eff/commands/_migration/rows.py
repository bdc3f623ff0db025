"""A row of a migration table: what a key of another tool is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NO_CHOICE = "no such choice here"


@dataclass(frozen=True)
class Row:
    """What one key becomes: overrides, nothing because it is so anyway, or nothing because there is none.

    Attributes:
        here: Overrides; `{}` stands for the value, `{s}` for the value as a string. Or such overrides by
            value, in lower case; `*` is any other value, and an empty text means that nothing is needed.
        note: One short sentence; of a row that has no overrides, its reason.
        default: The other tool's value where the file has none; then nothing is to be done.
        decides: The result depends on it, so that the default is written too, and where the key is absent.
        role: Name of a setting that is computed from several keys (`settings.py`).
        splits: The value is a list, or a text of several words, each of which is looked up.
        others: Reason for values that `here` does not list.
        kind: `override`, `lacks` (no counterpart) or `unneeded`.
    """

    here: str | Mapping[str, str] = ""
    note: str = ""
    default: Any = None
    decides: bool = False
    role: str = ""
    splits: bool = False
    others: str = NO_CHOICE
    kind: Literal["override", "lacks", "unneeded"] = "override"


Table = Mapping[str, Row]
"""Rows by key, dotted for nested ones."""


def lacks(reason: str, default: Any = None) -> Row:
    """Return the row of a key without a counterpart."""
    return Row(note=reason, default=default, kind="lacks")


def unneeded(reason: str, default: Any = None) -> Row:
    """Return the row of a key that nothing needs to be said for."""
    return Row(note=reason, default=default, kind="unneeded")


def switch(on: str, note: str = "", *, off: str = "", default: Any = None) -> Row:
    """Return the row of a key that is true or false."""
    return Row({"true": on, "false": off}, note, default=default)


def callback(name: str, note: str = "") -> Row:
    """Return the row of a key that turns a callback on; false removes it from a recipe that has it."""
    return switch(f"+callbacks={name}", note, off=f"~callbacks.{name}")


def under(prefix: str, table: Table) -> dict[str, Row]:
    """Return a table whose keys lie deeper."""
    return {f"{prefix}{key}": row for key, row in table.items()}


def each(keys: str, row: Row) -> dict[str, Row]:
    """Return one row for several keys, which are separated by spaces."""
    return dict.fromkeys(keys.split(), row)
