"""A model that two ranks train on different numbers of batches, and a plain loop with all batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff.core.shards import full_tensor
from tests.support.models import make_trainer

TWO_RANKS: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
EPOCHS = 3
SIZES = [[2, 2, 2, 2, 2, 2, 2, 1], [3, 3, 3, 2]]
"""Number of samples in each batch, by rank."""
Batch = dict[str, Tensor]


class Stream(IterableDataset[Batch]):
    """Yields the batches of one rank."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Model(pl.LightningModule):
    """A regression in float64; its loss is a mean over samples or, if weighted, over some targets."""

    def __init__(self, *, is_weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.is_weighted = is_weighted
        self.evaluated_at: list[int] = []

    def forward(self, batch: Batch) -> Any:
        errors = (self.layers(batch["x"]) - batch["y"]).square()
        if not self.is_weighted:
            return errors.mean()
        return {"loss": errors[batch["mask"]].mean(), "loss_weight": batch["mask"].sum()}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluated_at.append(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches_of(rank: int, sizes: Sequence[Sequence[int]] = SIZES) -> list[Batch]:
    generator = torch.Generator().manual_seed(3 + rank)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return [
        {
            "x": torch.randn(size, 4, **draw),
            "y": torch.randn(size, 3, **draw),
            "mask": torch.rand(size, 3, **draw) < 0.7,
        }
        for size in sizes[rank]
    ]


class Stated(Stream):
    """Reports rank 0's length on all ranks."""

    def __len__(self) -> int:
        return 8


def loader_of(rank: int, kind: Any = Stream, sizes: Sequence[Sequence[int]] = SIZES) -> DataLoader[Any]:
    return DataLoader(kind(batches_of(rank, sizes)), batch_size=None)


def fit(
    *callbacks: pl.Callback,
    model: Model | None = None,
    kind: Any = Stream,
    sizes: Sequence[Sequence[int]] = SIZES,
    ckpt_path: Path | None = None,
    val_sizes: Sequence[Sequence[int]] = (),
    **keywords: Any,
) -> dict[str, Any]:
    model = Model() if model is None else model
    trainer = make_trainer(
        callbacks=[*callbacks], **({"max_epochs": EPOCHS, "max_steps": -1} | TWO_RANKS | keywords)
    )
    loader = loader_of(trainer.global_rank, kind, sizes)
    val_loader = loader_of(trainer.global_rank, sizes=val_sizes) if val_sizes else None
    trainer.fit(model, loader, val_loader, ckpt_path=ckpt_path)
    return {
        "weights": [full_tensor(parameter.detach()) for parameter in model.parameters()],
        "steps": trainer.global_step,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "evaluated_at": model.evaluated_at,
        "epochs": getattr(model, "epochs", []),
        "estimated": trainer.estimated_stepping_batches,
    }


def reference(window: int, *, is_weighted: bool = False, epochs: int = EPOCHS, sizes: Any = SIZES) -> Any:
    """Train in a plain loop; the batch of a step has the samples of all ranks and of one window."""
    model = Model(is_weighted=is_weighted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
    ranks = [batches_of(rank, sizes) for rank in range(2)]
    starts = range(0, max(map(len, ranks)), window)
    for start in [*starts] * epochs:
        step = [batch for batches in ranks for batch in batches[start : start + window]]
        whole = {key: torch.cat([batch[key] for batch in step]) for key in step[0]}
        output = model(whole)
        optimizer.zero_grad()
        (output["loss"] if is_weighted else output).backward()
        optimizer.step()
        schedule.step()
    return {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "steps": len(starts) * epochs,
        "lr": optimizer.param_groups[0]["lr"],
    }


def check(runs: Sequence[Any], expected: Any) -> None:
    for run in runs:
        assert run["steps"] == expected["steps"]
        assert run["lr"] == expected["lr"]
        for ours, theirs in zip(run["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(runs[0]["weights"], runs[1]["weights"], strict=True):
        assert torch.equal(ours, theirs)
