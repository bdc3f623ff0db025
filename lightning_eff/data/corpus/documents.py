"""Documents from text files, JSON, Parquet, Hugging Face datasets, and the prose of Python's own help.

A text file is one document. A row of JSON, Parquet or a dataset is one, in the field that is selected: a
string, or the turns of a conversation (conversations.py has their forms). Files are data: they are read and
never executed.

JSON is read by `json` and not by `datasets`: pyarrow infers one type for a column, fails where later rows
have another one, and names no line.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_eff.data.corpus.conversations import field_value, is_conversation
from lightning_eff.data.corpus.extra import import_extra, is_saved, saved_split

PYDOC = "pydoc"
"""A path that stands for the topics of `help()`, English prose that every Python has."""
HUB = "hf://datasets/"
"""Prefix of a dataset on the hub: `owner/name`, then perhaps `@revision`, `:subset` and `:split`."""
HUB_NAME = re.compile(rf"{HUB}(?P<name>[^@:]+)(@(?P<revision>[^:]+))?(:(?P<subset>[^:]*))?(:(?P<split>.+))?")
TEXT = (".txt", ".text", ".md", ".rst")
LINES = (".jsonl", ".ndjson")
JSON = (".json",)
"""Read where a file is named; in folders such files are often settings."""
TABLES = (".parquet",)
BINARY = (".arrow", ".bin", ".gz", ".npy", ".pkl", ".pt", ".safetensors", ".zip", ".zst")
"""Suffixes that are rejected, so that a run does not train on them as if they were text."""

Turns = list[dict[str, str]]
SourceDocument = tuple[str | Turns, str]
"""A text or a conversation, and where it is from: `file` or `file:row`, the first row is 1."""


class MissingFieldError(ValueError):
    """A file lacks the field that is selected; the process exits as for any wrong setting."""

    exit_code = 2


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
        if is_saved(path):
            folder = saved_split(path, "train")
            found.setdefault(folder.resolve(), folder)
            continue
        if path.is_dir():
            files = [file for file in path.rglob("*") if file.suffix.lower() in known]
            reason = f"has no file that ends in {', '.join(known)}"
        else:
            files = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
            reason = "matches no file, folder or pattern"
        files = sorted(file for file in files if file.is_file())
        if not files:
            msg = f"paths={text!r} {reason}"
            if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not path.suffix:
                msg += f"\n  try: {HUB}{text}, if it is a dataset on the hub"
            raise FileNotFoundError(msg)
        for file in files:
            if file.suffix.lower() in BINARY:
                msg = f"paths={str(file)!r} is no text, JSON or Parquet: convert it to one of them"
                raise ValueError(msg)
            found.setdefault(file.resolve(), file)
    return list(found.values())


def content_digest(sources: Sequence[str | Path]) -> str:
    """Return a hash of the names and contents of the sources; of a dataset on the hub, of its commit."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source} ".encode())
        if isinstance(source, Path):
            for part in sorted(source.iterdir()) if source.is_dir() else [source]:
                with part.open("rb") as file:
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
    if not isinstance(source, Path) or source.is_dir() or source.suffix.lower() in TABLES:
        yield from _table_rows(source)
        return
    try:
        text = source.read_text(encoding="utf-8-sig")  # without the byte order mark of some editors
    except UnicodeDecodeError as error:
        msg = f"{source}: byte {error.start} is not UTF-8: convert the file, or leave it out"
        raise ValueError(msg) from error
    if source.suffix.lower() in JSON and text.lstrip().startswith("["):
        yield from _json_array(source, text)
    elif source.suffix.lower() in (*JSON, *LINES):
        yield from _json_rows(source, text)
    else:
        yield {field: text}, str(source)


def _json_array(file: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    for number, row in enumerate(_parse(text, file), start=1):
        yield _object(row, f"{file}, row {number}"), f"{file}, row {number}"


def _json_rows(file: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            location = f"{file}:{number}"
            yield _object(_parse(line, file, number), location), location


def _parse(text: str, file: Path, number: int | None = None) -> Any:
    """Parse JSON, of a whole file or of line `number`; an error names file and line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        msg = f"{file}:{number or error.lineno}: invalid JSON: {error.msg} at column {error.colno}"
        raise ValueError(msg) from error
    except RecursionError as error:
        msg = f"{file}{f':{number}' if number else ''}: JSON is nested too deeply"
        raise ValueError(msg) from error


def _object(row: Any, location: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        msg = f"{location}: expected an object {{...}}, not {type(row).__name__}"
        raise ValueError(msg)
    return row


def _table_rows(source: str | Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a Parquet file, a saved dataset or one on the hub; nothing of them is stored."""
    datasets = import_extra("datasets")
    number = 0
    try:
        if isinstance(source, Path) and source.is_dir():
            rows = datasets.load_from_disk(str(source))
        elif isinstance(source, Path):
            rows = datasets.load_dataset("parquet", data_files=str(source), split="train", streaming=True)
        else:
            part = _hub_parts(source)
            names = [part["name"], *([part["subset"]] if part["subset"] else [])]
            split = part["split"] or "train"
            rows = datasets.load_dataset(*names, revision=part["revision"], split=split, streaming=True)
        for row in rows:
            number += 1
            yield row, f"{source}:{number}"
    except (ValueError, OSError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        msg = f"{source}: cannot be read after {number} rows: {first}"
        raise ValueError(msg) from error


def _hub_parts(source: str) -> dict[str, str | None]:
    """Return name, revision, subset and split of a dataset on the hub.

    Example:
        >>> list(_hub_parts("hf://datasets/owner/name@main:en:test").values())
        ['owner/name', 'main', 'en', 'test']
    """
    found = HUB_NAME.fullmatch(source)
    if found is None:
        msg = f"paths={source!r}: expected {HUB}owner/name, then perhaps @revision, :subset and :split"
        raise ValueError(msg)
    return found.groupdict()


def _hub_commit(source: str) -> str:
    from huggingface_hub import HfApi

    part = _hub_parts(source)
    name, revision = str(part["name"]), part["revision"] or ""
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
    try:
        value = field_value(row, field, location)
    except KeyError:
        known = sorted(row)[:12]
        msg = f"data.field={field!r}: expected a field of {location}; there are: {', '.join(known)}"
        remedies = ["data=chat"] * is_conversation(row) + [f"data.field={name}" for name in known]
        raise MissingFieldError("\n".join([msg, *(f"  try: {text}" for text in remedies[:3])])) from None
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
