"""The micro-batch size of a run: fixed, or halved when memory runs out, and then equal on all ranks.

`MicroBatchSize.attempt` calls a function with the current size. When memory runs out it undoes what the
function changed, frees what the failure held, halves the size and calls it again. Only out-of-memory errors
are caught, and no size below one sample is tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_eff.core import allocator
from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.kernels import devices, tiles
from lightning_eff.microbatching import ddp
from lightning_eff.microbatching.splitting import MicroBatchPart, Splitter, num_samples, split

T = TypeVar("T")


@dataclass(frozen=True)
class Halving:
    """One out-of-memory error."""

    before: int  # micro-batch size in samples that did not fit
    after: int  # the size that was tried next
    reason: str  # first line of the allocator's message


class MicroBatchSize:
    """The current size, in samples, and its history.

    Args:
        current: Samples of a micro-batch; None for the full batch until it does not fit.
        is_auto: Halve it when memory runs out; else the error is raised unchanged.
        splitter: Splits batches in place of `splitting.split`'s own rules.
        multiple_of: Sizes above it are its multiples.
        grow_after_n_steps: Double the size after so many steps without an out-of-memory error; None never.

    Example:
        >>> size = MicroBatchSize(None, is_auto=True)
        >>> def run(micro_batch_size):
        ...     if micro_batch_size is None or micro_batch_size > 3:
        ...         raise MemoryError
        ...     return micro_batch_size
        >>> size.attempt(run, count=lambda: 12, undo=lambda: None, device=torch.device("cpu"))
        3
        >>> [(halving.before, halving.after) for halving in size.halvings]
        [(12, 6), (6, 3)]
    """

    def __init__(
        self,
        current: int | None,
        *,
        is_auto: bool,
        splitter: Splitter | None = None,
        multiple_of: int = 1,
        grow_after_n_steps: int | None = None,
    ) -> None:
        self.current = current
        self.is_auto = is_auto
        self.splitter = splitter
        self.multiple_of = multiple_of
        self.grow_after_n_steps = grow_after_n_steps
        self.halvings: list[Halving] = []
        self.num_split = 0  # batches that were split
        self.largest = 0  # samples of the largest batch so far
        self._last_counted: tuple[Any, int | None] | None = None
        self._was_halved = False
        self._steps_since = 0

    def split(self, batch: Any, micro_batch_size: int | None = None) -> list[MicroBatchPart]:
        """Split a batch into micro-batches of a size, by default the current one."""
        size = micro_batch_size or self.current
        if self.splitter is not None:
            full = [MicroBatchPart(batch, num_samples(batch))]
            return full if size is None else split(batch, size, self.splitter)
        size = size or self.num_samples(batch)  # one micro-batch, which still gets new containers
        return [MicroBatchPart(batch, None)] if size is None else split(batch, size)

    def num_samples(self, batch: Any, *, by_splitting: bool = False) -> int | None:
        """Return the number of samples of a batch, and remember the largest.

        Args:
            batch: Of any kind.
            by_splitting: Call a splitter to count; else None is returned where there is one.
        """
        if self.splitter is None:
            if self._last_counted is None or self._last_counted[0] is not batch:
                self._last_counted = (batch, num_samples(batch))
            count = self._last_counted[1]
        else:
            count = len(split(batch, 1, self.splitter)) if by_splitting else None
        self.largest = max(self.largest, count or 0)
        return count

    def attempt(
        self,
        run: Callable[[int | None], T],
        *,
        count: Callable[[], int | None],
        undo: Callable[[], None],
        device: torch.device,
    ) -> T:
        """Call a function with the current size, and with smaller ones until it fits.

        Args:
            run: Takes the micro-batch size, None for the full batch.
            count: Returns the samples of the batch; called only when it does not fit.
            undo: Undoes everything that `run` changes.
            device: Whose memory is freed.

        Raises:
            MemoryError, RuntimeError: The allocator's own, when no smaller size is left.
        """
        while True:
            try:
                return run(self.current)
            except Exception as error:
                if not (self.is_auto and is_out_of_memory(error)):
                    raise
                total = count()
                tried = min(self.current or total, total) if total else self.current
                if tried is None:
                    error.add_note(
                        "the batch has no countable samples, so it was not halved: pass a splitter"
                    )
                    raise
                if tried <= 1:
                    error.add_note("a micro-batch of one sample does not fit, and there is nothing smaller")
                    raise
                line = next(iter(str(error).splitlines()), "") or type(error).__name__
            # Only here, outside of the handler, are the error and the frames that it held gone.
            undo()
            free_memory(device)
            self.current = halved(tried, self.multiple_of)
            self.halvings.append(Halving(tried, self.current, line))
            self._was_halved = True

    def finish_step(self, model: DistributedDataParallel | None = None) -> None:
        """Average the gradients of a step over the ranks, and agree on the size of the next one.

        Args:
            model: Trained by several ranks, whose gradients are not averaged yet; all of them must call this.
        """
        self._last_counted = None
        was_halved = self._was_halved
        if model is not None:
            was_halved = ddp.average_gradients(model, also=float(was_halved)) > 0.0
            if was_halved:  # on any rank: all of them continue with the smallest size
                self.current = int(ddp.extremes(self.current or self.largest, model)[0])
        self._was_halved = False
        self._steps_since = 0 if was_halved else self._steps_since + 1
        if self.grow_after_n_steps is not None and self._steps_since >= self.grow_after_n_steps:
            self._steps_since = 0
            if self.current is not None:
                self.current = 2 * self.current if 2 * self.current < self.largest else None


def halved(size: int, multiple_of: int = 1) -> int:
    """Return half a size, rounded down to a multiple if it is larger than that.

    Example:
        >>> halved(100), halved(100, 8), halved(9, 8), halved(3)
        (50, 48, 4, 1)
    """
    half = max(1, size // 2)
    return half if half < multiple_of else half // multiple_of * multiple_of


def free_memory(device: torch.device) -> None:
    """Free what a failed attempt has left: reference cycles that hold tensors, and the allocator's cache."""
    gc.collect()
    if allocator.has_cache(device):
        allocator.empty_cache(device)


def resolve_multiple(multiple_of: int | str, device: torch.device, dtype: torch.dtype) -> int:
    """Return what sizes are multiples of: the number itself, or for `auto` that of the device's tensor cores.

    Args:
        multiple_of: A number of samples, or `auto`.
        device: Where micro-batches run.
        dtype: Of matrix products.

    Example:
        >>> [resolve_multiple(value, torch.device("cpu"), torch.bfloat16) for value in (6, "auto")]
        [6, 1]
    """
    return multiple_of if isinstance(multiple_of, int) else tiles.size_multiple(dtype, devices.of(device))
