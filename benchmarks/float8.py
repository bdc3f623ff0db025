"""Compare the losses of the recipe `lm` in emulated float8 and in bfloat16, step by step.

Each precision trains the recipe in a new process, from the same seed on the same batches. The optimizer is
SGD, whose steps are proportional to the gradients; AdamW would hide a wrong scale. The difference between
float32 and bfloat16 shows the effect of rounding alone.

    python benchmarks/float8.py --steps 50 --json benchmarks/float8.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import arguments, publish, rows_table

PRECISIONS = {
    "bf16_mixed": ["precision=bf16_mixed"],
    "fp32": ["precision=fp32"],
    **{
        recipe: ["precision=float8", "precision.emulate=true", f"precision.recipe={recipe}"]
        for recipe in ("rowwise", "rowwise_with_gw_hp", "tensorwise")
    },
}
FORMATS = {"first": ".4f", "last": ".4f", "largest difference": ".2%"}


def losses_of(overrides: list[str], steps: int, more: list[str]) -> tuple[list[float], str]:
    """Train in a new process; return the loss of each step, and the ledger's text about the precision."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "lightning_eff", "train", "lm", *overrides, f"trainer.max_steps={steps}",
            f"output_root={folder}", "optimizer=sgd",
            "optimizer.lr=0.05", "scheduler=none", "callbacks=[]", "trainer.limit_val_batches=0", *more,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        (path,) = Path(folder).rglob("efficiency.json")
        report: Any = json.loads(path.read_text(encoding="utf-8"))
    did = next(row["did"] for row in report["ledger"] if row["technique"].startswith("precision/"))
    return [loss for _, loss in report["losses"]], did


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per precision."""
    rows = [{key: row[key] for key in ("precision", *FORMATS)} for row in content["rows"]]
    return rows_table(rows, FORMATS, {"first": "first loss", "last": "last loss"})


def main() -> None:
    """Train, print the table, and write the losses to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    runs = {name: losses_of(words, options.steps, options.overrides) for name, words in PRECISIONS.items()}
    plain, _ = runs["bf16_mixed"]
    rows: list[dict[str, Any]] = []
    for name, (losses, did) in runs.items():
        apart = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
        row = {"precision": name, "first": losses[0], "last": losses[-1]}
        rows.append(row | {"largest difference": apart, "did": did})
    by_name = {name: losses for name, (losses, _) in runs.items()}
    publish(options.json, {"rows": rows, "losses": by_name}, table, "torchao")


if __name__ == "__main__":
    main()
