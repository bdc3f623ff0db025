"""Documents from files: text, JSON Lines, Parquet, and the prose of Python's own help.

A text file is one document. A row of JSON Lines or Parquet is one, in the field that is selected: a string,
or the turns of a conversation, a list of `{role, content}`. Files are data: they are read and never executed.
"""

from __future__ import annotations

import glob
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYDOC = "pydoc"
"""A path that stands for the topics of `help()`, English prose that every Python has."""
TEXT = (".txt", ".text", ".md", ".rst")
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet",)
BINARY = (".arrow", ".bin", ".gz", ".json", ".npy", ".pkl", ".pt", ".safetensors", ".zip", ".zst")
"""Suffixes that are rejected, so that a run does not train on them as if they were text."""

Turns = list[dict[str, str]]


@dataclass(frozen=True)
class SourceDocument:
    """One text or one conversation.

    Args:
        content: A string, or turns with the keys `role` and `content`.
        location: `file` or `file:line`; the first line is 1.
    """

    content: str | Turns
    location: str


class MissingFieldError(ValueError):
    """A file lacks the field that is selected; the process exits as for any wrong setting."""

    exit_code = 2


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files of some paths without duplicates: files, folders (recursively), patterns with `*`.

    Raises:
        FileNotFoundError: A path matches no file.
        ValueError: A file has an unsupported format.

    Example:
        >>> find_files(["nowhere.txt"])
        Traceback (most recent call last):
        FileNotFoundError: paths='nowhere.txt' matches no file, folder or pattern
    """
    known = (*TEXT, *LINES, *TABLES)
    found: dict[Path, None] = {}
    for text in paths:
        if text == PYDOC:
            continue
        path = Path(text).expanduser()
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix.lower() in known and f.is_file())
            reason = f"has no file that ends in {', '.join(known)}"
        else:
            matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
            files = sorted(f for f in matches if f.is_file())
            reason = "matches no file, folder or pattern"
        if not files:
            msg = f"paths={text!r} {reason}"
            raise FileNotFoundError(msg)
        found.update(dict.fromkeys(files))
    for file in found:
        if file.suffix.lower() in BINARY:
            msg = f"paths={str(file)!r} is neither text nor .jsonl nor .parquet: convert it to one of them"
            raise ValueError(msg)
    return list(found)


def read_documents(paths: Sequence[str], field: str) -> list[SourceDocument]:
    """Read all documents, in the order of the paths and of the file names.

    A file is read once, whatever paths match it: read twice, a document might validate what it trained.

    Args:
        paths: As `find_files` takes them; `pydoc` stands for the topics of Python's help.
        field: Key of a JSON row, column of a Parquet file.

    Raises:
        MissingFieldError: A row lacks the field.
        ValueError: The field of a row is neither text nor a conversation, or no document was found.
    """
    seen: set[str | Path] = set()
    documents: list[SourceDocument] = []
    for path in paths:
        if path == PYDOC and PYDOC not in seen:
            from pydoc_data.topics import topics

            documents += [SourceDocument(topics[name], f"{PYDOC}:{name}") for name in sorted(topics)]
            seen.add(PYDOC)
        for file in find_files([path]):
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            if file.suffix.lower() in TABLES:
                rows = _table_rows(file, field)
            else:
                try:
                    text = file.read_text(encoding="utf-8-sig")  # without the byte order mark of some editors
                except UnicodeDecodeError as error:
                    msg = f"{file}: byte {error.start} is not UTF-8: convert the file, or leave it out"
                    raise ValueError(msg) from error
                is_text = file.suffix.lower() not in LINES
                rows = [({field: text}, str(file))] if is_text else _json_rows(file, text)
            documents += [_to_document(row, location, field) for row, location in rows]
    if not documents:
        msg = f"paths={list(paths)} contain no document"
        raise ValueError(msg)
    return documents


def _json_rows(file: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the row and the location of each line."""
    for number, line in enumerate(text.split("\n"), start=1):
        location = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            msg = f"{location}: invalid JSON: {error.msg} at column {error.colno}"
            raise ValueError(msg) from error
        except RecursionError as error:
            msg = f"{location}: JSON is nested too deeply"
            raise ValueError(msg) from error
        if not isinstance(row, dict):
            msg = f"{location}: expected an object {{...}}, not {type(row).__name__}"
            raise ValueError(msg)
        yield row, location


def _table_rows(file: Path, field: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the field of each row, and the row's location."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        msg = f"{file}: Parquet needs pyarrow: pip install 'lightning-eff[hf]'"
        raise ModuleNotFoundError(msg) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names: list[str] = table.schema_arrow.names
            if field not in names:  # refused like a row that lacks it
                yield dict.fromkeys(names), str(file)
            for batch in table.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield {field: value}, f"{file}:{number}"
    except arrow.ArrowException as error:
        msg = f"{file}: invalid Parquet file: {str(error).splitlines()[0]}"
        raise ValueError(msg) from error


def _to_document(row: Mapping[str, Any], location: str, field: str) -> SourceDocument:
    """Check a row's field: a string, or a list of turns, of which `role` and `content` are kept."""
    if field not in row:
        known = sorted(row)[:12]
        msg = f"data.field={field!r}: expected a field of {location}; there are: {', '.join(known)}"
        raise MissingFieldError("\n".join([msg, *(f"  try: data.field={name}" for name in known[:3])]))
    value = row[field]
    content: str | Turns | None = value if isinstance(value, str) else None
    strings: list[Any] = [value]
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        turns = [{key: turn.get(key) for key in ("role", "content")} for turn in value]
        strings = [text for turn in turns for text in turn.values()]
        content = turns if all(isinstance(text, str) for text in strings) else None
    if content is None:
        shown = f"{str(value)[:60]!r}"
        msg = f"{location}: {field!r} is neither a text nor a list of {{role, content}}: {shown}"
        raise ValueError(msg)
    if any("\ud800" <= character <= "\udfff" for text in strings for character in text):
        msg = f"{location}: {field!r} contains an unpaired surrogate, which is no valid text: remove the row"
        raise ValueError(msg)
    return SourceDocument(content, location)
