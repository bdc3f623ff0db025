"""Measure a run with and without `DataPreload`, for samples that wait, compute, or cost nothing.

A small model trains for `--epochs` epochs; the variants alternate (A B C A B C). The table shows the mean
wall time of an epoch in the fastest of `--repeats` runs, and as `setup` the time before that run's first
batch.

    OMP_NUM_THREADS=1 python benchmarks/data_preload.py --json benchmarks/data_preload.json
"""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from _common import QUIET, arguments, publish
from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.core.text import text_table

SECONDS = {"waits 2 ms": 0.002, "computes 2 ms": 0.002, "tiny": 0.0}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "DataPreload()": {},
    "num_workers=2": {"num_workers": 2},
    "num_workers=0": {"num_workers": 0},
}


class Samples(Dataset[Any]):
    """A dataset with samples of one kind."""

    def __init__(self, kind: str, length: int) -> None:
        self.kind, self.length = kind, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kind == "computes 2 ms":
            end = time.thread_time() + SECONDS[self.kind]
            while time.thread_time() < end:
                pass
        elif self.kind == "waits 2 ms":
            time.sleep(SECONDS[self.kind])
        return torch.full((64,), float(index))


class Model(pl.LightningModule):
    """A model of two layers, which records the start time of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.began_s: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        del batch_idx
        self.began_s.append(time.perf_counter())
        return self.layers(batch / 1000.0).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD without momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def run(kind: str, keywords: dict[str, Any] | None, length: int, epochs: int) -> tuple[float, float, str]:
    """Return the mean time of an epoch, the time before the first batch, and the chosen number of workers."""
    preload = None if keywords is None else DataPreload(**keywords)
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[preload] if preload else [], **QUIET)
    model = Model()
    start = time.perf_counter()
    trainer.fit(model, DataLoader(Samples(kind, length), batch_size=8, shuffle=True))
    said = preload.outcome().did if preload else "0 workers"
    return (model.began_s[-1] - model.began_s[0]) / epochs, model.began_s[0] - start, said


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per kind of samples and variant."""
    return text_table(content["head"], content["rows"])


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=15)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for kind in SECONDS:
        runs: dict[str, list[tuple[float, float, str]]] = {name: [] for name in VARIANTS}
        for _ in range(given.repeats):
            for name, keywords in VARIANTS.items():
                runs[name].append(run(kind, keywords, given.length, given.epochs))
        plain_s = min(seconds for seconds, _, _ in runs["plain"])
        for name, measured in runs.items():
            seconds, setup_s, said = min(measured)
            chosen = said.partition(" (")[0].partition(",")[0]
            rows.append([kind, name, chosen, f"{seconds:.2f}", f"{plain_s / seconds:.2f}", f"{setup_s:.2f}"])
    head = ["samples", "variant", "chosen", "epoch s", "x plain", "setup s"]
    publish(given.json, {"head": head, "rows": rows}, table)


if __name__ == "__main__":
    main()
