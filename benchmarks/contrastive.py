"""Measure a step with a contrastive loss, with and without `Contrastive`: time and peak memory.

Two small transformers embed the two halves of each pair. All variants run at several batch sizes. The
variants train alternately, and the table shows the CPU time of the fastest step. The peak memory is
predicted; on a CPU the prediction equals the measured peak to the byte.

    OMP_NUM_THREADS=1 python benchmarks/contrastive.py --json benchmarks/contrastive.json
"""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from _common import QUIET, arguments, publish, rows_table
from lightning_eff.callbacks.contrastive import Contrastive
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.prediction.predict import predict

LENGTH, WIDTH, LAYERS = 16, 64, 3
VARIANTS: dict[str, Any] = {
    "plain": list,
    "GradientCheckpointing()": lambda: [GradientCheckpointing()],
    "Contrastive(micro_batch_size=32)": lambda: [Contrastive(micro_batch_size=32)],
}


class Pairs(pl.LightningModule):
    """A model with two towers and a trained temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(tower() for _ in range(2))
        self.temperature = nn.Parameter(torch.zeros(1))
        self.steps_s: list[float] = []

    def embed(self, batch: Any) -> list[Tensor]:
        """Return the embeddings of both halves of the pairs."""
        return [
            functional.normalize(net(x).mean(1), dim=1) for net, x in zip(self.towers, batch, strict=True)
        ]

    def similarity_loss(self, embeddings: Any) -> Tensor:
        """Return the symmetric contrastive loss of CLIP."""
        one, two = embeddings
        logits, targets = one @ two.T * self.temperature.exp(), torch.arange(len(one))
        loss = functional.cross_entropy
        return (loss(logits, targets) + loss(logits.T, targets)) / 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        del batch_idx
        return self.similarity_loss(self.embed(batch))

    def on_train_batch_start(self, *_: object) -> None:
        """Start timing a step."""
        self.steps_s.append(-time.process_time())

    def on_train_batch_end(self, *_: object) -> None:
        """Stop timing a step."""
        self.steps_s[-1] += time.process_time()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD without momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def tower() -> nn.Module:
    """Return a transformer of repeated blocks."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per batch size and variant."""
    return rows_table(content["rows"], {"step_s": ".2f", "x_plain": ".2f", "peak_mib": ".1f"})


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[128, 256, 512])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    for batch_size in given.batches:
        data = TensorDataset(*torch.randn(2, batch_size, LENGTH, WIDTH))
        loader = DataLoader(data, batch_size=batch_size)
        fastest = dict.fromkeys(VARIANTS, float("inf"))
        for _ in range(given.rounds):
            for name, callbacks in VARIANTS.items():
                model = Pairs()
                pl.Trainer(callbacks=callbacks(), max_steps=2, **QUIET).fit(model, loader)
                fastest[name] = min(fastest[name], *model.steps_s)
        for name, callbacks in VARIANTS.items():
            trainer = pl.Trainer(callbacks=callbacks(), max_steps=2, **QUIET)
            peak: Any = predict(Pairs, next(iter(loader)), trainer=trainer).peak
            row = {"batch": batch_size, "variant": name, "step_s": fastest[name]}
            row |= {"x_plain": fastest[name] / fastest["plain"], "peak_mib": peak.num_bytes / 2**20}
            rows.append(row)
    publish(given.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
