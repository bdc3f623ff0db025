"""A model that runs out of memory on purpose, and has every kind of state that a retry must restore."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_eff.callbacks.micro_batch import MicroBatch

BATCH = 12
"""Samples of a batch of `data`; its last batch has five."""


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Fault:
    """Runs out of memory in one phase: for more than `limit` samples, or in the phase's `at`-th run."""

    def __init__(self, phase: str = "", *, limit: int = 10**9, at: int = -1, times: int = 1) -> None:
        self.phase, self.limit, self.at, self.times = phase, limit, at, times
        self.count = 0
        self.raised = 0

    def meet(self, phase: str, num_samples: int = 0) -> None:
        if phase != self.phase:
            return
        here = num_samples > self.limit or self.at <= self.count < self.at + self.times
        self.count += 1
        if here:
            self.raised += 1
            raise out_of_memory()


class _InBackward(torch.autograd.Function):
    """Meets the fault in the middle of a backward pass, when some gradients already exist."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault, ctx.num_samples = fault, len(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fault.meet("backward", ctx.num_samples)
        return gradients[0], None


class SGD(torch.optim.SGD):
    """Meets the fault after half of the parameters are updated, and after all are."""

    def __init__(self, params: Any, fault: Fault) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        self.fault = fault

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        everything = group["params"]
        for half in (everything[: len(everything) // 2], everything[len(everything) // 2 :]):
            group["params"] = half
            super().step()
            try:
                self.fault.meet("update")
            except torch.OutOfMemoryError:
                group["params"] = everything
                raise
        group["params"] = everything
        return loss


class StatefulModel(pl.LightningModule):
    """Has random state, buffers, metrics, lists and attributes that a retry must restore."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self.fault = fault or Fault()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 3)
        self.own = torch.Generator().manual_seed(7)
        self.seen = MeanMetric()
        self.losses: list[float] = []
        self.count = 0
        self.logged: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, w = batch["x"], batch["y"], batch["w"]
        self.count += 1
        x = x + random.random() * 0.1 + float(np.random.rand()) * 0.1
        x = x + 0.1 * torch.rand(x.shape, generator=self.own)
        hidden = torch.relu(self.norm(self.first(x).view(-1, 4, 2)).flatten(1))
        if self.training:
            self.fault.meet("forward", len(x))
        hidden = _InBackward.apply(hidden, self.fault)
        losses = F.cross_entropy(self.second(self.drop(hidden)), y, reduction="none")
        loss = (losses * w).sum() / w.sum()
        self.losses.append(float(loss.detach()))
        self.seen(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.seen, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=True, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "loss_weight": w.sum(), "ids": batch["ids"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})
        assert outputs["ids"] == batch["ids"]

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), self.fault)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data(num_samples: int = 4 * BATCH + 5) -> DataLoader[Any]:
    """Return batches of BATCH samples, for `StatefulModel`."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, 6, generator=generator)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    w = torch.rand(num_samples, generator=generator) + 0.1
    rows = [{"x": x[i], "y": y[i], "w": w[i], "ids": f"row {i}"} for i in range(num_samples)]
    return DataLoader(rows, batch_size=BATCH)


def stateful_model(fault: Fault | None = None) -> StatefulModel:
    torch.manual_seed(1)
    model = StatefulModel(fault)
    torch.manual_seed(2)
    random.seed(3)
    np.random.seed(4)
    return model


def final_state(model: StatefulModel, trainer: pl.Trainer) -> dict[str, Any]:
    """Return the full state after a run."""
    optimizer = trainer.optimizers[0]
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "momentum": [s["momentum_buffer"] for s in optimizer.state.values()],
        "random": [torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())],
        "own": [torch.rand(3, generator=model.own)],
        "counts": (model.count, model.losses, model.logged, trainer.global_step),
        "progress": trainer.fit_loop.state_dict(),
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


class ScriptedMicroBatch(MicroBatch):
    """Changes its size before a fixed step: the reference for a fault in the middle of a run."""

    def __init__(self, first: int, then: int, step: int) -> None:
        super().__init__()
        self.plan = (first, then, step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        first, then, step = self.plan
        assert self._size is not None
        self._size.current = first if trainer.global_step < step else then
