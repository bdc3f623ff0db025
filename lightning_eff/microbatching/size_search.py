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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core import allocator
from lightning_eff.core.errors import ConfigError, is_out_of_memory
from lightning_eff.microbatching import ddp
from lightning_eff.microbatching.micro_batch_size import MicroBatchSize, free_memory
from lightning_eff.microbatching.snapshot import OptimizerSnapshot, StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart

OBJECTIVES = ("largest", "fastest")
TOLERANCE = 0.02
"""Sizes whose speeds differ by less are equally fast; then the smaller one is chosen, for its memory."""
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
TOO_FEW = "Expected more than 1 value per channel"
"""The error of a batch norm for a single sample, after which a size, or its remainder, does not fit."""
NUM_TIMED = 3
"""Micro-batches that are timed for `fastest`; the minimum is taken, since noise only slows down."""


@dataclass(frozen=True)
class SizeTrial:
    """One size that was run.

    Args:
        micro_batch_size: Samples.
        fits: Whether it ran and left the headroom.
        seconds_per_sample: Of forward and backward pass, if it fits.
    """

    micro_batch_size: int
    fits: bool
    seconds_per_sample: float = 0.0


@dataclass(frozen=True)
class FoundSize:
    """The result of a search.

    Args:
        micro_batch_size: A size that was tried and fits.
        trials: All of them, in order.
    """

    micro_batch_size: int
    trials: tuple[SizeTrial, ...]


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
        ConfigError: An unknown objective.
        MemoryError: Not even one sample fits.

    Example:
        >>> tried = []
        >>> def trial(size):
        ...     tried.append(size)
        ...     return SizeTrial(size, fits=size <= 21)
        >>> find_size(trial, max_size=64).micro_batch_size, tried
        (21, [64, 32, 16, 24, 20, 22, 21])
    """
    if objective not in OBJECTIVES:
        raise ConfigError(key="find", value=objective, allowed=f"one of {', '.join(OBJECTIVES)}")
    trials: list[SizeTrial] = []

    def fits(size: int) -> bool:
        trials.append(trial(size))
        return trials[-1].fits

    if objective == "largest":
        small = [size for size in _powers(max_size, 1) if size < multiple_of]
        _bisect(sorted({*small, *range(multiple_of, max_size + 1, multiple_of), max_size}), fits)
    else:
        for size in _powers(max_size, multiple_of):
            if not fits(size) and any(tried.fits for tried in trials):
                break  # memory grows with the size
    fitting = [tried for tried in trials if tried.fits]
    if not fitting:
        text = "not even a micro-batch of one sample fits"
        raise MemoryError(text)
    if objective == "largest":
        best = max(fitting, key=lambda tried: tried.micro_batch_size)
    else:
        limit = min(tried.seconds_per_sample for tried in fitting) * (1.0 + TOLERANCE)
        best = next(tried for tried in fitting if tried.seconds_per_sample <= limit)
    return FoundSize(best.micro_batch_size, tuple(trials))


def _bisect(sizes: list[int], fits: Callable[[int], bool]) -> None:
    """Try the largest size, then halve the range that is left; memory grows with the size."""
    if fits(sizes[-1]):
        return
    low, high = -1, len(sizes) - 1  # the last that fits, the first that does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)


def _powers(max_size: int, multiple_of: int) -> list[int]:
    sizes = [2**power for power in range(max_size.bit_length())]
    return sorted({*(size for size in sizes if size < multiple_of or size % multiple_of == 0), max_size})


class SizeTrials:
    """Runs sizes on one batch.

    Args:
        batch: Is split.
        forward: Returns the loss of a micro-batch, None for none.
        backward: Runs its backward pass.
        optimizer: Steps once per trial.
        model: The trained model, wrapped by DDP or not.
        micro_batch_size: Splits the batch.
        snapshot: Of what a step changes besides parameters and gradients.
        headroom: Fraction of the device's memory that must be free at the peak, on devices that report it.
        is_timed: Whether speed counts.
    """

    def __init__(  # noqa: PLR0913 - constructed by MicroBatchRunner and ExactGradient only
        self,
        batch: Any,
        *,
        forward: Callable[[MicroBatchPart], Tensor | None],
        backward: Callable[[Tensor], None],
        optimizer: Optimizer,
        model: nn.Module,
        micro_batch_size: MicroBatchSize,
        snapshot: StepSnapshot,
        headroom: float,
        is_timed: bool,
    ) -> None:
        self._batch = batch
        self._forward = forward
        self._backward = backward
        self._optimizer = optimizer
        self._size = micro_batch_size
        self._snapshot = snapshot
        self._headroom = headroom
        self._is_timed = is_timed
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        self._replica = model if isinstance(model, DistributedDataParallel) else None

    def find(self, objective: str) -> FoundSize:
        """Find and set the best size, up to the full batch; on several ranks up to the smallest one.

        Raises:
            ConfigError: The batch has no countable samples, or the objective is unknown.
            MemoryError: Not even one sample fits.
        """
        count = self._size.num_samples(self._batch, by_splitting=True)
        if self._replica is not None:
            count = int(ddp.extremes(count or 0, self._replica)[0])
        if not count:
            raise ConfigError(key="find", value=objective, allowed="a batch with countable samples")
        multiple_of = self._size.multiple_of
        found = find_size(self.run, max_size=count, objective=objective, multiple_of=multiple_of)
        self._size.current = found.micro_batch_size
        return found

    def run(self, micro_batch_size: int) -> SizeTrial:
        """Run one size."""
        with self._without_trace():
            seconds = self._seconds(micro_batch_size)
        free_memory(self._device)
        fits = seconds is not None
        if self._replica is not None:  # all ranks: the worst of them counts
            fits = ddp.extremes(float(fits), self._replica)[0] > 0.0
            seconds = ddp.extremes(seconds or 0.0, self._replica)[1]
        per_sample = (seconds or 0.0) / micro_batch_size
        return SizeTrial(micro_batch_size, fits=fits, seconds_per_sample=per_sample)

    def _seconds(self, micro_batch_size: int) -> float | None:
        """Return the duration of a micro-batch; None if memory ran out, or too little is left."""
        allocator.reset_peak(self._device)
        try:
            parts = self._size.split(self._batch, micro_batch_size)
            # Two, for gradients that are added to, and the last, which may have another shape.
            for part in (parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:][-1:]):
                self._micro_batch(part)
            self._update()
            seconds = min(self._micro_batch(parts[0]) for _ in range(NUM_TIMED if self._is_timed else 1))
        except Exception as error:
            if not (is_out_of_memory(error) or TOO_FEW in str(error)):
                raise
            return None
        peak = allocator.peak_bytes(self._device)
        if peak is not None and peak > (1.0 - self._headroom) * allocator.total_bytes(self._device):
            return None
        return seconds

    def _micro_batch(self, part: MicroBatchPart) -> float:
        start_s = self._now_s()
        loss = self._forward(part)
        if loss is not None:
            self._backward(loss)
        return self._now_s() - start_s

    def _now_s(self) -> float:
        if self._is_timed and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _update(self) -> None:
        """Step, with a closure if one is required, and without the hooks of other components."""
        optimizer: Any = self._optimizer
        hooks = [getattr(optimizer, name, {}) for name in STEP_HOOKS]  # private, as of torch 2.13
        kept = [dict(registered) for registered in hooks]
        for registered in hooks:
            registered.clear()
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        try:
            optimizer.step(*([lambda: torch.zeros(())] if closure is not None else []))
        finally:
            for registered, before in zip(hooks, kept, strict=True):
                registered.update(before)

    @contextmanager
    def _without_trace(self) -> Generator[None]:
        """Restore everything afterwards, and hide the passes from counters of operations and memory."""
        current = [parameter.grad for parameter in self._parameters]
        gradients = [None if grad is None else grad.detach().to("cpu", copy=True) for grad in current]
        optimizer_snapshot = OptimizerSnapshot(self._optimizer)
        self._snapshot.keep()
        for parameter in self._parameters:
            parameter.grad = None
        alone = nullcontext() if self._replica is None else ddp.without_collectives(self._replica)
        try:
            # torch's dispatch modes (FLOP counters, LiveBytes); private, as of torch 2.13
            with _disable_current_modes(), alone:
                yield
        finally:
            optimizer_snapshot.restore()
            self._snapshot.restore()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
