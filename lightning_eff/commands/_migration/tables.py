"""Read files of other tools and the tables of their keys; what a row means is described in shared.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lightning_eff.config.strict_yaml import MAX_DEPTH, file_error, is_file, read_yaml
from lightning_eff.core.errors import UsageError

FOLDER = Path(__file__).parent
SHARED = "shared"


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


@dataclass(frozen=True)
class Table:
    """The keys of one tool."""

    title: str
    recipe: str
    marks: tuple[str, ...]
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
    """Read the table of one tool."""
    content, shared = (read_yaml(FOLDER / f"{each}.yaml").content for each in (name, SHARED))
    templates = {key: fields for section in shared.values() for key, fields in _rows(section)}
    shared_rows = {
        title: {f"{prefix}{key}": fields for prefix in prefixes for key, fields in _rows(shared[title])}
        for title, prefixes in content.get("include", {}).items()
    }
    sections: dict[str, dict[str, Row]] = {}
    known: set[str] = set()
    for title, rows in [
        *((title, dict(_rows(own))) for title, own in content["sections"].items()),
        *shared_rows.items(),
    ]:
        sections[title] = {key: _row(fields, templates) for key, fields in rows.items() if key not in known}
        known |= rows.keys()
    others = {key: content[key] for key in ("note", "variant") if key in content}
    return Table(content["title"], content["recipe"], tuple(content["marks"]), sections, **others)


def _rows(section: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for names, fields in section.items():
        yield from ((name, fields) for name in names.split())


def _row(fields: Mapping[str, Any], templates: Mapping[str, Any]) -> Row:
    own = {key: value for key, value in fields.items() if key != "like"}
    complete = {**templates.get(fields.get("like", ""), {}), **own}
    ours = complete.get("ours", "")
    if isinstance(ours, Mapping):
        by_value = {value: words for values, words in ours.items() for value in str(values).lower().split()}
        complete["ours"] = by_value
    return Row(**complete)


def recognize(content: Mapping[str, Any], file: Path) -> str:
    """Return the tool of which a file has most marks.

    Raises:
        UsageError: It has none.
    """
    tables = {name: read_table(name) for name in tools()}
    marks = {name: sum(key in content for key in table.marks) for name, table in tables.items()}
    best = max(tables, key=lambda name: marks[name])
    if marks[best]:
        return best
    known = ", ".join(f"{name} ({', '.join(table.marks)})" for name, table in tables.items())
    raise UsageError(f"{file}: expected keys of {known}\n  try: lightning-eff migrate FILE --from TOOL")


def read_file(file: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file as plain values; nothing in it is run.

    Raises:
        UsageError: It cannot be read, is empty or no mapping, or has a key twice; with file and line.
    """
    if not is_file(file):  # opening a FIFO would block
        raise file_error(file, 1, "expected a regular file" if file.exists() else "no such file")
    content: Any = None
    if file.suffix.lower() == ".json":
        try:
            content = json.loads(file.read_bytes().decode("utf-8-sig"), object_pairs_hook=_unique)
        except (OSError, RecursionError, ValueError) as error:
            raise file_error(file, getattr(error, "lineno", 1), f"not JSON: {error}") from error
    else:
        content = read_yaml(file).content
    if not isinstance(content, dict) or not content:
        found = type(content).__name__ if content else "nothing"
        raise file_error(file, 1, f"expected settings as key: value, not {found}")
    return {str(key): value for key, value in content.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"duplicate key among {', '.join(map(repr, found))}")
    return found


def flatten(content: Mapping[str, Any], table: Table, prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key; a mapping stays whole if the table has a row for it.

    A class of LightningCLI in the `trainer` section becomes a part of the key.

    Raises:
        UsageError: It is nested too deep.

    Example:
        >>> strategy = {"class_path": "x.DDP", "init_args": {"c": 2}}
        >>> flatten({"a": {"b": 1}, "trainer": {"strategy": strategy}}, read_table("lightning"))
        {'a.b': 1, 'trainer.strategy.DDP': True, 'trainer.strategy.DDP.c': 2}
    """
    if prefix.count(".") > MAX_DEPTH:
        raise UsageError(f"{prefix[:MAX_DEPTH]}...: nested deeper than {MAX_DEPTH} levels")
    rows, found = table.rows, dict[str, Any]()
    for name, value in content.items():
        key = f"{prefix}{name}"
        classes: list[Any] = value if isinstance(value, list) else [value]
        if key.startswith("trainer.") and all(
            isinstance(one, dict) and "class_path" in one for one in classes
        ):
            for one in classes:
                inner = f"{key}.{str(one['class_path']).rpartition('.')[2]}"
                arguments = one.get("init_args") or {}
                arguments = arguments if isinstance(arguments, dict) else {"init_args": arguments}
                found |= {inner: True} | {f"{inner}.{argument}": each for argument, each in arguments.items()}
        elif isinstance(value, dict) and value and key not in rows:
            found |= flatten(value, table, f"{key}.")
        else:
            found[key] = value
    return found
