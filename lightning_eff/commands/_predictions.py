"""Write the results of `predict_step` to one file per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override

from lightning_eff.checkpoint.atomic_io import AtomicFiles


class Predictions(BasePredictionWriter):
    """Saves two lists with one entry per batch: `predictions`, and `indices` of the samples in the data set.

    With several loaders, `predictions` and `indices` have one such list per loader. An earlier file of the
    same checkpoint is replaced.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__("epoch")
        self.file = folder / f"{name}.pt"

    @override
    def write_on_epoch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        if trainer.world_size > 1:
            # Each rank has a fraction of the samples; `indices` identify these samples.
            rank = f"-rank{trainer.global_rank}-of-{trainer.world_size}"
            self.file = self.file.with_name(f"{self.file.stem}{rank}.pt")
        indices = batch_indices[0] if len(batch_indices) == 1 else batch_indices
        AtomicFiles().save_checkpoint({"predictions": predictions, "indices": indices}, self.file)
