"""Convolutions in tiles in a run: the plain run in float64, exact bytes, and what the report says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.tiled_conv import TiledConv
from lightning_eff.optimizer.in_backward import InBackward
from tests.support.models import make_trainer

SMALL = {"tile_budget_mib": 0.02, "min_pixels": 64}


def level(before: int, channels: int, norm: Callable[[], nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(before, channels, 3, padding=1), *([norm()] if norm else []), nn.SiLU()),
        *(nn.Conv2d(channels, channels, 3, padding=1), *([norm()] if norm else []), nn.SiLU()),
    )


class Images(pl.LightningModule):
    """Two levels and back, with a residual connection around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.levels = nn.ModuleList([level(1, 4), level(4, 4)])
        self.out = nn.Conv2d(4, 1, 1)
        self.double()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        first = self.levels[0](x)
        return self.out(first + self.levels[1](first))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


ALONGSIDE: dict[str, Callable[[], list[Any]]] = {
    "nothing": list,
    "recomputed": lambda: [GradientCheckpointing()],
    "accumulated, in micro-batches": lambda: [
        GradientAccumulation(global_batch_size=8),
        MicroBatch(micro_batch_size=2),
    ],
    "in backward": lambda: [
        OptimizerChoice(optimizer=functools.partial(InBackward, optimizer=torch.optim.SGD, lr=0.02))
    ],
}


def train(model: pl.LightningModule, *callbacks: Any, num_steps: int = 10) -> None:
    torch.manual_seed(2)
    images = torch.randn(16, 1, 19, 19, dtype=torch.float64)
    loader = DataLoader(TensorDataset(images, images.roll(1, -1)), batch_size=4)
    make_trainer(callbacks=list(callbacks), max_steps=num_steps, precision="64-true").fit(model, loader)


@pytest.mark.parametrize("name", list(ALONGSIDE))
def test_a_run_is_the_plain_run_and_is_restored(name: str) -> None:
    models: list[Images] = []
    for tiled in (False, True):
        model, technique = Images(), TiledConv(**SMALL)
        parameters, keys = list(map(id, model.parameters())), list(model.state_dict())
        techniques = [*ALONGSIDE[name](), *([technique] if tiled else [])]
        train(model, *techniques, num_steps=50 if name == "nothing" else 10)
        assert (list(map(id, model.parameters())), list(model.state_dict())) == (parameters, keys)
        models.append(model)
        assert all("forward" not in vars(module) for module in model.modules())
    outcome = technique.outcome()
    assert set(outcome.numbers["segments"]) == {"levels.0.0-3", "levels.1.0-3"}
    assert outcome.numbers["tiles"] > 4
    assert 0 < outcome.numbers["halo"] <= 0.25
    plain, ours = models
    assert plain.losses[0] != plain.losses[-1], "nothing was trained"
    assert ours.losses == pytest.approx(plain.losses, rel=1e-10)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)
