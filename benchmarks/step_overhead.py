"""Measure the microseconds that our loop and MicroBatch add to a step, with a model so small that they show.

One training; from batch to batch the loops take turns in an order drawn anew each round, so that what the
machine does meanwhile meets all of them alike. Lightning's own takes two turns: their difference is noise.
Timed is the part of a step that is the loop's.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py --json benchmarks/step_overhead.json
"""

from __future__ import annotations

import logging
import random
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from _common import arguments, publish, rows_table
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.oom_retry import MicroBatchSize

WARM_UP = 200
"""Steps of each loop that are not counted."""


class Model(pl.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return some loss."""
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the simplest optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Turns:
    """Stands for the loop, hands each batch to the next of several, and takes the time.

    Args:
        loops: By name.
    """

    def __init__(self, loops: dict[str, Any]) -> None:
        self.loops = loops
        self.times_us: dict[str, list[float]] = {name: [] for name in loops}
        self._left: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loops["lightning"], name)

    def run(self, *arguments: Any) -> Any:
        """Run a batch in the loop whose turn it is."""
        if not self._left:
            self._left = random.sample(list(self.loops), len(self.loops))
        name = self._left.pop()
        began = time.perf_counter()
        result = self.loops[name].run(*arguments)
        self.times_us[name].append((time.perf_counter() - began) * 1e6)
        return result


def measure(num_steps: int) -> dict[str, list[float]]:
    """Return the times of all steps by loop."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_steps=num_steps,
    )
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    plain = epoch_loop.automatic_optimization
    exact, cut, auto = (lightning_loop.ExactStep(trainer, plain) for _ in range(3))
    cut.micro_batch_size = MicroBatchSize(4, is_auto=False)
    auto.micro_batch_size = MicroBatchSize(None, is_auto=True)
    names = ("lightning", "lightning again", "loop.py", "MicroBatch(4)", "MicroBatch()")
    turns = Turns(dict(zip(names, (plain, plain, exact, cut, auto), strict=True)))
    epoch_loop.automatic_optimization = turns
    data = TensorDataset(torch.randn(4 * (num_steps + 10), 4))
    trainer.fit(Model(), DataLoader(data, batch_size=4))
    return {name: times[WARM_UP:] for name, times in turns.times_us.items()}


def table(content: dict[str, Any]) -> str:
    """Return a row for each loop."""
    rows = content["rows"]
    return rows_table(rows, {key: ".1f" for key in rows[0] if key != "loop"})


def main() -> None:
    """Measure, print the table, and keep the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    times = measure(given.steps)
    rows: list[dict[str, Any]] = []
    for name, own in times.items():
        added = [a - b for a, b in zip(own, times["lightning"], strict=False)]
        rows.append(
            {"loop": name, "step_us": statistics.median(own), "added_us": statistics.median(added)}
            | {f"step_us_{q}": statistics.quantiles(own, n=20)[i] for q, i in (("p5", 0), ("p95", 18))}
        )
    publish(given.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
