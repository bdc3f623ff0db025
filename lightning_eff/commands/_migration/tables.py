"""Read files of other tools and the tables of their keys; what a row means is described in shared.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from lightning_eff.config.strict_yaml import file_error, is_file, read_yaml
from lightning_eff.core.errors import UsageError

FOLDER = Path(__file__).parent
SHARED = "shared"
MAX_BYTES = 1_000_000
"""A larger file is no config; reading it would take minutes."""


@dataclass(frozen=True)
class Row:
    """What a key becomes."""

    ours: str | Mapping[str, str] = ""
    same: str = ""
    lacks: str = ""
    note: str = ""
    default: Any = None
    always: bool | str = False
    convert: str = ""
    needs: str = ""
    like: str = ""


@dataclass(frozen=True)
class Table:
    """The keys of one tool."""

    title: str
    recipe: str
    marks: Sequence[str]
    sections: Mapping[str, Mapping[str, Row]]
    note: str = ""
    variant: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rows(self) -> dict[str, Row]:
        """The rows of all sections by key."""
        return {key: row for section in self.sections.values() for key, row in section.items()}

    def find(self, key: str) -> tuple[Row, str] | None:
        """Return the row of a key, and what `{key}` stands for in it."""
        rows, parts = self.rows, key.split(".")
        if key in rows:
            return rows[key], parts[-1]
        for count in range(len(parts) - 1, 0, -1):
            row = rows.get(f"{'.'.join(parts[:count])}.*")
            if row is not None:
                return row, ".".join(parts[count:])
        return None


def tools() -> list[str]:
    """Return the names of all tools."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != SHARED)


@cache
def read_table(name: str) -> Table:
    """Read the table of one tool; its own rows win against those of the sections that it includes."""
    content, shared = (read_yaml(FOLDER / f"{each}.yaml").content for each in (name, SHARED))
    templates = {key: row for section in shared.values() for key, row in _rows(section, {}).items()}
    sections = {title: _rows(section, templates) for title, section in content["sections"].items()}
    own = {key for rows in sections.values() for key in rows}
    for title, prefixes in content.pop("include", {}).items():
        rows = _rows(shared[title], {})
        names = {f"{prefix}{key}": row for prefix in prefixes for key, row in rows.items()}
        sections[title] = {key: row for key, row in names.items() if key not in own}
    return Table(**content | {"sections": sections})


def _rows(section: Mapping[str, Any], templates: Mapping[str, Row]) -> dict[str, Row]:
    """Return a section's rows by key, and overrides by value: in YAML both may be several words."""
    found: dict[str, Row] = {}
    for keys, fields in section.items():
        row = replace(templates.get(fields.get("like", ""), Row()), **fields)
        if isinstance(row.ours, Mapping):
            ours = {each: words for values, words in row.ours.items() for each in str(values).lower().split()}
            row = replace(row, ours=ours)
        found |= dict.fromkeys(keys.split(), row)
    return found


def recognize(content: Mapping[str, Any], file: Path) -> str:
    """Return the tool of which a file has most marks.

    Raises:
        UsageError: It has none.
    """
    marks = {name: sum(key in content for key in read_table(name).marks) for name in tools()}
    best = max(marks, key=lambda name: marks[name])
    if marks[best]:
        return best
    allowed = "; ".join(f"{name}: {', '.join(read_table(name).marks)}" for name in marks)
    raise UsageError(f"{file}: expected keys of {allowed}\n  try: lightning-eff migrate FILE --from TOOL")


def read_file(file: Path) -> dict[str, Any]:
    """Return the content of a YAML or JSON file, which is YAML too, as plain values.

    Raises:
        UsageError: It cannot be read or is no mapping; with file and line.
    """
    if not is_file(file) or file.stat().st_size > MAX_BYTES:
        raise file_error(file, 1, f"expected an existing regular file of at most {MAX_BYTES:,} bytes")
    content: dict[Any, Any] = read_yaml(file, expect_mapping=True).content
    return {str(key): value for key, value in content.items()}


def flatten(content: Mapping[str, Any], table: Table, prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key; a mapping stays whole if the table has a row for it, and none below.

    A class of LightningCLI in the `trainer` section becomes a part of the key.

    Example:
        >>> strategy = {"class_path": "x.DDP", "init_args": {"c": 2}}
        >>> flatten({"a": {"b": 1}, "trainer": {"strategy": strategy}}, read_table("lightning"))
        {'a.b': 1, 'trainer.strategy.DDP': True, 'trainer.strategy.DDP.c': 2}
    """
    rows, found = table.rows, dict[str, Any]()
    for name, value in content.items():
        # A dot in a key of the file is no level: quoted, it is no name of an argument either.
        key = f"{prefix}{name!r}" if prefix and "." in str(name) else f"{prefix}{name}"
        entries: list[Any] = value if isinstance(value, list) else [value]
        is_section = key not in rows or f"{key}.*" in rows
        if key.startswith("trainer.") and all(
            isinstance(one, dict) and "class_path" in one for one in entries
        ):
            for one in entries:
                inner = f"{key}.{str(one['class_path']).rpartition('.')[2]}"
                arguments = one.get("init_args") or {}
                arguments = arguments if isinstance(arguments, dict) else {"init_args": arguments}
                found |= {inner: True} | {f"{inner}.{argument}": each for argument, each in arguments.items()}
        elif is_section and len(entries) == 1 and isinstance(entries[0], dict) and entries[0]:
            found |= flatten(entries[0], table, f"{key}.")
        else:
            found[key] = value
    return found
