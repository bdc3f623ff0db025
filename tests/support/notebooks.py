"""Write the examples as notebooks: `python -m tests.support.notebooks FOLDER`.

An example is a script in percent format: `# %% [markdown]` begins a text cell, whose lines are comments, and
`# %%` a code cell. A notebook is JSON in Jupyter's format 4.5, without outputs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.techniques import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MARKER = "# %%"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def cells(script: str) -> Iterator[tuple[str, str]]:
    """Yield kind (`markdown` or `code`) and source of each cell.

    Example:
        >>> list(cells("# %% [markdown]\\n# # Title\\n#\\n# Text.\\n\\n# %%\\nx = 1\\n\\n# %%\\nprint(x)"))
        [('markdown', '# Title\\n\\nText.'), ('code', 'x = 1'), ('code', 'print(x)')]
    """
    for part in f"\n{script}".split(f"\n{MARKER}")[1:]:
        kind, _, source = part.partition("\n")
        if kind.strip() == "[markdown]":
            lines = source.strip().splitlines()
            yield "markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        else:
            yield "code", source.strip()


def notebook(script: str) -> dict[str, Any]:
    """Return a script's notebook as plain values for JSON."""
    found: list[dict[str, Any]] = []
    for index, (kind, source) in enumerate(cells(script)):
        cell = {"cell_type": kind, "id": f"cell-{index}", "metadata": {}}
        cell |= {"execution_count": None, "outputs": []} if kind == "code" else {}
        found.append(cell | {"source": source.splitlines(keepends=True)})
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write(folder: Path) -> list[Path]:
    """Write a notebook for each example; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{example.stem}.ipynb" for example in EXAMPLES]
    for example, path in zip(EXAMPLES, written, strict=True):
        content = notebook(example.read_text(encoding="utf-8"))
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return written


if __name__ == "__main__":
    write(Path(sys.argv[1]))
