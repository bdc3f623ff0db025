"""Measure how long a loader takes for a batch, in this process and with workers, on samples of its dataset.

A trial makes batches from fixed indices of the dataset, so it advances no sampler, and restores the random
state. Only a map-style dataset can be tried: a stream would be consumed.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pickle import PicklingError  # the error alone: nothing is unpickled here
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

MIN_BATCHES, MAX_BATCHES = 4, 512
"""Batches in a trial."""
MAX_TIME_RATIO = 0.9
"""More workers are chosen only if a batch then takes at most this fraction of the time."""
SAMPLE_ERRORS = (
    *(LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError, RuntimeError),
    *(OSError, EOFError, PicklingError),
)
"""What samples raise for an index that their own sampler would not use, or in a worker."""
WORKER_TIMEOUT_S = 20.0
"""Time after which a worker that returns no sample counts as hung."""


@dataclass(frozen=True)
class WorkerChoice:
    """How many workers to use, and the measurements behind it."""

    num_workers: int
    seconds_per_batch: dict[int, float]  # by number of workers; 0 is this process
    reason: str = ""  # why workers were not tried, or not trusted; empty if they were


def choose_num_workers(loader: DataLoader[Any], *, max_workers: int, budget_s: float) -> WorkerChoice | None:
    """Try 0, 1, 2, 4 ... workers, until more do not help; None for a dataset without a length, or empty.

    `budget_s` is for all trials, the start of workers not counted. Raises one of `SAMPLE_ERRORS` where the
    dataset has no samples at indices 0, 1, 2, ...

    Example:
        >>> choose_num_workers(DataLoader(range(64)), max_workers=0, budget_s=0.1).num_workers
        0
    """
    try:
        num_samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):
        num_samples = 0
    if not num_samples:
        return None
    counts = [2**power for power in range(16) if 2**power <= max_workers]
    trial = LoaderTrial(loader, budget_s / (1 + len(counts)))
    # Not safe to start processes, if the loader starts none itself.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    reason = ""
    if counts and multiprocessing.current_process().daemon:
        reason = "this process may not start others"
    elif counts and method != "fork" and loader.num_workers == 0:
        reason = f"processes are started by {method}, which runs a script without a main guard again"
    random_states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        tried = {0: trial.alone()}
        for count in () if reason else counts:
            try:
                tried[count] = trial.with_workers(count)
            except SAMPLE_ERRORS as error:
                reason = f"{type(error).__name__} in a worker: {error}".splitlines()[0]
                break
            if count > 1 and tried[count] > MAX_TIME_RATIO * min(tried[c] for c in tried if c < count):
                break
    finally:
        torch.set_rng_state(random_states[0])
        np.random.set_state(random_states[1])
        random.setstate(random_states[2])
    return WorkerChoice(0 if reason else best_num_workers(tried), tried, reason)


def best_num_workers(seconds_per_batch: dict[int, float]) -> int:
    """Return the number of workers beyond which more gain too little.

    Example:
        >>> best_num_workers({0: 1.0, 1: 1.1, 2: 0.55, 4: 0.54}), best_num_workers({0: 1.0, 1: 6.0, 2: 5.0})
        (2, 0)
    """
    best = 0
    for count in sorted(seconds_per_batch):
        if seconds_per_batch[count] < MAX_TIME_RATIO * seconds_per_batch[best]:
            best = count
    return best


class LoaderTrial:
    """Times batches of a loader's dataset, made by index; slow samples are timed in smaller batches."""

    def __init__(self, loader: DataLoader[Any], budget_s: float) -> None:
        self._loader = loader
        self._budget_s = budget_s
        self._num_samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        size: Any = 1  # of a loader that hands out samples
        if loader.batch_sampler is not None:
            size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if size is None:  # a batch sampler of its own: the average
            try:
                size = -(-self._num_samples // len(loader))
            except (TypeError, NotImplementedError, ZeroDivisionError):
                size = 1
        self._size = self._batch_size = int(size)
        self._reference: list[Any] = []
        self._is_random = False

    def alone(self) -> float:
        """Return the seconds of a batch in this process."""
        start = time.perf_counter()
        _ = self._loader.dataset[0]
        sample_s = time.perf_counter() - start
        affordable = int(self._budget_s / (3 * MIN_BATCHES) / max(sample_s, 1e-9))
        self._size = min(self._batch_size, max(1, affordable))
        self._reference = list(self._batches(0, 1, MIN_BATCHES))
        self._is_random = not _are_equal(self._reference, list(self._batches(0, 1, MIN_BATCHES)))
        return self._time(self._batches(0, 1 + MIN_BATCHES, MIN_BATCHES), 0)

    def with_workers(self, count: int) -> float:
        """Return the seconds of a batch; refuse workers whose samples differ without drawing at random."""
        if not self._is_random:
            batches = list(self._batches(count, 1, MIN_BATCHES))
            if not _are_equal(self._reference, batches):
                text = "samples differ from this process's (a file or another handle that processes share?)"
                raise ValueError(text)
        return self._time(self._batches(count, 1 + 2 * MIN_BATCHES, MAX_BATCHES), count)

    def _time(self, batches: Iterator[Any], count: int) -> float:
        """Return the seconds of a batch, after one batch for each worker."""
        for _ in range(count):
            next(batches)
        start = now = time.perf_counter()
        num_done = 0
        for _ in batches:
            now, num_done = time.perf_counter(), num_done + 1
            if now - start > self._budget_s and num_done >= max(1, count):
                break
            if num_done >= 16 * max(1, count) and now - start > 0.1:
                break
        return (now - start) / max(1, num_done) * (self._batch_size / self._size)

    def _batches(self, count: int, first: int, num_batches: int) -> Iterator[Any]:
        """Return batches number `first` to `first + num_batches`, made by `count` workers."""
        loader = self._loader
        indices = [
            [(index * self._size + k) % self._num_samples for k in range(self._size)]
            for index in range(first, first + num_batches)
        ]
        keywords: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
        if count:
            keywords["multiprocessing_context"] = loader.multiprocessing_context
            keywords |= {"num_workers": count, "timeout": max(WORKER_TIMEOUT_S, self._budget_s)}
        if loader.batch_sampler is None:  # batch_size=None: the loader hands out samples
            keywords |= {"sampler": [batch[0] for batch in indices], "batch_size": None}
        else:
            keywords |= {"batch_sampler": indices}
        return iter(DataLoader(loader.dataset, **keywords))


def _are_equal(left: Any, right: Any) -> bool:
    """Compare batches; what cannot be compared counts as different."""
    pairs = tree_leaves(left), tree_leaves(right)
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a is b or a == b)
        for a, b in zip(*pairs, strict=True)
    )
