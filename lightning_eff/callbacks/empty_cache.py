"""Return unused memory of PyTorch's caching allocator to the driver, between optimizer steps.

The allocator keeps freed memory in blocks of the sizes that were requested. When tensor sizes change (ragged
batches, validation), these blocks no longer fit, and a run can hit an OOM although enough memory is free.
This callback empties the cache every n optimizer steps, which returns the blocks to the driver. The cache is
emptied between two steps, when activations have been freed. On a CPU, the cache is the heap of glibc.

Saves: memory that the allocator caches but does not use, when tensor sizes change or other processes need the
    GPU.
Costs: the next step requests memory from the driver again. The requests take up to about 10 % of the time if
    the cache is emptied after every step. The time for emptying is logged in milliseconds.
When not: tensor sizes never change.
Conflicts: none. On CUDA, `PYTORCH_ALLOC_CONF=expandable_segments:True` prevents most of this fragmentation.
Source: `torch_empty_cache_steps` of Hugging Face's Trainer;
    https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_eff.core import allocator
from lightning_eff.core.arguments import Count, check_arguments
from lightning_eff.core.errors import NoEffectWarning
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome, Try
from lightning_eff.core.text import human_bytes


@dataclass(frozen=True)
class Released:
    """Result of emptying the cache once: the returned bytes, and the time in seconds."""

    returned_bytes: int
    elapsed_s: float


def release(device: torch.device | str) -> Released:
    """Empty the cache of `device` once, in a training loop without a Trainer.

    Raises:
        ValueError: The device's allocator has no cache to empty.

    Example:
        >>> import os, pytest
        >>> if not allocator.has_cache(torch.device("cpu")): pytest.skip("this C library keeps no cache")
        >>> release("cpu").returned_bytes >= 0
        True
    """
    device = torch.device(device)
    if not allocator.has_cache(device):
        raise ValueError(f"the allocator of {device} has no cache to empty")
    start = time.perf_counter()
    before = allocator.held_bytes(device)
    allocator.empty_cache(device)
    returned = before - allocator.held_bytes(device)
    # The difference is negative if another thread allocates in between.
    return Released(max(0, returned), time.perf_counter() - start)


class EmptyCache(Managed):
    """Empty the allocator's cache between optimizer steps.

    Args:
        every_n_steps: Interval at which the cache is emptied, in optimizer steps.

    Raises:
        ConfigError: `every_n_steps` is not a whole number of at least 1.

    Warns:
        NoEffectWarning: The device has no cache to empty, or the cache was never emptied during `fit`.

    Example:
        >>> trainer = pl.Trainer(callbacks=[EmptyCache(every_n_steps=50)], logger=False, accelerator="cpu")
        >>> EmptyCache(every_n_steps=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: every_n_steps=0: expected a whole number of at least 1
    """

    exact = True
    lowers = ("cached memory",)
    try_as = (Try(overrides=("callbacks.empty_cache.every_n_steps=4",)),)

    @check_arguments
    def __init__(self, *, every_n_steps: Count = 100) -> None:
        self.every_n_steps = every_n_steps
        self._released: list[Released] = []
        self._is_active = False
        self._last_step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        self._last_step = trainer.global_step
        self._released.clear()
        self._is_active = allocator.has_cache(device)
        if not self._is_active:
            text = f"EmptyCache has no effect here: the allocator of {device} has no cache to empty"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last, step = self._last_step, trainer.global_step
        if step == last or not self._is_active:
            return
        self._last_step = step
        # Not `step % every_n_steps`: a batch may make more than one step.
        if step // self.every_n_steps == last // self.every_n_steps:
            return
        released = release(trainer.strategy.root_device)
        self._released.append(released)
        metrics = {
            "eff/empty_cache_returned_bytes": float(released.returned_bytes),
            "eff/empty_cache_ms": released.elapsed_s * 1e3,
        }
        # Why not `pl_module.log_dict`: Lightning would then collect the values again after each batch.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_active and not self._released:
            warnings.warn(f"EmptyCache had no effect: {self.outcome().did}", NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report how often the cache was emptied, the bytes returned, and the time taken."""
        times, steps = len(self._released), self._last_step
        returned_bytes = sum(released.returned_bytes for released in self._released)
        elapsed_s = sum(released.elapsed_s for released in self._released)
        if times:
            often = "once" if times == 1 else f"{times} times"
            did = f"emptied {often}, returned {human_bytes(returned_bytes)} in {elapsed_s * 1e3:.0f} ms"
        else:
            did = (
                f"never emptied (every_n_steps={self.every_n_steps}, {steps} step{'s' * (steps != 1)} so far)"
            )
        numbers = {"times": times, "returned_bytes": returned_bytes, "elapsed_s": elapsed_s}
        return Outcome(did=did, effective=times > 0, numbers=numbers)
