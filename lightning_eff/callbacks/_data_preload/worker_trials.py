"""How long a loader takes for a batch, in this process and with workers, tried on samples of its own.

A trial makes batches from fixed places of the dataset, so no sampler is advanced, and puts the random state
back. Only a loader over a dataset with an index can be tried: a stream would be consumed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pickle import PicklingError  # the error alone: nothing is unpickled here
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

FEWEST, MOST = 4, 512
"""Batches in a trial."""
GAIN = 0.9
"""A choice with more workers must take at most this share of the time of the one before."""
SAMPLE_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    OSError,
    EOFError,
    PicklingError,
)
"""What samples raise for an index that their own sampler would not ask for, or in a worker."""
DEADLINE_S = 20.0
"""Time after which a worker that gives no sample is taken to hang."""


@dataclass(frozen=True)
class Choice:
    """How many workers to use, and what was measured for it.

    Args:
        num_workers: The best number.
        seconds_per_batch: By number of workers; 0 is this process.
        idle_s: Time that any batch in this process waited, for a disk, a network or a lock, at least.
        reason: Why workers were not tried, or not trusted; empty if they were.
    """

    num_workers: int
    seconds_per_batch: dict[int, float]
    idle_s: float
    reason: str = ""


def can_be_tried(loader: Any) -> bool:
    """Say whether a loader has a dataset whose samples can be asked for by index."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    try:
        return len(loader.dataset) > 0  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):
        return False


def num_cores(num_processes: int = 1) -> int:
    """Return the cores that each of several processes on this machine may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // num_processes)


def choose(loader: DataLoader[Any], *, max_workers: int, budget_s: float) -> Choice:
    """Try 0, 1, 2, 4 ... workers, until more do not help.

    Args:
        loader: Whose dataset and collation are used.
        max_workers: The most to try.
        budget_s: Seconds for all trials, the start of workers not counted.

    Raises:
        Exception: One of `SAMPLE_ERRORS`: the samples cannot be asked for by number.

    Example:
        >>> choose(DataLoader(range(64)), max_workers=0, budget_s=0.1).num_workers
        0
    """
    counts = [0, *(2**power for power in range(16) if 2**power <= max_workers)]
    reason = _why_no_workers(loader) if len(counts) > 1 else ""
    share_s = budget_s / len(counts)
    with untouched_random_state():
        trial = Trial(loader, share_s)
        tried = {0: trial.alone()}
        for count in () if reason else counts[1:]:
            try:
                tried[count] = trial.with_workers(count)
            except SAMPLE_ERRORS as error:
                reason = f"{type(error).__name__} in a worker: {error}".splitlines()[0]
                break
            if count > 1 and tried[count] > GAIN * min(tried[c] for c in tried if c < count):
                break
    return Choice(0 if reason else best(tried), tried, trial.idle_s, reason)


def _why_no_workers(loader: DataLoader[Any]) -> str:
    """Return why starting processes would not be safe, where the loader has none of its own."""
    if multiprocessing.current_process().daemon:
        return "this process may not start others"
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork" and loader.num_workers == 0:
        return f"processes are started by {method}, which runs a script without a main guard again"
    return ""


def best(seconds_per_batch: dict[int, float]) -> int:
    """Return the number of workers beyond which more gain too little.

    Example:
        >>> best({0: 1.0, 1: 1.1, 2: 0.55, 4: 0.54}), best({0: 1.0, 1: 6.0, 2: 5.0})
        (2, 0)
    """
    chosen = 0
    for count in sorted(seconds_per_batch):
        if seconds_per_batch[count] < GAIN * seconds_per_batch[chosen]:
            chosen = count
    return chosen


class Trial:
    """Times batches of a loader's samples, asked for by index.

    Args:
        loader: Whose dataset, collation and worker settings are used.
        budget_s: Seconds for each number of workers. Slow samples are timed in smaller batches.
    """

    def __init__(self, loader: DataLoader[Any], budget_s: float) -> None:
        self.idle_s = 0.0
        self._loader = loader
        self._budget_s = budget_s
        self._total = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        self._size = self._batch_size = _batch_size(loader)
        self._first: list[Any] = []
        self._random = False

    def alone(self) -> float:
        """Return the seconds of a batch in this process."""
        start = time.perf_counter()
        _ = self._loader.dataset[0]
        sample_s = time.perf_counter() - start
        affordable = int(self._budget_s / (3 * FEWEST) / max(sample_s, 1e-9))
        self._size = min(self._batch_size, max(1, affordable))
        self._first = list(self._made(0, 1, FEWEST))
        again = list(self._made(0, 1, FEWEST))
        self._random = not _equal(self._first, again)
        seconds, self.idle_s = self._timed(self._made(0, 1 + FEWEST, FEWEST), 0)
        return seconds

    def with_workers(self, count: int) -> float:
        """Return the seconds of a batch with so many workers.

        Raises:
            ValueError: A worker's samples are not those of this process, which do not draw random numbers.
        """
        if not self._random and not _equal(self._first, list(self._made(count, 1, FEWEST))):
            text = "samples are others than in this process (a file or another handle that processes share?)"
            raise ValueError(text)
        return self._timed(self._made(count, 1 + 2 * FEWEST, MOST), count)[0]

    def _timed(self, batches: Iterator[Any], count: int) -> tuple[float, float]:
        for _ in range(count):
            next(batches)
        start = last_s = time.perf_counter()
        computed, done, idle_s = time.thread_time(), 0, float("inf")
        for _ in batches:
            now, used = time.perf_counter(), time.thread_time()
            idle_s = min(idle_s, now - last_s - (used - computed))
            done, last_s, computed = done + 1, now, used
            if now - start > self._budget_s and done >= max(1, count):
                break
            if done >= 16 * max(1, count) and now - start > 0.1:
                break
        scale = self._batch_size / self._size
        return (last_s - start) / max(1, done) * scale, max(0.0, idle_s) * scale

    def _made(self, count: int, first: int, num_batches: int) -> Iterator[Any]:
        """Return batches number `first` to `first + num_batches`, by so many workers."""
        loader, single = self._loader, self._loader.batch_sampler is None
        indices = [
            [(index * self._size + k) % self._total for k in range(self._size)]
            for index in range(first, first + num_batches)
        ]
        keywords: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
        if count:
            keywords["multiprocessing_context"] = loader.multiprocessing_context
            keywords |= {"num_workers": count, "timeout": max(DEADLINE_S, self._budget_s)}
        if single:
            keywords |= {"sampler": [batch[0] for batch in indices], "batch_size": None}
        else:
            keywords |= {"batch_sampler": indices}
        return iter(DataLoader(loader.dataset, **keywords))


def _batch_size(loader: DataLoader[Any]) -> int:
    """Return the samples of a batch, on average where a sampler of its own makes batches."""
    if loader.batch_sampler is None:
        return 1
    known = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if known is not None:
        return int(known)
    try:
        return -(-len(loader.dataset) // len(loader))  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError, ZeroDivisionError):
        return 1


def _equal(one: Any, other: Any) -> bool:
    """Compare batches; what cannot be compared counts as different."""
    leaves = tree_leaves(one), tree_leaves(other)
    if len(leaves[0]) != len(leaves[1]):
        return False
    return all(_same(a, b) for a, b in zip(*leaves, strict=True))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one is other or one == other)


@contextmanager
def untouched_random_state() -> Generator[None]:
    """Put the random states of PyTorch's CPU generator, NumPy and Python back at the end."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
