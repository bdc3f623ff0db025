"""Format numbers and tables as plain text, and print JSON to stdout."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

WIDTH = 100
"""Line length of the output of `plan`, in characters, if stdout is not a terminal."""
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Bytes of each unit of size that a user may type."""


def parse_bytes(text: str) -> int:
    """Parse a size in the format of `human_bytes` and return its bytes; a unit is required.

    Raises:
        ValueError: The text is not a size.

    Example:
        >>> parse_bytes("40GiB") == 40 * 2**30, parse_bytes("1.5 kib"), parse_bytes("24GB")
        (True, 1536, 24000000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.strip().lower())
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2] if match else "")
    if match is None or unit is None or not float(match[1]):
        raise ValueError(f"{text}: expected a size above 0 with its unit, one of {', '.join(UNITS)}")
    # Rounded down, so that a memory limit is not exceeded.
    return int(float(match[1]) * unit)


def printable(text: str) -> str:
    r"""Escape a text's control characters and the characters that change the text direction.

    Example:
        >>> printable("a\x1b[2Jb\u202ec")
        'a\\x1b[2Jb\\u202ec'
    """
    shown = (char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
    return "".join(shown)


def human_bytes(num_bytes: float) -> str:
    """Format a number of bytes in the binary unit that leaves at most four digits.

    Example:
        >>> human_bytes(0), human_bytes(1536), human_bytes(3 * 2**30)
        ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 1)):
        # Round before the comparison, so that 1023.96 KiB is shown as 1.0 MiB.
        if abs(round(num_bytes, digits)) < 1024:
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def human_count(count: float) -> str:
    """Format a count with a decimal prefix.

    Example:
        >>> human_count(17), human_count(2_164_416), human_count(5.4e10)
        ('17', '2.2M', '54.0G')
    """
    for prefix, digits in (("", 0), ("k", 1), ("M", 1), ("G", 1), ("T", 1)):
        if abs(round(count, digits)) < 1000:
            return f"{count:.{digits}f}{prefix}"
        count /= 1000
    return f"{count:.1f}P"


def line_width(width: int | None = None) -> int | None:
    """Return the number of columns of the terminal, or `width` if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else width


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Return a plain-text table whose lines fit the terminal, or `width` if there is no terminal.

    The widest columns are wrapped first. No column becomes narrower than its longest word. If the table is
    still too wide, words are broken.

    Example:
        >>> print(text_table(["name", "n"], [["a/b", "1"], ["long", "two or three"]], width=13))
         name  n
         a/b   1
         long  two or
               three
    """
    table = [[printable(" ".join(cell.split())) for cell in row] for row in [header, *rows]]
    columns = [*zip(*table, strict=True)]
    widths = [max(1, *map(len, column)) for column in columns]
    # Leave one space before the first column and two spaces between columns.
    limit = (line_width(width) or sys.maxsize) - 2 * len(widths)
    longest_words = [max(1, *map(len, [title, *" ".join(cells).split()])) for title, *cells in columns]
    # The first pass breaks no word; the second pass has an effect only if the table is still too wide.
    for least in (longest_words, [1] * len(widths)):
        while sum(widths) > limit and widths != least:
            spare = [index for index, size in enumerate(widths) if size > least[index]]
            widths[max(spare, key=widths.__getitem__)] -= 1
    wrappers = [textwrap.TextWrapper(size, break_on_hyphens=False) for size in widths]
    lines: list[str] = []
    for row in table:
        # A row has as many lines as its longest cell; shorter cells are filled with empty lines.
        wrapped = (wrapper.wrap(cell) for wrapper, cell in zip(wrappers, row, strict=True))
        for parts in zip_longest(*wrapped, fillvalue=""):
            cells = (part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append(f" {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def json_safe(value: Any) -> Any:
    """Replace NaN and infinity in a value by strings, since strict JSON has neither.

    Example:
        >>> json_safe({"loss": float("nan"), "steps": [1, 2.5]})
        {'loss': 'nan', 'steps': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    """Write a value as JSON to stdout."""
    sys.stdout.write(json.dumps(json_safe(value), indent=1) + "\n")
