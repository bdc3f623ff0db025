"""Search for the micro-batch size to train with, the largest that fits or the fastest, by running sizes.

`find_size` chooses which sizes to try. `SizeTrials` runs a size without a trace: it splits the current batch
and runs what a step keeps in memory at the same time: two micro-batches before an update (gradients that are
added to), the update (which may allocate the optimizer's state), and one more micro-batch next to that state.
Then parameters, optimizer state and gradients are restored from host memory, and everything else from a
`StepSnapshot`. All ranks try the same sizes at the same time, and a size fits if it fits on each of them.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core import allocator
from lightning_eff.core.arguments import check_value
from lightning_eff.core.errors import ConfigError, is_out_of_memory
from lightning_eff.microbatching import ddp
from lightning_eff.microbatching.micro_batch_size import MicroBatchSize, free_memory
from lightning_eff.microbatching.snapshot import OptimizerSnapshot, StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart

Objective = Literal["largest", "fastest"]
TOLERANCE = 0.02
"""Sizes whose speeds differ by less are equally fast; then the smaller one is chosen, for its memory."""
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
TOO_FEW = "Expected more than 1 value per channel"
"""The error of a batch norm for a single sample, after which a size, or its remainder, does not fit."""
NUM_TIMED = 3
"""Micro-batches that are timed for `fastest`; the minimum is taken, since noise only slows down."""


@dataclass(frozen=True)
class SizeTrial:
    """One size that was run."""

    micro_batch_size: int  # samples
    fits: bool  # whether it ran and left the headroom
    seconds_per_sample: float = 0.0  # of forward and backward pass, if it fits


@dataclass(frozen=True)
class FoundSize:
    """The result of a search."""

    micro_batch_size: int  # a size that was tried and fits
    trials: tuple[SizeTrial, ...]  # all of them, in order


def find_size(
    trial: Callable[[int], SizeTrial], *, max_size: int, objective: str = "largest", multiple_of: int = 1
) -> FoundSize:
    """Find the best micro-batch size up to `max_size`.

    Args:
        trial: Runs a size, without a trace.
        max_size: Samples of the batch that is split.
        objective: `largest`, by bisection; `fastest`, among the powers of two that fit, and `max_size`.
        multiple_of: Sizes above it are its multiples, or `max_size`.

    Raises:
        ConfigError, MemoryError: An unknown objective; not even one sample fits.

    Example:
        >>> found = find_size(lambda size: SizeTrial(size, fits=size <= 21), max_size=64)
        >>> found.micro_batch_size, [trial.micro_batch_size for trial in found.trials]
        (21, [64, 32, 16, 24, 20, 22, 21])
    """
    check_value("find", objective, Objective)
    trials: list[SizeTrial] = []

    def fits(size: int) -> bool:
        trials.append(trial(size))
        return trials[-1].fits

    powers = [2**power for power in range(max_size.bit_length())]
    small = [size for size in powers if size < multiple_of]
    # Memory grows with the size: where one fits, smaller ones do, and larger ones fail where one fails.
    if objective == "largest":
        sizes = sorted({*small, *range(multiple_of, max_size + 1, multiple_of), max_size})
        low, high = -1, len(sizes) - 1  # the last that fits, the first that does not
        is_bisected = fits(sizes[-1])
        while high - low > 1 and not is_bisected:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    else:
        for size in sorted({*small, *(size for size in powers if size % multiple_of == 0), max_size}):
            if not fits(size) and any(tried.fits for tried in trials):
                break
    fitting = [tried for tried in trials if tried.fits]
    if not fitting:
        text = "not even a micro-batch of one sample fits"
        raise MemoryError(text)
    if objective == "fastest":
        limit = min(tried.seconds_per_sample for tried in fitting) * (1.0 + TOLERANCE)
        fitting = [next(tried for tried in fitting if tried.seconds_per_sample <= limit)]
    best = max(fitting, key=lambda tried: tried.micro_batch_size)
    return FoundSize(best.micro_batch_size, tuple(trials))


@dataclass
class SizeTrials:
    """Runs sizes on one batch."""

    batch: Any  # is split
    _: KW_ONLY
    forward: Callable[[MicroBatchPart], Tensor | None]  # returns the loss of a micro-batch, None for none
    backward: Callable[[Tensor], None]
    optimizer: Optimizer  # steps once per trial
    model: nn.Module  # the trained model, wrapped by DDP or not
    micro_batch_size: MicroBatchSize  # splits the batch
    snapshot: StepSnapshot  # of what a step changes besides parameters and gradients
    headroom: float  # fraction of the memory that must be free at the peak, on devices that report it
    is_timed: bool  # whether speed counts

    def __post_init__(self) -> None:
        self._parameters = list(self.model.parameters())
        if not self._parameters:
            raise ConfigError(key="find", value=type(self.model).__name__, allowed="a model with parameters")
        self._device = self._parameters[0].device
        self._replica = self.model if isinstance(self.model, DistributedDataParallel) else None

    def find(self, objective: str) -> FoundSize:
        """Find and set the best size, up to the full batch; on several ranks up to the smallest one.

        Raises:
            ConfigError: The batch has no countable samples, or the objective is unknown.
            ConfigError, MemoryError: An unknown objective; not even one sample fits.
        """
        count = self.micro_batch_size.num_samples(self.batch, by_splitting=True)
        if self._replica is not None:
            count = int(ddp.extremes(count or 0, self._replica)[0])
        if not count:
            raise ConfigError(key="find", value=objective, allowed="a batch with countable samples")
        multiple_of = self.micro_batch_size.multiple_of
        found = find_size(self.run, max_size=count, objective=objective, multiple_of=multiple_of)
        self.micro_batch_size.current = found.micro_batch_size
        return found

    def run(self, micro_batch_size: int) -> SizeTrial:
        """Run one size."""
        seconds: float | None = None  # None if memory ran out, or too little is left
        with self._without_trace():
            allocator.reset_peak(self._device)
            try:
                parts = self.micro_batch_size.split(self.batch, micro_batch_size)
                # Two, for gradients that are added to, and the last, which may have another shape.
                for part in (parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:][-1:]):
                    self._micro_batch(part)
                step: Any = self.optimizer.step
                closure = inspect.signature(step).parameters.get("closure")
                step(*([lambda: torch.zeros(())] if closure is not None else []))
                seconds = min(self._micro_batch(parts[0]) for _ in range(NUM_TIMED if self.is_timed else 1))
            except Exception as error:
                if not (is_out_of_memory(error) or TOO_FEW in str(error)):
                    raise
            peak = allocator.peak_bytes(self._device)
            if peak is not None and peak > (1.0 - self.headroom) * allocator.total_bytes(self._device):
                seconds = None
        free_memory(self._device)
        fits = seconds is not None
        if self._replica is not None:  # all ranks: the worst of them counts
            fits = ddp.extremes(float(fits), self._replica)[0] > 0.0
            seconds = ddp.extremes(seconds or 0.0, self._replica)[1]
        per_sample = (seconds or 0.0) / micro_batch_size
        return SizeTrial(micro_batch_size, fits=fits, seconds_per_sample=per_sample)

    def _micro_batch(self, part: MicroBatchPart) -> float:
        """Run forward and backward pass, and return how long they took."""
        is_async = self.is_timed and self._device.type != "cpu"
        if is_async:
            torch.accelerator.synchronize(self._device)
        start_s = time.perf_counter()
        loss = self.forward(part)
        if loss is not None:
            self.backward(loss)
        if is_async:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - start_s

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
            with _disable_current_modes(), alone:
                yield
        finally:
            for registered, before in zip(hooks, kept, strict=True):
                registered.update(before)
            optimizer_snapshot.restore()
            self.snapshot.restore()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
