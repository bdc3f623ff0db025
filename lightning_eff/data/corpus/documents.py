"""Documents from text files, JSON Lines, Parquet, a dataset on the hub, and the prose of Python's own help.

A text file is one document. A row of JSON Lines, Parquet or the hub is one, in the field that is selected: a
string, or the turns of a conversation, a list of `{role, content}`. Files are data: they are read and never
executed.

JSON Lines are read by `json` and not by `datasets`: pyarrow infers one type for a column, fails where later
rows have another one, and names no line.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PYDOC = "pydoc"
"""A path that stands for the topics of `help()`, English prose that every Python has."""
HUB = "hf://datasets/"
"""Prefix of a dataset on the hub: `owner/name`, then perhaps `@revision`."""
TEXT = (".txt", ".text", ".md", ".rst")
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet",)
BINARY = (".arrow", ".bin", ".gz", ".json", ".npy", ".pkl", ".pt", ".safetensors", ".zip", ".zst")
"""Suffixes that are rejected, so that a run does not train on them as if they were text."""

Turns = list[dict[str, str]]
SourceDocument = tuple[str | Turns, str]
"""A text or a conversation, and where it is from: `file` or `file:row`, the first row is 1."""


class MissingFieldError(ValueError):
    """A file lacks the field that is selected; the process exits as for any wrong setting."""

    exit_code = 2


def import_extra(name: str) -> Any:
    """Import a package of the extra `hf`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        msg = f"data/text needs {name}: pip install 'lightning-eff[hf]'"
        raise ModuleNotFoundError(msg) from error


def find_sources(paths: Sequence[str]) -> list[str | Path]:
    """Return the files of some paths: files, folders (recursively), patterns with `*`; `pydoc`; hub names.

    Each is there once, whatever paths match it: read twice, a document might validate what it trained.

    Raises:
        FileNotFoundError: A path matches no file.
        ValueError: A file has an unsupported format.

    Example:
        >>> find_sources(["pydoc", "nowhere.txt"])
        Traceback (most recent call last):
        FileNotFoundError: paths='nowhere.txt' matches no file, folder or pattern
    """
    known = (*TEXT, *LINES, *TABLES)
    found: dict[str | Path, str | Path] = {}
    for text in paths:
        if text == PYDOC or text.startswith(HUB):
            found[text] = text
            continue
        path = Path(text).expanduser()
        if path.is_dir():
            files = [file for file in path.rglob("*") if file.suffix.lower() in known]
            reason = f"has no file that ends in {', '.join(known)}"
        else:
            files = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
            reason = "matches no file, folder or pattern"
        files = sorted(file for file in files if file.is_file())
        if not files:
            msg = f"paths={text!r} {reason}"
            raise FileNotFoundError(msg)
        for file in files:
            if file.suffix.lower() in BINARY:
                msg = (
                    f"paths={str(file)!r} is neither text nor .jsonl nor .parquet: convert it to one of them"
                )
                raise ValueError(msg)
            found.setdefault(file.resolve(), file)
    return list(found.values())


def content_digest(sources: Sequence[str | Path]) -> str:
    """Return a hash of the names and contents of the sources; of a dataset on the hub, of its commit."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source} ".encode())
        if isinstance(source, Path):
            with source.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        elif source == PYDOC:
            digest.update(json.dumps(_topics()).encode())
        else:
            digest.update(_hub_commit(source).encode())
    return digest.hexdigest()


def read_documents(sources: Sequence[str | Path], field: str) -> Iterator[SourceDocument]:
    """Yield all documents, in the order of the sources; an error names file and row."""
    for source in sources:
        if source == PYDOC:
            yield from ((text, f"{PYDOC}:{name}") for name, text in _topics().items())
        else:
            for row, location in _read_rows(source, field):
                yield _check_content(row, location, field), location


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))


def _read_rows(source: str | Path, field: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a source, with their locations."""
    if not isinstance(source, Path) or source.suffix.lower() in TABLES:
        yield from _table_rows(source)
        return
    try:
        text = source.read_text(encoding="utf-8-sig")  # without the byte order mark of some editors
    except UnicodeDecodeError as error:
        msg = f"{source}: byte {error.start} is not UTF-8: convert the file, or leave it out"
        raise ValueError(msg) from error
    yield from _json_rows(source, text) if source.suffix.lower() in LINES else [({field: text}, str(source))]


def _json_rows(file: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            msg = f"{file}:{number}: invalid JSON: {error.msg} at column {error.colno}"
            raise ValueError(msg) from error
        except RecursionError as error:
            msg = f"{file}:{number}: JSON is nested too deeply"
            raise ValueError(msg) from error
        if not isinstance(row, dict):
            msg = f"{file}:{number}: expected an object {{...}}, not {type(row).__name__}"
            raise ValueError(msg)
        yield row, f"{file}:{number}"


def _table_rows(source: str | Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a Parquet file, or of the training split on the hub; nothing of them is stored."""
    datasets = import_extra("datasets")
    number = 0
    try:
        if isinstance(source, Path):
            rows = datasets.load_dataset("parquet", data_files=str(source), split="train", streaming=True)
        else:
            name, _, revision = source.removeprefix(HUB).partition("@")
            rows = datasets.load_dataset(name, revision=revision or None, split="train", streaming=True)
        for row in rows:
            number += 1
            yield row, f"{source}:{number}"
    except (ValueError, OSError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        msg = f"{source}: cannot be read after {number} rows: {first}"
        raise ValueError(msg) from error


def _hub_commit(source: str) -> str:
    from huggingface_hub import HfApi

    name, _, revision = source.removeprefix(HUB).partition("@")
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision  # known without the network
    try:
        return str(HfApi().dataset_info(name, revision=revision or None).sha)
    except (ValueError, OSError) as error:
        msg = (
            f"paths={source!r}: the hub does not return its commit ({type(error).__name__})\n"
            f"  try: {HUB}owner/name@COMMIT, which may be in the cache, or HF_HUB_OFFLINE=0"
        )
        raise ValueError(msg) from error


def _check_content(row: Mapping[str, Any], location: str, field: str) -> str | Turns:
    """Return a row's field: a string, or a list of turns, of which `role` and `content` are kept."""
    if field not in row:
        known = sorted(row)[:12]
        msg = f"data.field={field!r}: expected a field of {location}; there are: {', '.join(known)}"
        raise MissingFieldError("\n".join([msg, *(f"  try: data.field={name}" for name in known[:3])]))
    value = row[field]
    content: Any = value
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        content = [{key: turn.get(key) for key in ("role", "content")} for turn in value]
    is_turns = isinstance(content, list) and content is not value
    strings: list[Any] = [text for turn in content for text in turn.values()] if is_turns else [content]
    if not all(isinstance(text, str) for text in strings):
        msg = f"{location}: {field!r} is neither a text nor a list of {{role, content}}: {str(value)[:60]!r}"
        raise ValueError(msg)
    if any("\ud800" <= character <= "\udfff" for text in strings for character in text):
        msg = f"{location}: {field!r} contains an unpaired surrogate, which is no valid text: remove the row"
        raise ValueError(msg)
    return content
