"""A run whose order of samples and random draws show in its list of samples and in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import Dataset

NUM_SAMPLES = 12


class Samples(Dataset[Tensor]):
    """Samples that contain their index, and optionally numbers drawn from torch and NumPy."""

    def __init__(self, length: int = NUM_SAMPLES, *, draws: bool = False) -> None:
        self.length, self.draws = length, draws
        self.loaded = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.loaded += 1
        noise = torch.rand(()) + np.random.rand() if self.draws else torch.zeros(())
        return torch.stack([torch.tensor(float(index)), noise.float()])


class Dropping(pl.LightningModule):
    """A layer with dropout, that keeps the indices of each step's samples in `seen`."""

    def __init__(self, *, asks_for_steps: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.dropout = torch.nn.Dropout(0.5)
        self.seen: list[list[int]] = []
        self.asks_for_steps = asks_for_steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch if isinstance(batch, list) else [batch]
        self.seen.append([int(index) for one in batches for index in one[:, 0]])
        return self.dropout(self.layer(torch.cat(batches) / NUM_SAMPLES)).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("noise", torch.rand(()) + np.random.rand())

    def configure_optimizers(self) -> Any:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def save_in(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
