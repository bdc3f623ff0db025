"""Measure the compile time of the recipe `fast` with an empty compile cache and with a full one.

Each run starts in a new process, whose report states the compile time, including tracing. All runs share one
cache folder, which is empty before the first run.

    python benchmarks/compile_cache.py --json benchmarks/compile_cache.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import arguments, publish
from lightning_eff.core.text import human_bytes, text_table


def start(recipe: str, folder: str, more: list[str]) -> dict[str, Any]:
    """Train two steps in a new process; return the compiler's figures."""
    command = [sys.executable, "-m", "lightning_eff", "train", recipe, f"output_root={folder}"]
    command += ["trainer.max_steps=2", "trainer.limit_val_batches=0", *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    path = max(Path(folder).rglob("efficiency.json"), key=lambda each: each.stat().st_mtime)
    ledger: Any = json.loads(path.read_text(encoding="utf-8"))["ledger"]
    numbers = next(row["numbers"] for row in ledger if row["technique"] == "callbacks/torch_compile")
    found = {key: numbers[key] for key in ("compile_s", "graphs", "cached", "not_cached")}
    files = (each for each in Path(numbers["cache_dir"]).rglob("*") if each.is_file())
    return found | {"cache_bytes": sum(each.stat().st_size for each in files)}


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per start."""
    rows = content["rows"]
    cells = [
        [
            str(number), f"{row['compile_s']:.1f} s", f"{row['compile_s'] / rows[0]['compile_s']:.2f}",
            str(row["cached"]), str(row["not_cached"]), human_bytes(row["cache_bytes"]),
        ]
        for number, row in enumerate(rows, 1)
    ]  # fmt: skip
    return text_table(["start", "compiling", "x first", "graphs found", "compiled", "folder"], cells)


def main() -> None:
    """Run several times, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [start(options.recipe, folder, options.overrides) for _ in range(options.starts)]
    publish(options.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
