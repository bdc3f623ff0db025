"""Documents from files: text, JSON Lines, Parquet, and the prose of Python's own help.

A text file is one document; a row of JSON Lines or Parquet is one, in the field that is asked for: a string,
or the turns of a conversation, a list of `{role, content}`. Files are data: they are read and never run.
"""

from __future__ import annotations

import glob
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROSE = "pydoc"
"""In place of a path: the topics of `help()`, English prose that every Python has."""
TEXT = (".txt", ".text", ".md", ".rst")
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet",)
BINARY = (".arrow", ".bin", ".gz", ".json", ".npy", ".pkl", ".pt", ".safetensors", ".zip", ".zst")
"""Endings that are not read, so that nobody trains on them as if they were text."""

Turns = list[dict[str, str]]


@dataclass(frozen=True)
class SourceDocument:
    """One text or one conversation.

    Args:
        content: A string, or turns with the keys `role` and `content`.
        place: Where it was read: `file` or `file:line`, the first line being 1.
    """

    content: str | Turns
    place: str


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files that paths mean, each once: files, folders (searched whole), patterns with `*`.

    Raises:
        FileNotFoundError: A path means none.
        ValueError: A file is of a kind that cannot be read.

    Example:
        >>> find_files(["nowhere.txt"])
        Traceback (most recent call last):
        FileNotFoundError: paths='nowhere.txt' is no file, folder or pattern that fits one
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path == PROSE:
            continue
        files = _files_of(path)
        if not files:
            reason = "is no file, folder or pattern that fits one"
            if Path(path).is_dir():
                reason = f"holds no file that ends in {', '.join((*TEXT, *LINES, *TABLES))}"
            text = f"paths={path!r} {reason}"
            raise FileNotFoundError(text)
        found.update(dict.fromkeys(files))
    for file in found:
        if file.suffix.lower() in BINARY:
            text = f"paths={str(file)!r} is neither text nor .jsonl nor .parquet: convert it to one of them"
            raise ValueError(text)
    return list(found)


def _files_of(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        known = {*TEXT, *LINES, *TABLES}
        return sorted(f for f in place.rglob("*") if f.suffix.lower() in known and f.is_file())
    return sorted(Path(f) for f in glob.glob(str(place), recursive=True) if Path(f).is_file())  # noqa: PTH207


def read_documents(paths: Sequence[str], field: str) -> list[SourceDocument]:
    """Read all documents, in the order of the paths and of the files' names, each file once.

    Args:
        paths: As `find_files` takes them; `pydoc` stands for the topics of Python's help.
        field: Key of a JSON row, column of a Parquet file.

    Raises:
        MissingFieldError: A row lacks the field.
        ValueError: A row holds something else in it, or there is no document at all.
    """
    seen: set[str | Path] = set()
    documents = [each for path in paths for each in _read(path, field, seen)]
    if not documents:
        text = f"paths={list(paths)} hold no document"
        raise ValueError(text)
    return documents


def _read(path: str, field: str, seen: set[str | Path]) -> Iterator[SourceDocument]:
    """Yield what a path means and was not there yet: a document read twice may validate what it trained."""
    if path == PROSE:
        if PROSE in seen:
            return
        seen.add(PROSE)
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        yield from (SourceDocument(topics[name], f"{PROSE}:{name}") for name in sorted(topics))
        return
    for file in find_files([path]):
        if file.resolve() in seen:
            continue
        seen.add(file.resolve())
        ending = file.suffix.lower()
        if ending in LINES:
            yield from _checked(_json_rows(file, field), field)
        elif ending in TABLES:
            yield from _checked(_table_rows(file, field), field)
        else:
            yield SourceDocument(_text_of(file), str(file))


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # without the mark that some editors put in front
    except UnicodeDecodeError as error:
        text = f"{file}: byte {error.start} is not UTF-8: convert the file, or leave it out"
        raise ValueError(text) from error


def _json_rows(file: Path, field: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(_text_of(file).split("\n"), start=1):
        place = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            text = f"{place}: no JSON: {error.msg} at column {error.colno}"
            raise ValueError(text) from error
        except RecursionError as error:
            text = f"{place}: JSON that is nested too deeply"
            raise ValueError(text) from error
        if not isinstance(row, dict):
            text = f"{place}: expected an object {{...}}, not {type(row).__name__}"
            raise ValueError(text)
        if field not in row:
            raise _missing(place, field, row)
        yield row[field], place


def _table_rows(file: Path, field: str) -> Iterator[tuple[Any, str]]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        text = f"{file}: Parquet is read by pyarrow: pip install 'lightning-eff[hf]'"
        raise ModuleNotFoundError(text) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names: list[str] = table.schema_arrow.names
            if field not in names:
                raise _missing(str(file), field, names)
            for batch in table.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield value, f"{file}:{number}"
    except arrow.ArrowException as error:
        text = f"{file}: no Parquet file that can be read: {str(error).splitlines()[0]}"
        raise ValueError(text) from error


class MissingFieldError(ValueError):
    """The field that is asked for is none of a file's; a setting is wrong, and the process ends so."""

    exit_code = 2


def _missing(place: str, field: str, there: Iterable[str]) -> MissingFieldError:
    keys = sorted(there)[:12]
    text = f"data.field={field!r}: expected a field of {place}; there are: {', '.join(keys)}"
    return MissingFieldError("\n".join([text, *(f"  try: data.field={key}" for key in keys[:3])]))


def _checked(rows: Iterator[tuple[Any, str]], field: str) -> Iterator[SourceDocument]:
    for value, place in rows:
        turns = _turns_of(value)
        strings = [value] if isinstance(value, str) else [v for turn in turns or () for v in turn.values()]
        if any("\ud800" <= character <= "\udfff" for text in strings for character in text):
            text = f"{place}: {field!r} holds half a surrogate pair, which is no text: leave the row out"
            raise ValueError(text)
        if turns is None and not isinstance(value, str):
            text = (
                f"{place}: {field!r} is neither a text nor a list of {{role, content}}: {str(value)[:60]!r}"
            )
            raise ValueError(text)
        yield SourceDocument(value if turns is None else turns, place)


def _turns_of(value: Any) -> Turns | None:
    """Return a conversation with the two keys that are read; None where it is no conversation."""
    turns: list[Any] = value if isinstance(value, list) else []
    plain: list[dict[str, Any]] = [
        {key: turn.get(key) for key in ("role", "content")} for turn in turns if isinstance(turn, dict)
    ]
    right = len(plain) == len(turns) > 0 and all(isinstance(v, str) for turn in plain for v in turn.values())
    return plain if right else None
