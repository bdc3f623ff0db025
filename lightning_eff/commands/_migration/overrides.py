"""Write values of other tools in the grammar of overrides."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

FILES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet", ".txt", ".md")
"""Endings by which a name of a dataset is a file."""
_TEXT = re.compile(r'"([^"]*)"(:?)')
"""A text in JSON without escapes, and the colon behind it if it is a key."""
_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)(?:[a-z_/]|\.+/)[\w./:@+-]*", re.IGNORECASE | re.ASCII)
"""A text that needs no quotation marks and is read as no other value."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_PLACEHOLDER = re.compile(r"\{(value|text|dataset|whole|number|fraction|inverse)\}")


def filled(template: str, value: Any, key: str = "") -> str:
    """Return an override with a value in its placeholder, which shared.yaml describes.

    Raises:
        ValueError: The value does not fit; the text says what is expected.

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
        value = quoted(_place(str(value)))
    elif kind == "inverse":
        value = written(1 / (found or 1))
    elif kind:
        value = written(int(found or 0) if kind == "whole" else value)
    return f"{name.replace('{key}', key)}{sign}{_PLACEHOLDER.sub(lambda _: value, text)}"


def _place(path: str) -> str:
    """Return a dataset's name as `data.paths` takes it: a file, a folder, or a name on the hub."""
    is_local = path.startswith((".", "/", "~")) or path.endswith(FILES) or os.path.exists(path)  # noqa: PTH110
    return path if is_local else f"hf://datasets/{path}"


def number(value: Any) -> float | None:
    """Return a finite number that is written as a number or a text, or None."""
    if isinstance(value, bool) or not _NUMBER.fullmatch(str(value).strip()):
        return None
    found = float(str(value))  # infinite where a whole number is too large
    return found if math.isfinite(found) else None


def written(value: Any) -> str:
    """Return a value in the grammar of overrides; a text that is a number becomes one.

    Raises:
        ValueError: Hydra or a terminal would take it for something else.

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
    # In Hydra's grammar a key, the text before a colon, is a word without quotation marks.
    if any(not re.fullmatch(r"\w+", key, re.ASCII) for key, colon in _TEXT.findall(dumped) if colon):
        raise ValueError("expected keys that are words")
    return _TEXT.sub(lambda text: f"{text[1]}:" if text[2] else text[0], dumped)


def quoted(text: str) -> str:
    """Return a text that stays a text, also if it is a number."""
    return written(text) if number(text) is None else f'"{text}"'
