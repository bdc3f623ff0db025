"""Measure the microseconds that plugins add to a step of a tiny model.

Each set of plugins runs in one fit with its own thread. The fits alternate every `TURN` steps, in a random
order that changes each round. So other load on the machine affects all fits alike. Lightning without plugins
runs twice; the difference between these two fits is noise. The CPU time of a full step is measured from the
start of one batch to the start of the next. The first steps are left out, because the report counts
operations in them.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py --json benchmarks/step_overhead.json
"""

from __future__ import annotations

import logging
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from _common import QUIET, arguments, publish, rows_table
from lightning_eff import (
    EfficiencyReport,
    EmptyCache,
    ExactResume,
    GradientAccumulation,
    GradientCheck,
    MicroBatch,
    Progress,
    SkipBadSteps,
)

WARM_UP, TURN = 50, 10
"""Number of untimed steps of each fit, and of steps per turn."""


class Empty(pl.Callback):
    """A callback that does nothing; Lightning calls six hooks of each callback per step."""


class Turns:
    """Lets several threads take turns, so that only one thread runs at a time.

    Args:
        names: Names of the threads.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._left = list(names)
        self._round = list(names)

    def wait(self, name: str) -> None:
        """Wait until the turn of this thread begins."""
        with self._changed:
            self._changed.wait_for(lambda: self._round[-1] == name)

    def end(self, name: str, *, is_last: bool = False) -> None:
        """End this thread's turn."""
        with self._changed:
            if is_last:
                self._left.remove(name)
            self._round.pop()
            if not self._round:
                self._round = random.sample(self._left, len(self._left))
            self._changed.notify_all()


class Model(pl.LightningModule):
    """A model of one layer, which waits for its turn every `TURN` steps.

    Args:
        name: Name of the fit, which is also the name of its thread.
        turns: Turns that all fits share.
    """

    def __init__(self, name: str, turns: Turns) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.step_us: list[float] = []
        """Mean microseconds of a step in each turn."""
        self._name, self._turns = name, turns
        self._began_s = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At the end of a turn, record its time and wait for the next turn."""
        del batch
        if batch_idx < WARM_UP or (batch_idx - WARM_UP) % TURN:
            return
        if batch_idx > WARM_UP:
            self.step_us.append((time.thread_time() - self._began_s) / TURN * 1e6)
        self._turns.end(self._name)
        self._turns.wait(self._name)
        self._began_s = time.thread_time()

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the simplest optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sets() -> dict[str, list[pl.Callback]]:
    """Return the callbacks of each fit; `all of these` is `lm` without the tiled loss and the text sample."""

    def of_lm() -> list[pl.Callback]:
        return [
            Progress(), GradientCheck(), EfficiencyReport(), ExactResume(),
            GradientAccumulation(global_batch_size=4), EmptyCache(),
        ]  # fmt: skip

    alone = {type(each).__name__: [each] for each in of_lm()}
    return {
        "lightning": [],
        "lightning again": [],
        "six empty callbacks": [Empty() for _ in range(6)],
        **alone,
        "all of these": of_lm(),
        "MicroBatch(4)": [MicroBatch(micro_batch_size=4)],
        "MicroBatch()": [MicroBatch()],
        "SkipBadSteps": [SkipBadSteps()],
    }


def fit(name: str, callbacks: list[pl.Callback], turns: Turns, num_steps: int, folder: Path) -> Model:
    """Train with one set of callbacks; return the model, which has recorded the times."""
    model = Model(name, turns)
    turns.wait(name)
    try:
        bar = {"enable_progress_bar": any(isinstance(each, Progress) for each in callbacks)}
        options = QUIET | bar | {"default_root_dir": folder / name}
        trainer = pl.Trainer(callbacks=callbacks, max_steps=num_steps, **options)
        data = TensorDataset(torch.randn(4 * (num_steps + 10), 4))
        trainer.fit(model, DataLoader(data, batch_size=4))
    finally:
        turns.end(name, is_last=True)
    return model


def measure(num_steps: int) -> dict[str, list[float]]:
    """Return the mean step times of all turns, for each set of plugins."""
    found: dict[str, list[float]] = {}
    plugins = sets()
    turns = Turns(list(plugins))
    with tempfile.TemporaryDirectory() as folder:

        def run(name: str) -> None:
            found[name] = fit(name, plugins[name], turns, num_steps, Path(folder)).step_us

        threads = [threading.Thread(target=run, args=(name,)) for name in plugins]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {name: found[name] for name in plugins}


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per set of plugins."""
    formats = {"step_us": ".0f", "added_us": ".1f", "of_lightning": ".1%"}
    return rows_table(content["rows"], formats)


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each fit")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    times = measure(given.steps)
    least = {name: statistics.quantiles(own, n=10)[0] for name, own in times.items()}
    added = {name: own - least["lightning"] for name, own in least.items()}
    rows: list[dict[str, Any]] = [
        {
            "plugins": name,
            "step_us": least[name],
            "added_us": added[name],
            "of_lightning": added[name] / least["lightning"],
        }
        for name in times
    ]
    publish(given.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
