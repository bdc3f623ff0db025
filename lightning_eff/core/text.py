"""Human-readable numbers and plain-text tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 100
"""Characters of a line of `plan`."""


def human_bytes(num_bytes: float) -> str:
    """Return bytes in the binary unit that leaves at most four digits.

    Example:
        >>> human_bytes(0), human_bytes(1536), human_bytes(3 * 2**30)
        ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 1)):
        if abs(round(num_bytes, digits)) < 1024:
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def human_count(count: float) -> str:
    """Return a count with a decimal prefix.

    Example:
        >>> human_count(17), human_count(2_164_416), human_count(5.4e10)
        ('17', '2.2M', '54.0G')
    """
    for prefix, digits in (("", 0), ("k", 1), ("M", 1), ("G", 1), ("T", 1)):
        if abs(round(count, digits)) < 1000:
            return f"{count:.{digits}f}{prefix}"
        count /= 1000
    return f"{count:.1f}P"


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 1, width: int | None = None
) -> str:
    """Return a table whose columns are aligned, two spaces apart; line breaks in cells become spaces.

    Args:
        header: Titles of the columns.
        rows: Cells.
        indent: Spaces before each line.
        width: Characters of a line at most: the widest columns are wrapped; None for any number.

    Example:
        >>> print(text_table(["name", "n"], [["a", "1"], ["long", "22"]]))
         name  n
         a     1
         long  22
    """
    table = [[" ".join(cell.splitlines()) for cell in line] for line in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    while width and indent + sum(widths) + 2 * (len(widths) - 1) > width:
        widths[widths.index(max(widths))] -= 1
    lines: list[str] = []
    for cells in table:
        wrapped = [
            textwrap.wrap(cell, size, break_on_hyphens=False) or [""]
            for cell, size in zip(cells, widths, strict=True)
        ]
        for parts in zip_longest(*wrapped, fillvalue=""):
            line = "  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append(" " * indent + line.rstrip())
    return "\n".join(lines)
