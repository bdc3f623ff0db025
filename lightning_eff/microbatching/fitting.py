"""How large a micro-batch may be: cut to fit, halved when memory runs out, the same on all ranks.

`Fitting.attempt` runs something that takes a micro-batch size. When memory runs out it brings everything
back, lets go of what the failure held, halves the size and runs it again. Nothing is caught that is not an
allocator's refusal, and nothing below one sample is tried.
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
from lightning_eff.microbatching.samples import Reading
from lightning_eff.microbatching.splitting import Part, Splitter, num_samples, reading_of, split

T = TypeVar("T")


@dataclass(frozen=True)
class Halving:
    """One time that memory ran out.

    Args:
        before: Micro-batch size in samples that did not fit.
        after: The size that was tried next.
        reason: First line of the allocator's message.
    """

    before: int
    after: int
    reason: str


class Fitting:
    """The size of micro-batches in a run.

    Args:
        size: Samples of a micro-batch; None for the whole batch until it does not fit.
        adapts: Halve it when memory runs out; else such an error is raised as it is.
        splitter: Cuts a batch in place of `batches.split`.
        multiple_of: Sizes above it are its multiples.
        grow_after_n_steps: Double the size after so many steps without running out; None for never.

    Example:
        >>> fitting = Fitting(None, adapts=True)
        >>> def run(size):
        ...     if size is None or size > 3:
        ...         raise MemoryError
        ...     return size
        >>> fitting.attempt(run, whole=lambda: 12, undo=lambda: None, device=torch.device("cpu"))
        3
        >>> [(each.before, each.after) for each in fitting.halvings]
        [(12, 6), (6, 3)]
    """

    def __init__(
        self,
        size: int | None,
        *,
        adapts: bool,
        splitter: Splitter | None = None,
        multiple_of: int = 1,
        grow_after_n_steps: int | None = None,
    ) -> None:
        self.size = size
        self.adapts = adapts
        self.splitter = splitter
        self.multiple_of = multiple_of
        self.grow_after_n_steps = grow_after_n_steps
        self.halvings: list[Halving] = []
        self.num_split = 0
        """Batches that were cut."""
        self.largest = 0
        """Samples of the largest batch so far."""
        self._last: tuple[Any, Reading | None] | None = None
        self._shrunk = False
        self._steps_since = 0

    def parts(self, batch: Any, size: int | None = None) -> list[Part]:
        """Cut a batch into micro-batches of the size as it is now."""
        wanted = size or self.size
        if self.splitter is not None:
            return (
                [Part(batch, num_samples(batch))] if wanted is None else split(batch, wanted, self.splitter)
            )
        reading = self._read(batch)
        if wanted is None:
            if reading is None:
                return [Part(batch, None)]
            wanted = reading.total  # as a whole, and yet in containers of its own
        return split(batch, wanted, reading=reading)

    def _read(self, batch: Any) -> Reading | None:
        """Read a batch; the one that was read last is not read again."""
        if self._last is None or self._last[0] is not batch:
            self._last = (batch, reading_of(batch))
        return self._last[1]

    def samples(self, batch: Any) -> int | None:
        """Return the number of samples of a batch, and remember the largest; None where a splitter cuts."""
        reading = self._read(batch) if self.splitter is None else None
        count = reading.total if reading is not None else None
        self.largest = max(self.largest, count or 0)
        return count

    def count(self, batch: Any) -> int | None:
        """Return the number of samples of a batch, if need be by cutting it into single ones."""
        count = num_samples(batch) if self.splitter is None else len(split(batch, 1, self.splitter))
        self.largest = max(self.largest, count or 0)
        return count

    def attempt(
        self,
        run: Callable[[int | None], T],
        *,
        whole: Callable[[], int | None],
        undo: Callable[[], None],
        device: torch.device,
    ) -> T:
        """Run something with the size as it is, and with smaller ones until it fits.

        Args:
            run: Takes the micro-batch size, None for the whole batch.
            whole: Returns the samples of the batch; asked when it does not fit.
            undo: Brings everything back that `run` changes.
            device: Whose memory it is.

        Raises:
            MemoryError, RuntimeError: As the allocator does, when nothing smaller is left to try.
        """
        while True:
            try:
                return run(self.size)
            except Exception as error:  # noqa: BLE001 - raised again, unless memory ran out
                reason = self._after(error, whole)
            # Only here, outside of the handler, are the error and the frames that it held gone.
            undo()
            let_go(device)
            self.halvings.append(reason)
            self.size = reason.after
            self._shrunk = True

    def _after(self, error: Exception, whole: Callable[[], int | None]) -> Halving:
        """Return what to try next, or raise what went wrong."""
        if not (self.adapts and is_out_of_memory(error)):
            raise error
        count = whole()
        tried = min(self.size or count, count) if count else self.size
        if tried is None:
            error.add_note("the batch's samples cannot be counted: MicroBatch needs a splitter to cut it")
            raise error
        if tried <= 1:
            error.add_note("a micro-batch of one sample does not fit, and there is nothing smaller")
            raise error
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        return Halving(tried, halved(tried, self.multiple_of), line)

    def finish_step(self, model: DistributedDataParallel | None = None) -> None:
        """Average the gradients of a step over the ranks, and agree on the size of the next one.

        Args:
            model: What several ranks train, each with gradients of its own so far.
        """
        self._last = None
        shrunk = self._shrunk
        if model is not None:
            shrunk = ddp.average_gradients(model, also=float(shrunk)) > 0.0
            if shrunk:
                self.size = int(ddp.extremes(self.size or self.largest, model)[0])
        self._shrunk = False
        self._steps_since = 0 if shrunk else self._steps_since + 1
        if self.grow_after_n_steps is not None and self._steps_since >= self.grow_after_n_steps:
            self._grow()

    def _grow(self) -> None:
        self._steps_since = 0
        if self.size is not None:
            doubled = 2 * self.size
            self.size = doubled if doubled < self.largest else None


def halved(size: int, multiple_of: int = 1) -> int:
    """Return half a size, rounded down to a multiple where it is larger than that.

    Example:
        >>> halved(100), halved(100, 8), halved(9, 8), halved(3)
        (50, 48, 4, 1)
    """
    half = max(1, size // 2)
    return half if half < multiple_of else half // multiple_of * multiple_of


def let_go(device: torch.device) -> None:
    """Give back what a failed try has left: cycles that hold tensors, and the allocator's cache."""
    gc.collect()
    if allocator.has_cache(device):
        allocator.empty_cache(device)


def is_count(value: object) -> bool:
    """Say whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def rounding(multiple_of: int | str, device: torch.device, dtype: torch.dtype) -> int:
    """Return what sizes are to be multiples of: the number itself, or for `auto` what a device likes.

    Args:
        multiple_of: A number of samples, or `auto`.
        device: Where they are computed.
        dtype: What matrix products are computed in.

    Example:
        >>> [rounding(each, torch.device("cpu"), torch.bfloat16) for each in (6, "auto")]
        [6, 1]
    """
    return multiple_of if isinstance(multiple_of, int) else tiles.size_multiple(dtype, devices.of(device))
