"""Compare losses of the recipe `lm` in float32, and in bfloat16 with nearest and stochastic rounding.

The run `float32` uses PyTorch's AdamW with float32 weights and states. The run `nearest` uses PyTorch's AdamW
with bfloat16 weights and states. The runs `stochastic` and `other seed` use `adamw_bf16` with bfloat16
weights, and differ in the random bits. The run `states` uses `adamw_bf16` with float32 weights. For each seed
of the recipe, all runs train 160 steps from the same weights on the same batches. The validation loss is
measured on 20 batches after the last step. A run whose result is in `--folder` is not repeated.

    OMP_NUM_THREADS=1 python benchmarks/bf16_rounding.py --json benchmarks/bf16_rounding.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _common import arguments, publish
from lightning_eff.core.text import text_table

RUNS: dict[str, list[str]] = {
    "float32": ["precision=fp32", "optimizer=adamw"],
    "nearest": ["precision=bf16_true", "optimizer=adamw"],
    "stochastic": ["precision=bf16_true", "optimizer=adamw_bf16"],
    "other seed": ["precision=bf16_true", "optimizer=adamw_bf16", "optimizer.seed=1"],
    "states": ["precision=fp32", "optimizer=adamw_bf16"],
}
"""Overrides of each run; the first run is the baseline of the other runs."""
SMALL = [
    "trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.limit_val_batches=1",
    "data.batch_size=16", "data.context_length=16", "model.d_model=16", "model.num_layers=1",
    "model.num_heads=2", "monitors.text_sample.num_tokens=3",
]  # fmt: skip
LAST = 10
"""Number of final steps over which the training loss is averaged."""
STEPS_OF_A_MEAN = 20
"""Number of steps over which each row of the curves is averaged."""


def trained(name: str, seed: int, lr: str | None, folder: Path, more: list[str]) -> dict[str, Any]:
    """Return the report of a run; if the folder has no report yet, run it in a new process."""
    path = folder / f"{name.replace(' ', '_')}_{seed}_{lr or 'recipe'}.json"
    if not path.is_file():
        words = [f"seed={seed}", f"output_root={folder}", *RUNS[name], *more]
        words += [f"optimizer.lr={lr}"] if lr else []
        command = [sys.executable, "-m", "lightning_eff", "train", "lm", *words, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(done.stdout)
    return json.loads(path.read_text())


def row_of(name: str, seed: int, report: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run, and the ratios of its losses to the float32 run with the same seed."""

    def last(losses: list[list[float]]) -> float:
        values = [loss for _, loss in losses[-LAST:]]
        return sum(values) / len(values)

    validation, training = report["metrics"]["val_loss"], last(report["losses"])
    return {
        "run": name,
        "seed": seed,
        "validation_loss": validation,
        "of_float32": validation / base["metrics"]["val_loss"],
        "training_loss": training,
        "training_of_float32": training / last(base["losses"]),
        "state_bytes": report["measured"]["optimizer_state_bytes"],
        "peak_bytes": report["measured"]["peak_bytes"],
        "curve": [round(loss, 5) for _, loss in report["losses"]],
    }


def table(content: dict[str, Any]) -> str:
    """Return a table of all runs, and a table of their training losses, averaged over several steps."""
    rows = content["rows"]
    head = ["run", "seed", "validation loss", "of float32", f"training, last {LAST}", "of float32"]
    head += ["state MiB", "peak MiB"]
    cells = [
        [
            row["run"], str(row["seed"]), f"{row['validation_loss']:.4f}", f"{row['of_float32']:.4f}",
            f"{row['training_loss']:.4f}", f"{row['training_of_float32']:.4f}",
            f"{row['state_bytes'] / 2**20:.2f}", f"{row['peak_bytes'] / 2**20:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    curves = [row["curve"] for row in rows]
    means = [
        [f"{begin + 1}-{begin + STEPS_OF_A_MEAN}"]
        + [f"{statistics.fmean(curve[begin : begin + STEPS_OF_A_MEAN]):.3f}" for curve in curves]
        for begin in range(0, len(curves[0]), STEPS_OF_A_MEAN)
    ]
    names = [f"{row['run']} ({row['seed']})" for row in rows]
    return "\n\n".join([text_table(head, cells), text_table(["steps", *names], means)])


def main() -> None:
    """Train, print the tables, and write figures and curves to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--lr", help="learning rate; the recipe's by default")
    parser.add_argument("--small", action="store_true", help="a tiny model, four steps")
    parser.add_argument("--folder", type=Path, default=Path("outputs/bf16_rounding"))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in given.seeds:
        reports = {
            name: trained(name, seed, given.lr, given.folder, SMALL if given.small else []) for name in RUNS
        }
        rows += [row_of(name, seed, report, reports["float32"]) for name, report in reports.items()]
    publish(given.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
