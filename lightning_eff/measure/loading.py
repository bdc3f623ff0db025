"""How long a loader takes for a batch, in this process and with workers, tried on samples of its own.

A trial makes batches from fixed places of the dataset, so no sampler is advanced, and puts the random state
back. Only a loader over a dataset with an index can be tried: a stream would be consumed.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

FEWEST, MOST = 4, 256
"""Batches in a trial."""
GAIN = 0.9
"""A choice with more workers must take at most this share of the time of the one before."""
SAMPLE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OSError)
"""What a dataset raises for an index that its own sampler would not have asked for."""


@dataclass(frozen=True)
class Choice:
    """How many workers to use, and what was measured for it.

    Args:
        num_workers: The best number.
        seconds_per_batch: By number of workers; 0 is this process.
        idle_s: Time that any batch in this process waited, for a disk, a network or a lock, at least.
    """

    num_workers: int
    seconds_per_batch: dict[int, float]
    idle_s: float


def can_be_tried(loader: Any) -> bool:
    """Say whether a loader has a dataset whose samples can be asked for by index."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return hasattr(loader.dataset, "__len__") and len(loader.dataset) > 0  # pyright: ignore[reportArgumentType]


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
    share_s = budget_s / len(counts)
    tried: dict[int, float] = {}
    idle_s, offset = 0.0, 0
    with untouched_random_state():
        for count in counts:
            num_batches = _affordable(tried[0], count, share_s) if tried else FEWEST
            tried[count], least_idle_s, used = _try(loader, count, num_batches, offset, share_s)
            idle_s = least_idle_s if count == 0 else idle_s
            offset += used
            if count > 1 and tried[count] > GAIN * min(tried[c] for c in tried if c < count):
                break
    return Choice(best(tried), tried, idle_s)


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


def _affordable(seconds_per_batch: float, num_workers: int, budget_s: float) -> int:
    """Return how many batches a trial has: enough that those which were ready at its start weigh little."""
    wanted = 16 * max(1, num_workers)
    affordable = int(budget_s * max(1, num_workers) / max(seconds_per_batch, 1e-6))
    return min(MOST, max(FEWEST * max(1, num_workers), min(wanted, affordable)))


def _try(
    loader: DataLoader[Any], num_workers: int, num_batches: int, offset: int, budget_s: float
) -> tuple[float, float, int]:
    """Return seconds a batch, the least that one was idle, and how many batches were made."""
    batches = list(itertools.islice(_indices(loader, offset), num_batches + 1 + num_workers))
    iterator = iter(_trial(loader, batches, num_workers))
    for _ in range(1 + num_workers):
        next(iterator)
    start = time.perf_counter()
    computed = time.thread_time()
    done, last_s, idle_s = 0, start, float("inf")
    for _ in iterator:
        now, used = time.perf_counter(), time.thread_time()
        idle_s = min(idle_s, now - last_s - (used - computed))
        done, last_s, computed = done + 1, now, used
        if now - start > budget_s and done >= FEWEST * max(1, num_workers):
            break
    return (last_s - start) / max(1, done), max(0.0, idle_s), len(batches)


def _indices(loader: DataLoader[Any], offset: int) -> Iterator[Any]:
    """Yield lists of indices as the loader's batches have them, or single indices where it does not batch."""
    total = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    single = loader.batch_sampler is None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    for index in itertools.count(offset):
        chosen = [(index * size + k) % total for k in range(size)]
        yield chosen[0] if single else chosen


def _trial(loader: DataLoader[Any], batches: list[Any], num_workers: int) -> DataLoader[Any]:
    keywords: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": num_workers,
        "worker_init_fn": loader.worker_init_fn,
    }
    if num_workers:
        keywords["multiprocessing_context"] = loader.multiprocessing_context
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, sampler=batches, batch_size=None, **keywords)
    return DataLoader(loader.dataset, batch_sampler=batches, **keywords)


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
