"""Count the live bytes of two training steps over time, in three recipes that train the same model.

The first step allocates the optimizer's state. The bytes are exact, and the same in every run. The time axis
counts the allocation events in the report, and has the same width for each recipe.

    python benchmarks/memory_timeline.py --json benchmarks/memory_timeline.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from _common import arguments, publish, rows_table

RECIPES = ("baseline", "lm", "low_memory")
COLORS = ("#c8553d", "#2457c5", "#2a9d60")
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 260, 60, 36
STYLE = (
    "text{fill:#1c2330}line{stroke:#c9ced8}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e9ef}line{stroke:#4a505c}}"
)
MIB = 2**20


def measure(recipe: str, overrides: list[str], folder: str) -> dict[str, Any]:
    """Train three steps in a new process; return the peak, and the live bytes over time."""
    command = [sys.executable, "-m", "lightning_eff", "train", recipe, f"output_root={folder}", "--json"]
    command += ["trainer.accelerator=cpu", "trainer.max_steps=3", "trainer.limit_val_batches=0"]
    command += ["logger=none", "~monitors.text_sample", *overrides]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    memory = json.loads(done.stdout)["memory"]
    moments = [sum(size for size in each.values() if isinstance(size, int)) for each in memory["timeline"]]
    peak = {"peak_mib": memory["num_bytes"] / MIB, "phase": memory["phase"], "operation": memory["operation"]}
    return {"recipe": recipe, **peak, "mib": [round(moment / MIB, 1) for moment in moments]}


def table(content: dict[str, Any]) -> str:
    """Return a table with the peak of each recipe."""
    most = content["rows"][0]["peak_mib"]
    rows = [
        {key: row[key] for key in ("recipe", "peak_mib", "phase", "operation")}
        | {"of_baseline": row["peak_mib"] / most}
        for row in content["rows"]
    ]
    return rows_table(rows, {"peak_mib": ".1f", "of_baseline": ".2f"})


def picture(content: dict[str, Any]) -> str:
    """Return an SVG with one line per recipe, for light and dark pages."""
    rows = content["rows"]
    top = 100 * (int(max(row["peak_mib"] for row in rows)) // 100 + 1)
    peaks = ", ".join(f"{row['recipe']} {row['peak_mib']:.0f} MiB" for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="13" aria-label="Live bytes of two steps; peaks: {peaks}">',
        f"<style>{STYLE}</style>",
    ]
    for mib in range(0, top + 1, 100):
        y = _y(mib, top)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 8}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{mib}</text>')
    for row, color in zip(rows, COLORS, strict=False):
        step = (WIDTH - 8 - LEFT) / max(1, len(row["mib"]) - 1)
        points = " ".join(f"{LEFT + n * step:.1f},{_y(mib, top)}" for n, mib in enumerate(row["mib"]))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    for number, (row, color) in enumerate(zip(rows, COLORS, strict=False)):
        x = LEFT + 20 + 190 * number
        parts.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="17">{row["recipe"]}: {row["peak_mib"]:.0f} MiB</text>')
    parts.append(f'<text x="{LEFT - 8}" y="17" text-anchor="end">MiB</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">two training steps</text>')
    return "\n".join([*parts, "</svg>", ""])


def _y(mib: float, top: int) -> float:
    return round(HEIGHT - BOTTOM - mib / top * (HEIGHT - BOTTOM - 30), 1)


def main() -> None:
    """Train each recipe, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(recipe, options.overrides, folder) for recipe in RECIPES]
    publish(options.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
