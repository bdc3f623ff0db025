"""Train a small model on small data: a net, a deeper one, their loader and a quiet Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Made = TypeVar("Made", bound=nn.Module)


class Net(pl.LightningModule):
    """Two linear layers with dropout between them, trained by SGD with momentum."""

    def __init__(self, *, width: int = 16, dropout: float = 0.1, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.first = nn.Linear(8, width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 3)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.dropout(F.relu(self.first(x)))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).float(), y)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Layer(nn.Module):
    """A residual layer with dropout inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))


class Deep(Net):
    """A Net with three repeated blocks in the middle."""

    def __init__(self, *, width: int = 16, dropout: float = 0.1, lr: float = 0.05) -> None:
        super().__init__(width=width, dropout=dropout, lr=lr)
        self.blocks = nn.ModuleList(Layer(width, dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.second(self.norm(x))


def seeded(kind: type[Made], *, seed: int = 1, **keywords: Any) -> Made:
    """Return a model whose weights depend only on the seed, and set a random state that does not."""
    torch.manual_seed(seed)
    model = kind(**keywords)
    torch.manual_seed(2)
    return model


def make_loader(num_samples: int = 40, batch_size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 8, generator=generator)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def make_trainer(**keywords: object) -> pl.Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": -1,
        "max_steps": 10,
    }
    return pl.Trainer(**(quiet | keywords))  # pyright: ignore[reportArgumentType]


def fit(
    model: pl.LightningModule, *callbacks: pl.Callback, loader: Any = None, **keywords: Any
) -> pl.Trainer:
    """Train for ten steps, or as long as the Trainer's keywords say."""
    resumed = keywords.pop("ckpt_path", None)
    steps = {"max_steps": -1} if "max_epochs" in keywords else {}
    trainer = make_trainer(callbacks=list(callbacks), **(steps | keywords))
    trainer.fit(model, make_loader() if loader is None else loader, ckpt_path=resumed)
    return trainer
