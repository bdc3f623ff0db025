"""Combinations of techniques on two ranks (a covering array), and the reference on one device.

`ours` runs on each rank of test_strategies.py. `expected` is a loop in float64 without techniques except for
adapters, whose initial values come from the same generator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.tiled_loss import TiledLoss
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.core import model_surgery
from lightning_eff.precision.auto import AutoPrecision
from tests.support.language import LanguageModel, token_rows, train_windows
from tests.support.models import make_trainer

STEPS, NUM_BATCHES, BATCH = 9, 7, 8  # two epochs or more, the last window of which is cut short


class Case(NamedTuple):
    """One run of two ranks; `window` is in batches, `size` in samples of a micro-batch."""

    strategy: str
    lora: bool
    recomputed: bool
    tiled: bool
    window: int
    weighted: bool
    clip: float | None
    size: int | None
    precision: str


# Each pair of values of two columns is in some row, unless the strategy excludes it.
COVERING = [
    Case("zero1", True, False, True, 2, True, 0.05, None, "32-true"),
    Case("zero1", False, True, False, 3, False, None, 3, "bf16-mixed"),
    Case("zero2", False, True, True, 1, True, None, 3, "32-true"),
    Case("zero2", True, False, False, 3, False, 0.05, None, "bf16-mixed"),
    Case("zero3", True, True, False, 2, False, None, 3, "32-true"),
    Case("zero3", False, False, True, 1, True, 0.05, None, "bf16-mixed"),
    Case("zero3_offload", True, True, True, 3, True, 0.05, 3, "32-true"),
    Case("zero3_offload", False, False, False, 1, False, None, None, "bf16-mixed"),
    Case("fsdp2", True, False, False, 1, True, None, 3, "bf16-mixed"),
    Case("fsdp2", False, True, True, 3, False, 0.05, None, "32-true"),
    Case("fsdp2", True, True, True, 2, True, 0.05, 3, "64-true"),
    Case("fsdp2_offload", False, True, False, 2, True, 0.05, 3, "bf16-mixed"),
    Case("fsdp2_offload", True, False, True, 1, False, None, None, "32-true"),
]


class Layer(nn.Module):
    """A residual layer: a block to recompute, to shard and to adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Deep(LanguageModel):
    """The language model with a frozen layer, two residual layers, and a tied embedding."""

    def __init__(self, weighted: bool) -> None:
        super().__init__(weighted)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.table(x)))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9), "interval": "step"}
        ]


class Draws(pl.Callback):
    """Sets the initial values of adapters to nonzero values that the reference draws too."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        model_surgery.queue(trainer, pl_module, model_surgery.Stage.ADAPT, draw)


def draw(model: nn.Module) -> int:
    generator = torch.Generator().manual_seed(5)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for parameter in adapters:
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return len(adapters)


def adapter() -> PeftAdapter:
    return PeftAdapter(method="lora", target_modules=["linear"], options={"r": 2, "lora_alpha": 4})


def built(weighted: bool) -> Deep:
    torch.manual_seed(1)
    return Deep(weighted).double()


def ours(case: Case, strategy: Any) -> dict[str, Tensor]:
    """Train a case on this rank; return the full weights."""
    model = built(case.weighted)
    model = model if case.precision == "64-true" else model.float()
    callbacks: list[Any] = [GradientAccumulation(global_batch_size=case.window * 2 * BATCH)]
    callbacks += [adapter(), Draws()] if case.lora else []
    callbacks += [GradientCheckpointing(blocks="Layer")] if case.recomputed else []
    tiled_loss = TiledLoss(tile_budget_mib=1e-4)  # tiles of a few rows
    callbacks += [TritonGemm(min_features=1), tiled_loss] if case.tiled else []
    callbacks += [MicroBatch(micro_batch_size=case.size)] if case.size else []
    plugins = [AutoPrecision(precision=case.precision)] if case.precision == "bf16-mixed" else []
    trainer = make_trainer(
        callbacks=callbacks, plugins=plugins, max_steps=STEPS, strategy=strategy, devices=2,
        use_distributed_sampler=False, enable_checkpointing=False, gradient_clip_val=case.clip,
    )  # fmt: skip
    dataset = TensorDataset(*token_rows(NUM_BATCHES * BATCH * 2))
    rank = range(trainer.global_rank, len(dataset), 2)
    trainer.fit(model, DataLoader(dataset, batch_size=BATCH, sampler=rank))
    if tiled_loss.outcome().effective is not case.tiled or tiled_loss.outcome().numbers.get("whole"):
        raise RuntimeError(tiled_loss.outcome().did)
    return trainer.strategy.lightning_module_state_dict()


def expected(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train on one device in float64, with each window as one batch; return initial and final weights."""
    model = built(case.weighted)
    if case.lora:
        model_surgery.apply(model, adapter().changes())
        draw(model)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train_windows(model, BATCH * 2, case.window, case.clip, STEPS, NUM_BATCHES)
    return start, model.state_dict()
