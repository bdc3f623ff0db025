"""A module that calls attention once per step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attending(pl.LightningModule):
    """One call of attention [1, 2, `length`, 4] on each of three batches, with the given options."""

    def __init__(self, length: int = 8, **options: Any) -> None:
        super().__init__()
        self.layer, self.length, self.options = nn.Linear(4, 4), length, options
        self.flags: list[bool] = []
        """Whether PyTorch's math kernel was enabled, by step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.flags.append(torch.backends.cuda.math_sdp_enabled())
        x = self.layer(torch.ones(1, 2, self.length, 4))
        return F.scaled_dot_product_attention(x, x, x, **self.options).mean()

    def train_dataloader(self) -> Any:
        return [torch.zeros(1)] * 3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
