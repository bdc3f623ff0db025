"""Read other tools' files and the tables of their keys; write values in the grammar of overrides.

The head of shared.yaml explains the fields of a row.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from lightning_eff.config.strict_yaml import read_yaml
from lightning_eff.core.errors import UsageError

FOLDER = Path(__file__).parent
SHARED = "shared"
FILES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet", ".txt", ".md")
"""File endings by which a dataset's name is recognized as a file."""
_TEXT = re.compile(r'"([^"]*)"(:?)')
"""A JSON string without escapes, and the colon after it if it is a key."""
_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)(?:[a-z_/]|\.+/)[\w./:@+-]*", re.IGNORECASE | re.ASCII)
"""A string that needs no quotation marks and cannot be read as another value."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_PLACEHOLDER = re.compile(r"\{(value|text|dataset|whole|number|fraction|inverse)\}")


@dataclass(frozen=True)
class Row:
    """A row of a table: the counterpart of one or more keys."""

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
    """The table of one tool's keys."""

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
        """Return the row of a key, and the text that `{key}` stands for in the row."""
        rows, parts = self.rows, key.split(".")
        if key in rows:
            return rows[key], parts[-1]
        # Try the most specific row first: `a.b.*` before `a.*`.
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
    """Read a tool's table; rows of the table replace rows of the sections that the table includes."""
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
    """Return a section's rows by key; in YAML, an entry may name several keys or values."""
    found: dict[str, Row] = {}
    for keys, fields in section.items():
        row = replace(templates.get(fields.get("like", ""), Row()), **fields)
        if isinstance(row.ours, Mapping):
            ours = {each: words for values, words in row.ours.items() for each in str(values).lower().split()}
            row = replace(row, ours=ours)
        found |= dict.fromkeys(keys.split(), row)
    return found


def recognize(content: Mapping[str, Any], file: Path) -> str:
    """Return the tool that a file belongs to: the tool with the most marks (typical keys) in the file.

    Raises:
        UsageError: The file has no mark of any tool.
    """
    marks = {name: sum(key in content for key in read_table(name).marks) for name in tools()}
    best = max(marks, key=lambda name: marks[name])
    if marks[best]:
        return best
    allowed = "; ".join(f"{name}: {', '.join(read_table(name).marks)}" for name in marks)
    raise UsageError(f"{file}: expected keys of {allowed}\n  try: lightning-eff migrate FILE --from TOOL")


def read_file(file: Path) -> dict[str, Any]:
    """Return the content of a YAML or JSON file as plain values (JSON is read as YAML).

    Raises:
        UsageError: The file cannot be read or is not a mapping; the message names file and line.
    """
    content: dict[Any, Any] = read_yaml(file, expect_mapping=True).content
    return {str(key): value for key, value in content.items()}


def flatten(content: Mapping[str, Any], table: Table, prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key; a mapping with a row stays one value if its keys have no rows.

    A class of LightningCLI in the `trainer` section becomes part of the key.

    Example:
        >>> strategy = {"class_path": "x.DDP", "init_args": {"c": 2}}
        >>> flatten({"a": {"b": 1}, "trainer": {"strategy": strategy}}, read_table("lightning"))
        {'a.b': 1, 'trainer.strategy.DDP': True, 'trainer.strategy.DDP.c': 2}
    """
    rows, found = table.rows, dict[str, Any]()
    for name, value in content.items():
        # A dot inside a key of the file does not mean nesting. Such a key is quoted, so that the key matches
        # no row.
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


def filled(template: str, value: Any, key: str = "") -> str:
    """Return an override with a value inserted for the placeholder; shared.yaml describes placeholders.

    Raises:
        ValueError: The value does not fit; the message describes the expected value.

    Example:
        >>> filled("seed={whole}", "7"), filled("tags=[{text}]", 7), filled("data.paths={dataset}", "a/b")
        ('seed=7', 'tags=["7"]', 'data.paths=hf://datasets/a/b')
        >>> filled("trainer.{key}={value}", [0, 1], "devices"), filled("x={inverse}", 4)
        ('trainer.devices=[0,1]', 'x=0.25')
    """
    name, sign, text = template.partition("=")
    match = _PLACEHOLDER.search(text)
    kind, found = match[1] if match else "", number(value)
    if kind in ("text", "dataset") and isinstance(value, Mapping | list):
        raise ValueError("expected a text")
    if kind == "number" and found is None:
        raise ValueError("expected a number")
    if kind == "fraction" and (found is None or not 0 <= found < 1):
        raise ValueError("expected a fraction below 1")
    if kind in ("whole", "inverse") and (found is None or found != int(found) or found < (kind == "inverse")):
        raise ValueError("expected a whole number")
    if kind == "text":
        value = quoted(str(value))
    elif kind == "dataset":
        path = str(value)  # a file, a folder, or a name on the hub
        is_local = path.startswith((".", "/", "~")) or path.endswith(FILES) or os.path.exists(path)  # noqa: PTH110
        value = quoted(path if is_local else f"hf://datasets/{path}")
    elif kind == "inverse":
        value = written(1 / (found or 1))
    elif kind:
        value = written(int(found or 0) if kind == "whole" else value)
    return f"{name.replace('{key}', key)}{sign}{_PLACEHOLDER.sub(lambda _: value, text)}"


def number(value: Any) -> float | None:
    """Return a number, or a string that contains a number, as a finite number; otherwise None."""
    # In Python True is an int, and float() accepts "nan" and "1_000".
    if isinstance(value, bool) or not _NUMBER.fullmatch(str(value).strip()):
        return None
    found = float(str(value))  # infinite if a whole number is too large
    return found if math.isfinite(found) else None


def written(value: Any) -> str:
    """Return a value in the grammar of overrides; a string that contains a number becomes a number.

    Raises:
        ValueError: Hydra or a shell would read a different value.

    Example:
        >>> written("5e-5"), written([0.9, None]), written(True), written({"r": 8}), written(["a b"])
        ('5e-5', '[0.9,null]', 'true', '{r:8}', '["a b"]')
    """
    if isinstance(value, str) and number(value) is not None:
        return value.strip()
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    dumped = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if "\\" in dumped or "${" in dumped or not dumped.isprintable():
        raise ValueError("expected printable text without quotation marks, backslashes and ${")
    # In Hydra's grammar, keys of a mapping have no quotation marks, so every key must be a word.
    if any(not re.fullmatch(r"\w+", key, re.ASCII) for key, colon in _TEXT.findall(dumped) if colon):
        raise ValueError("expected keys that are words")
    return _TEXT.sub(lambda text: f"{text[1]}:" if text[2] else text[0], dumped)


def quoted(text: str) -> str:
    """Return a string that Hydra reads as a string, even if it contains a number."""
    return written(text) if number(text) is None else f'"{text}"'
