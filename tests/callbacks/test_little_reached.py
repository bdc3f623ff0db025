"""A technique that reaches little of a model warns before the first step, with an override to paste."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core.errors import LittleReachedWarning, keep_overrides
from lightning_eff.optimizer.muon import Muon
from tests.support import models


class Steps(pl.LightningModule):
    """Two convolutions and a linear head, which has 8 of 260 weights."""

    def __init__(self) -> None:
        super().__init__()
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), *pool, nn.Linear(4, 2))
        self.num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Steps, callback: pl.Callback) -> None:
    images: Any = torch.ones(2, 3, 8, 8)
    models.fit(module, callback, loader=DataLoader(images, batch_size=2), max_steps=1)


@pytest.mark.filterwarnings("error::lightning_eff.core.errors.LittleReachedWarning")
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (PeftAdapter, "callbacks.peft_adapter.target_modules=[net.0,net.2,net.5]"),
        (lambda: OptimizerChoice(optimizer=functools.partial(Muon, lr=1e-3)), "optimizer=adamw"),
        (lambda: TorchCompile(backend="eager"), "callbacks.torch_compile.target=net"),
    ],
)
def test_the_warning_comes_before_the_first_step_and_has_an_override(
    make: Callable[[], pl.Callback], remedy: str
) -> None:
    module = Steps()
    with keep_overrides(), pytest.raises(LittleReachedWarning) as caught:
        fit(module, make())
    assert str(caught.value).endswith(f"try: {remedy}")
    assert module.num_steps == 0


@pytest.mark.parametrize(
    "callback",
    [
        PeftAdapter(modules_to_save=["net.0", "net.2"]),
        PeftAdapter(target_modules=["net.5"]),
        TorchCompile(backend="eager", target="net"),
    ],
)
def test_there_is_no_warning_about_named_layers_and_layers_trained_in_full(callback: pl.Callback) -> None:
    module = Steps()
    fit(module, callback)
    assert module.num_steps == 1
