"""A GAN that steps two optimizers itself, and a module with its own schedules, as files of a user."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, outputs))


class GAN(pl.LightningModule):
    """Generator and discriminator with an optimizer each, and schedules that are stepped by hand.

    Args:
        optimizer: `Adam` or `SGD`.
        lr: Learning rate of both.
        clip: Largest gradient norm of the generator, clipped by hand; None for no clipping.
        toggles: Freeze the other network in each backward pass, as Lightning advises.
    """

    def __init__(
        self, *, optimizer: str = "Adam", lr: float = 0.01, clip: float | None = None, toggles: bool = True
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kind, self.lr, self.clip, self.toggles = optimizer, lr, clip, toggles
        self.generator, self.discriminator = _mlp(4, 8), _mlp(8, 1)
        self.seen: list[tuple[float, float]] = []
        """Losses of discriminator and generator by batch."""

    def configure_optimizers(self) -> Any:
        kind = getattr(torch.optim, self.kind)
        parts = (self.discriminator, self.generator)
        optimizers = [kind(part.parameters(), lr=self.lr) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 3, gamma=0.5) for each in optimizers]

    def _is_real(self, samples: Tensor, answer: float) -> Tensor:
        logits = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        optimizers: Any = self.optimizers()
        first, second = optimizers
        noise = torch.randn(len(real), 4, dtype=real.dtype, device=real.device)
        losses: list[Tensor] = []
        for optimizer in (first, second):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            fake = self.generator(noise)
            if optimizer is first:
                loss = self._is_real(real, 1.0) + self._is_real(fake.detach(), 0.0)
            else:
                loss = self._is_real(fake, 1.0)
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clip is not None and optimizer is second:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        schedules: Any = self.lr_schedulers()
        for schedule in schedules:
            schedule.step()
        self.seen.append((float(losses[0]), float(losses[1])))
        self.log("generator_loss", losses[1])


class Scheduled(pl.LightningModule):
    """One optimizer and a schedule: `plateau` watches a logged value, `one_cycle` steps with each batch.

    `two` returns two optimizers, which Lightning rejects in automatic optimization, `none` and `empty` none.
    """

    def __init__(self, *, schedule: str = "plateau") -> None:
        super().__init__()
        self.schedule = schedule
        self.layers = _mlp(8, 1)
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        if self.schedule in ("none", "empty"):
            return None if self.schedule == "none" else []
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.schedule == "two":
            return [optimizer, torch.optim.SGD(self.layers[0].parameters(), lr=0.1)]
        if self.schedule == "one_cycle":
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "loss", "interval": "step", "frequency": 2},
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        self.rates += [
            group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups
        ]
        return loss


class WithoutOptimizer(pl.LightningModule):
    """Has no `configure_optimizers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _mlp(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()


class Numbers(pl.LightningDataModule):
    """Ten shuffled batches of four rows of eight numbers."""

    def train_dataloader(self) -> Any:
        rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
