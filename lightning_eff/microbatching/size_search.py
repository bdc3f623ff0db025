"""Search for the micro-batch size to train with, the largest that fits, by running sizes.

`find_size` chooses which sizes to try. `SizeTrials` runs a size without a trace: it splits the current batch
and runs what a step keeps in memory at the same time: two micro-batches before an update (gradients that are
added to), the update (which may allocate the optimizer's state), and one more micro-batch next to that state.
Then parameters, optimizer state and gradients are restored from host memory, and everything else from a
`StepSnapshot`. All ranks try the same sizes at the same time, and a size fits if it fits on each of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_eff.core import allocator
from lightning_eff.core.errors import ConfigError, is_out_of_memory
from lightning_eff.core.torch_private import real_tensors
from lightning_eff.microbatching import ddp
from lightning_eff.microbatching.micro_batch_size import MicroBatchSize, free_memory
from lightning_eff.microbatching.snapshot import OptimizerSnapshot, StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
TOO_FEW = "Expected more than 1 value per channel"
"""The error of a batch norm for a single sample, after which a size, or its remainder, does not fit."""


def find_size(fits: Callable[[int], bool], *, max_size: int) -> int:
    """Find the largest micro-batch size that fits, by bisection; one that was tried.

    Args:
        fits: Runs a size, without a trace.
        max_size: Samples of the batch that is split.

    Raises:
        MemoryError: Not even one sample fits.

    Example:
        >>> tried = []
        >>> find_size(lambda size: tried.append(size) or size <= 21, max_size=64), tried
        (21, [64, 32, 16, 24, 20, 22, 21])
    """
    if fits(max_size):
        return max_size
    # Memory grows with the size: where one fits, smaller ones do, and larger ones fail where one fails.
    low, high = 0, max_size  # the last that fits, the first that does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise MemoryError("not even a micro-batch of one sample fits")
    return low


@dataclass
class SizeTrials:
    """Runs sizes on one batch."""

    batch: Any  # is split
    _: KW_ONLY
    forward: Callable[[MicroBatchPart], Tensor | None]  # returns the loss of a micro-batch, None for none
    backward: Callable[[Tensor], None]
    optimizer: Optimizer  # steps once per trial
    model: nn.Module  # the trained model, wrapped by DDP or not
    micro_batch_size: MicroBatchSize  # splits the batch, and is set
    snapshot: StepSnapshot  # of what a step changes besides parameters and gradients

    def __post_init__(self) -> None:
        self._parameters = list(self.model.parameters())
        self._device = self._parameters[0].device
        self._replica = self.model if isinstance(self.model, DistributedDataParallel) else None

    def find(self) -> None:
        """Find and set the largest size, up to the full batch; on several ranks up to the smallest one.

        Raises:
            ConfigError: The batch has no countable samples.
            MemoryError: Not even one sample fits.
        """
        size = self.micro_batch_size
        count = size.num_samples(self.batch, by_splitting=True)
        if self._replica is not None:
            count = int(ddp.extremes(count or 0, self._replica)[0])
        if not count:
            raise ConfigError(key="find", value=True, allowed="false, or a batch with countable samples")
        size.tried.clear()
        size.current = find_size(self._fits, max_size=count)

    def _fits(self, micro_batch_size: int) -> bool:
        """Run one size; return whether it fits and leaves the headroom, on all ranks."""
        fits = True
        with self._without_trace():
            allocator.reset_peak(self._device)
            try:
                parts = self.micro_batch_size.split(self.batch, micro_batch_size)
                # Two, for gradients that are added to, and the last, which may have another shape.
                for part in (parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:][-1:]):
                    self._run_micro_batch(part)
                step: Any = self.optimizer.step
                closure = inspect.signature(step).parameters.get("closure")
                step(*([lambda: torch.zeros(())] if closure is not None else []))
                self._run_micro_batch(parts[0])
            except Exception as error:
                if not (is_out_of_memory(error) or TOO_FEW in str(error)):
                    raise
                fits = False
            peak, headroom = allocator.peak_bytes(self._device), self.micro_batch_size.headroom
            if peak is not None and peak > (1.0 - headroom) * allocator.total_bytes(self._device):
                fits = False
        free_memory(self._device)
        if self._replica is not None:
            fits = ddp.extremes(float(fits), self._replica)[0] > 0.0
        self.micro_batch_size.tried[micro_batch_size] = fits
        return fits

    def _run_micro_batch(self, part: MicroBatchPart) -> None:
        loss = self.forward(part)
        if loss is not None:
            self.backward(loss)

    @contextmanager
    def _without_trace(self) -> Generator[None]:
        """Restore everything afterwards; hide the passes from counters, and the update from step hooks."""
        current = [parameter.grad for parameter in self._parameters]
        gradients = [None if grad is None else grad.detach().to("cpu", copy=True) for grad in current]
        optimizer_snapshot = OptimizerSnapshot(self.optimizer)
        self.snapshot.keep()
        for parameter in self._parameters:
            parameter.grad = None
        hooks = [getattr(self.optimizer, name, {}) for name in STEP_HOOKS]  # private, as of torch 2.13
        kept = [dict(registered) for registered in hooks]
        for registered in hooks:
            registered.clear()
        alone = nullcontext() if self._replica is None else ddp.without_collectives(self._replica)
        try:
            # torch's dispatch modes (FLOP counters, LiveBytes); private, as of torch 2.13
            with real_tensors(), alone:
                yield
        finally:
            for registered, before in zip(hooks, kept, strict=True):
                registered.update(before)
            optimizer_snapshot.restore()
            self.snapshot.restore()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
