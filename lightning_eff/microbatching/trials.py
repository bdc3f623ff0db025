"""Trying a micro-batch size for real, without a trace: forward and backward passes and an optimizer step.

A trial runs micro-batches of the size, cut from the batch at hand, so that everything is in memory that a
step has there: two before an update, for gradients that are added to, the update, which may make the
optimizer's state, and one more beside that state. Then everything is brought back: parameters, the
optimizer's state and gradients from copies in host memory, and what rollback.py knows of. All ranks try the
same sizes at the same time, and a size fits if it does on each of them.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core import allocator
from lightning_eff.core.errors import ConfigError, is_out_of_memory
from lightning_eff.microbatching import ddp
from lightning_eff.microbatching.fitting import Fitting, let_go
from lightning_eff.microbatching.size_search import Found, Trial, find
from lightning_eff.microbatching.snapshot import Rollback
from lightning_eff.microbatching.splitting import Part
from lightning_eff.microbatching.update import Undo

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
TOO_FEW = "Expected more than 1 value per channel"
"""What a batch norm says of a single sample: such a size, or such a rest, does not fit."""
TIMED = 3
"""Micro-batches that are timed, where speed counts; the fastest is taken, since noise only slows down."""


class Trials:
    """Runs sizes on one batch.

    Args:
        batch: What they are cut from.
        forward: Returns the loss of a micro-batch, None for none.
        backward: Runs its backward pass.
        optimizer: What steps.
        model: What is trained, wrapped by DDP or not.
        fitting: How the batch is cut.
        rollback: What a step changes beside parameters and gradients.
        headroom: Share of the device's memory that must be left at the peak, where the device tells it.
        timed: Whether speed counts.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        batch: Any,
        *,
        forward: Callable[[Part], Tensor | None],
        backward: Callable[[Tensor], None],
        optimizer: Optimizer,
        model: nn.Module,
        fitting: Fitting,
        rollback: Rollback,
        headroom: float,
        timed: bool,
    ) -> None:
        self._batch = batch
        self._forward = forward
        self._backward = backward
        self._optimizer = optimizer
        self._model = model
        self._fitting = fitting
        self._rollback = rollback
        self._headroom = headroom
        self._timed = timed
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        self._replica = model if isinstance(model, DistributedDataParallel) else None

    def find(self, objective: str) -> Found:
        """Find the size that suits best, up to the whole batch; on several ranks the smallest of them.

        Raises:
            ConfigError: The batch's samples cannot be counted, or an objective that there is not.
            MemoryError: Not even a single sample fits.
        """
        count = self._fitting.count(self._batch)
        if self._replica is not None:
            count = int(ddp.extremes(count or 0, self._replica)[0])
        if not count:
            raise ConfigError(key="find", value=objective, allowed="a batch whose samples can be counted")
        return find(self, most=count, objective=objective, multiple_of=self._fitting.multiple_of)

    def __call__(self, size: int) -> Trial:
        """Try one size."""
        with self._without_a_trace():
            seconds = self._tried(size)
        let_go(self._device)
        fits = seconds is not None
        if self._replica is not None:
            fits = ddp.extremes(float(fits), self._replica)[0] > 0.0
            seconds = ddp.extremes(seconds or 0.0, self._replica)[1]
        return Trial(size, fits=fits, seconds_per_sample=(seconds or 0.0) / size)

    def _tried(self, size: int) -> float | None:
        """Return how many seconds a micro-batch takes; None if memory ran out, or too little is left."""
        allocator.reset_peak(self._device)
        try:
            seconds = self._run(size)
        except Exception as error:
            if not (is_out_of_memory(error) or TOO_FEW in str(error)):
                raise
            return None
        peak = allocator.peak_bytes(self._device)
        if peak is not None and peak > (1.0 - self._headroom) * allocator.total_bytes(self._device):
            return None
        return seconds

    def _run(self, size: int) -> float:
        parts = self._fitting.parts(self._batch, size)
        # The first two, for gradients that are added to, and the last, which may have another shape.
        for part in (parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:][-1:]):
            self._micro_batch(part)
        self._step()
        return min(self._micro_batch(parts[0]) for _ in range(TIMED if self._timed else 1))

    def _step(self) -> None:
        """Update, with a closure where one is needed, and without hooks that others have put there."""
        optimizer: Any = self._optimizer
        hooks = [getattr(optimizer, name, {}) for name in STEP_HOOKS]
        kept = [dict(each) for each in hooks]
        for each in hooks:
            each.clear()
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        try:
            optimizer.step(*([lambda: torch.zeros(())] if closure is not None else []))
        finally:
            for each, before in zip(hooks, kept, strict=True):
                each.update(before)

    def _micro_batch(self, part: Part) -> float:
        began_s = self._now_s()
        loss = self._forward(part)
        if loss is not None:
            self._backward(loss)
        return self._now_s() - began_s

    def _now_s(self) -> float:
        if self._timed and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def _without_a_trace(self) -> Generator[None]:
        """Run something that nobody counts, and bring everything back."""
        gradients = [_to_host(parameter.grad) for parameter in self._parameters]
        undo = Undo(self._optimizer)
        self._rollback.keep()
        self._set_gradients([None] * len(gradients))
        alone = nullcontext() if self._replica is None else ddp.alone(self._replica)
        try:
            with _disable_current_modes(), alone:
                yield
        finally:
            undo.restore()
            self._rollback.restore()
            self._set_gradients(gradients)

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _to_host(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to("cpu", copy=True)
