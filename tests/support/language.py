"""Train a small language model with a plain loop: the reference in float64 (tolerance class T1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, BATCH_SIZE, LENGTH, VOCAB_SIZE = 26, 2, 5, 7


def token_rows(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    """Return tokens and targets; each row ignores another number of targets (-100), some rows all of them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, VOCAB_SIZE, (num_samples, LENGTH), generator=generator)
    y = torch.randint(0, VOCAB_SIZE, (num_samples, LENGTH), generator=generator)
    kept = torch.randint(0, LENGTH + 1, (num_samples,), generator=generator)
    y[torch.arange(LENGTH)[None] >= kept[:, None]] = -100
    y[6:8] = -100
    return x, y


class LanguageModel(pl.LightningModule):
    """A language model of two layers; the loss is a mean over tokens; `weighted` adds their number."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB_SIZE, 6)
        self.out = nn.Linear(6, VOCAB_SIZE)
        self.weighted = weighted
        self.gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(x)))

    def loss(self, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        logits, targets = self(x).reshape(-1, VOCAB_SIZE).double(), y.reshape(-1)
        if not self.weighted:
            return F.cross_entropy(logits, targets.clamp_min(0)), 1
        return F.cross_entropy(logits, targets, ignore_index=-100), int((targets >= 0).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.loss(batch)
        return {"loss": loss, "loss_weight": weight} if self.weighted else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]).clone())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def language_model(weighted: bool) -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(weighted).double()


def window_batches(window: int, num_batches: int) -> Iterator[list[int]]:
    """Yield the batches of each step, epoch after epoch; an epoch's last window may have fewer batches."""
    while True:
        for first in range(0, num_batches, window):
            yield list(range(first, min(first + window, num_batches)))


def train_windows(
    model: LanguageModel, size: int, window: int, clip: float | None, num_steps: int, num_batches: int
) -> None:
    """Train on each window as one large batch: no accumulation, weights or division."""
    x, y = token_rows(num_batches * size)
    (optimizer,), (schedule,) = model.configure_optimizers()
    for batches in itertools.islice(window_batches(window, num_batches), num_steps):
        # With several ranks, sample i of a rank is sample i * ranks + rank of the data.
        rows = [row for b in batches for row in range(b * size, (b + 1) * size)]
        loss, _ = model.loss((x[rows], y[rows]))
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        model.on_before_optimizer_step(optimizer)
        optimizer.step()
        schedule["scheduler"].step()


def train_reference(
    weighted: bool, window: int, clip: float | None, num_steps: int, num_batches: int, ranks: int = 1
) -> LanguageModel:
    model = language_model(weighted)
    train_windows(model, BATCH_SIZE * ranks, window, clip, num_steps, num_batches)
    return model


def loader(num_batches: int, ranks: int = 1) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*token_rows(num_batches * BATCH_SIZE * ranks)), batch_size=BATCH_SIZE)


def assert_same_training(ours: LanguageModel, expected: LanguageModel, clip: float | None) -> None:
    if not clip:  # the hook comes before the clipping
        torch.testing.assert_close(ours.gradients[0], expected.gradients[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close([*ours.parameters()], [*expected.parameters()], rtol=1e-9, atol=1e-11)
