"""Send a run's figures to its loggers as `eff/...`, every `log_every_n_steps` optimizer steps.

`EfficiencyReport` calls `LoggedFigures`. The report's page charts the learning rate, the gradient norm and
the memory. Memory is read at most ten times a second. The other figures come from the meter, without a second
measurement. The gradient norm is computed only in steps that are logged. In a logged step Lightning waits for
the device anyway, to log the loss.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff.core import allocator
from lightning_eff.core.shards import full_tensor
from lightning_eff.report.history import History
from lightning_eff.report.meter import Meter

WITH_GRADIENTS = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
"""Strategies under which a parameter's `.grad` is the full gradient, or a DTensor of the full gradient."""
MIB = 2**20
MEMORY_INTERVAL_S = 0.1
"""Minimum time between two readings, since reading the allocator's statistics takes 0.1 ms."""


class LoggedFigures:
    """Sends figures to loggers: call `begin_step` before an optimizer step, and `end_batch` after a batch.

    All ranks must call both methods, because the norm of a sharded gradient needs a collective.
    """

    def __init__(self, trainer: pl.Trainer, meter: Meter) -> None:
        self.history = History()
        """Learning rate, gradient norm and bytes of memory, by optimizer step."""
        self._meter = meter
        self._memory_due_s = 0.0
        # Lightning 2.6 does not declare `log_every_n_steps`. With 0, nothing is logged.
        self._every_n_steps: int = getattr(trainer, "log_every_n_steps", 0) if trainer.loggers else 0
        self._last_step = trainer.global_step
        self._num_batches = self._num_samples = self._num_tokens = 0
        self._rates: dict[str, float | Tensor] = {}
        self._norm: float | None = None
        self._has_given_reason = False

    def begin_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Store the next step's learning rate and, if the next step will be logged, its gradient norm."""
        every, step = self._every_n_steps, trainer.global_step + 1
        is_due = bool(every) and step % every == 0
        optimizers, name = trainer.optimizers, "learning_rate"
        if len(optimizers) > 1 and optimizer is not optimizers[0]:
            number = next((number for number, each in enumerate(optimizers, 1) if each is optimizer), 1)
            name = name if number == 1 else f"{name}_{number}"
        rate = optimizer.param_groups[0]["lr"]  # of the first group
        if not isinstance(rate, Tensor):
            self.history.add(name, step, rate)
            self._rates[name] = rate
        elif is_due or (every and len(optimizers) > 1):  # a scheduler changes the tensor in place
            self._rates[name] = rate.detach().clone()
        if not is_due:
            return
        reason = _no_norm(trainer)
        if not reason and not isinstance(trainer.strategy, DeepSpeedStrategy):
            given = (p.grad for group in optimizer.param_groups for p in group["params"])
            self._norm = norm_of(each for each in given if each is not None)
            reason = "" if self._norm is not None else "the optimizer has already freed the gradients"
        if reason and not self._has_given_reason:
            self._has_given_reason = True
            rank_zero_info("eff/gradient_norm is not logged: %s", reason)

    def end_batch(self, trainer: pl.Trainer, step: int) -> None:
        """Read the memory every `MEMORY_INTERVAL_S`, and log the figures every `log_every_n_steps` steps.

        Args:
            trainer: The Trainer whose loggers get the figures.
            step: `trainer.global_step`.
        """
        every = self._every_n_steps
        if (now := time.monotonic()) >= self._memory_due_s:
            self._memory_due_s = now + MEMORY_INTERVAL_S
            for name, read in (("held_bytes", allocator.held_bytes), ("peak_bytes", allocator.peak_bytes)):
                if num_bytes := read(self._meter.device):
                    self.history.add(name, step, num_bytes)
        # A batch may take several optimizer steps, so `step % every` could miss the step that is due.
        is_due = every and step // every > self._last_step // every
        self._last_step = step
        if not is_due:
            return
        figures = {f"eff/{name}": float(rate) for name, rate in self._rates.items()}
        figures |= self._measured(trainer.world_size)
        # DeepSpeed computes its norm during the step.
        if not _no_norm(trainer) and isinstance(trainer.strategy, DeepSpeedStrategy):
            engine: Any = trainer.strategy.model
            self._norm = engine.get_global_grad_norm()
        if self._norm is not None:
            figures["eff/gradient_norm"] = float(self._norm)
            self.history.add("gradient_norm", step, figures["eff/gradient_norm"])
        self._norm = None
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)

    def _measured(self, world_size: int) -> dict[str, float]:
        """Return figures of the batches timed since the last call; samples/s and tokens/s cover all ranks."""
        throughput = self._meter.throughput
        times_s = throughput.batch_times_s[self._num_batches :]
        waits_s = throughput.waits_s[self._num_batches :]
        num_samples = throughput.num_samples - self._num_samples
        num_tokens = throughput.num_tokens - self._num_tokens
        self._num_batches = len(throughput.batch_times_s)
        self._num_samples, self._num_tokens = throughput.num_samples, throughput.num_tokens
        figures: dict[str, float] = {}
        if (total_s := sum(times_s)) > 0:
            figures["eff/samples_per_second"] = num_samples * world_size / total_s
            figures["eff/data_wait"] = min(1.0, sum(waits_s) / total_s)
            if num_tokens:
                figures["eff/tokens_per_second"] = num_tokens * world_size / total_s
        if (peak := self._meter.peak_bytes()) is not None:
            figures["eff/memory_mib"] = peak / MIB
        return figures


def norm_of(gradients: Iterable[Tensor]) -> float | None:
    """Return the total 2-norm of the gradients, before clipping; None without gradients.

    For sharded gradients the norm needs a collective, so every rank must call this function.

    Example:
        >>> norm_of([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        5.0
    """
    norms: dict[bool, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        # The norm of half-precision values is computed in float32, where squares do not overflow.
        dtype = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dtype=dtype)
        norms.setdefault(hasattr(norm, "full_tensor"), []).append(norm)
    # Norms are grouped because sharded and full gradients cannot be stacked together.
    parts = [full_tensor(torch.linalg.vector_norm(torch.stack(each))).double() for each in norms.values()]
    return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else None


def _no_norm(trainer: pl.Trainer) -> str:
    """Return why the gradient norm cannot be computed; empty if the norm can be computed."""
    if len(trainer.optimizers) > 1:
        return "several optimizers take steps of their own"
    if isinstance(trainer.strategy, WITH_GRADIENTS):
        return ""
    return f"with {type(trainer.strategy).__name__} no rank has the whole gradient"
