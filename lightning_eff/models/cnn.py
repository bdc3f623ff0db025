"""A small residual network for images, written to be read.

Each block adds the output of two 3x3 convolutions with batch normalisation to its input (He et al. 2016).
After half of the blocks, the image size is halved and the number of channels is doubled. Shapes in comments:
B images, C channels, H x W pixels.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class ResidualBlock(nn.Module):
    """Two convolutions and a residual connection; input and output are [B, channels, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(y)))


class CNN(pl.LightningModule):
    """Image classification.

    A batch is a pair: images [B, in_channels, H, W] of floats, and integer labels [B].

    Args:
        in_channels: Channels of the images.
        num_classes: Number of labels.
        channels: Channels of the first half of the blocks; the second half has twice as many.
        num_blocks: Number of blocks in each half.
        dropout: Fraction of the pooled channels that are dropped in training, 0 to 1.

    Raises:
        ValueError: A size is not positive, or `dropout` is outside its range.

    Example:
        >>> model = CNN(in_channels=1, num_classes=10, channels=8, num_blocks=1)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        num_classes: int = 10,
        channels: int = 32,
        num_blocks: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        sizes = {"in_channels": in_channels, "num_classes": num_classes}
        for name, value in (sizes | {"channels": channels, "num_blocks": num_blocks}).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must lie in [0, 1)")
        self.save_hyperparameters()
        self.stem = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.wide = nn.Sequential(*(ResidualBlock(channels) for _ in range(num_blocks)))
        self.halve = nn.Conv2d(channels, 2 * channels, 2, stride=2, bias=False)
        self.deep = nn.Sequential(*(ResidualBlock(2 * channels) for _ in range(num_blocks)))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * channels, num_classes)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes]."""
        x = F.relu(self.stem_norm(self.stem(images)))  # [B, C, H, W]
        x = self.halve(self.wide(x))  # [B, 2C, H / 2, W / 2]
        x = self.deep(x).mean(dim=(2, 3))  # [B, 2C]
        return self.head(self.dropout(x))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per image.

        Args:
            logits: [B, num_classes].
            labels: Integers [B].
        """
        # The loss of 16-bit logits is computed in float32, because 16-bit sums would lose accuracy.
        is_16_bit = logits.dtype in {torch.bfloat16, torch.float16}
        return F.cross_entropy(logits.float() if is_16_bit else logits, labels)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = self.loss(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        for name, value in (("val_loss", self.loss(logits, labels)), ("val_accuracy", accuracy)):
            self.log(name, value, prog_bar=True, sync_dist=True, batch_size=len(labels))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW, for training without a recipe; a recipe has its own optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
