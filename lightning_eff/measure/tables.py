"""Numbers as people read them, and plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def human_bytes(num_bytes: float) -> str:
    """Return bytes in the binary unit that leaves at most four digits.

    Example:
        >>> human_bytes(0), human_bytes(1536), human_bytes(3 * 2**30)
        ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def human_count(count: float) -> str:
    """Return a count with a decimal prefix.

    Example:
        >>> human_count(17), human_count(2_164_416), human_count(5.4e10)
        ('17', '2.2M', '54.0G')
    """
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.0f}" if prefix == "" else f"{count:.1f}{prefix}"
        count /= 1000
    return f"{count:.1f}P"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 1) -> str:
    """Align columns with two spaces between them; the last column is not padded.

    Example:
        >>> print(text_table(["name", "n"], [["a", "1"], ["long", "22"]]))
         name  n
         a     1
         long  22
    """
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *rows]
    ]
    return "\n".join(" " * indent + line for line in lines)
