"""Make Markdown tables for generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(quoted(str(cell)) for cell in line)} |" for line in lines)


def quoted(text: str) -> str:
    """Return text with `|` escaped, and names such as `_target_` as code instead of emphasis.

    Example:
        >>> quoted("set x._target_=A, or `_partial_`")
        'set `x._target_=A`, or `_partial_`'
    """
    parts = text.replace("|", "&#124;").split("`")
    parts[::2] = [re.sub(r"([\w.]*\b_[a-z]+_\b[\w.=]*)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)
