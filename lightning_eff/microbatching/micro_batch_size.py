"""The micro-batch size of a run: fixed, halved when memory runs out (oom_retry.py), or found by a search."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_eff.core import allocator
from lightning_eff.core.errors import ConfigError, Remedy
from lightning_eff.microbatching import splitting
from lightning_eff.microbatching.splitting import MicroBatchPart, Splitter

FIXED_SIZE = Remedy("callbacks.micro_batch.micro_batch_size=8", "MicroBatch(micro_batch_size=8)")


@dataclass(frozen=True)
class Halving:
    """One out-of-memory error."""

    before: int  # micro-batch size in samples that did not fit
    after: int  # the size that was tried next
    reason: str  # first line of the allocator's message


@dataclass
class MicroBatchSize:
    """The current size, in samples, how it is chosen, and its history."""

    current: int | None  # None for the full batch until it does not fit
    is_auto: bool  # halve it when memory runs out; else the error is raised unchanged
    splitter: Splitter | None = None  # splits batches in place of `splitting.split`'s own rules
    keep: tuple[str, ...] = ()  # what is not cut, as in `splitting.split`
    headroom: float = 0.1  # fraction of the device's memory that a size must leave free to be found
    halvings: list[Halving] = field(default_factory=list[Halving])
    tried: dict[int, bool] = field(default_factory=dict[int, bool])  # whether a size fits, of the last search
    num_split: int = 0  # batches that were split
    largest: int = 0  # samples of the largest batch so far

    def num_samples(self, batch: Any, *, by_splitting: bool = False) -> int | None:
        """Return the number of samples of a batch, and remember the largest.

        Args:
            batch: Of any kind.
            by_splitting: Call a splitter to count; else None is returned where there is one.
        """
        if self.splitter is None:
            count = splitting.num_samples(batch, self.keep)
        else:
            count = len(splitting.split(batch, 1, self.splitter)) if by_splitting else None
        self.largest = max(self.largest, count or 0)
        return count

    def split(self, batch: Any, size: int | None) -> list[MicroBatchPart]:
        """Split a batch into micro-batches of a size; None makes one, which still gets new containers."""
        if size is None and self.splitter is None:
            size = splitting.num_samples(batch, self.keep)
        if size is None:
            return [MicroBatchPart(batch, splitting.num_samples(batch))]
        return splitting.split(batch, size, self.splitter, self.keep)

    def halve(self, num_samples: int | None, error: Exception) -> None:
        """Continue with half the size after an out-of-memory error.

        Args:
            num_samples: Of the batch that did not fit.
            error: Raised with a note if there is nothing smaller.
        """
        tried = min(self.current or num_samples, num_samples) if num_samples else self.current
        if tried is None:
            error.add_note("the batch has no countable samples, so it was not halved: pass a splitter")
            raise error
        if tried <= 1:
            error.add_note("a micro-batch of one sample does not fit, and there is nothing smaller")
            raise error
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        self.current = tried // 2
        self.halvings.append(Halving(tried, self.current, line))


def kept_names(keep: str | Sequence[str | int] | None, splitter: Splitter | None) -> tuple[str, ...]:
    """Return the names and positions that are not cut, as strings.

    Raises:
        ConfigError: A name is empty, or there is a splitter, which returns whole batches itself.
    """
    if keep and splitter is not None:
        allowed = "None with a splitter, which decides itself what each micro-batch has"
        raise ConfigError(key="keep", value=keep, allowed=allowed)
    names = tuple(map(str, [keep] if isinstance(keep, str) else keep or ()))
    if not all(name.strip(".[] ") for name in names):
        raise ConfigError(key="keep", value=keep, allowed="names and positions; one of these is empty")
    return names


def free_memory(device: torch.device) -> None:
    """Free what a failed attempt has left: reference cycles that hold tensors, and the allocator's cache."""
    gc.collect()
    if allocator.has_cache(device):
        allocator.empty_cache(device)
