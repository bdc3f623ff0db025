"""Measure how long a loader takes for a batch, in this process and with workers, on samples of its dataset.

A trial makes batches from fixed indices of the dataset, so it advances no sampler.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pickle import PicklingError  # the error alone: nothing is unpickled here
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

NUM_BATCHES, MAX_BATCHES = 4, 512
"""Batches that are compared and timed in this process; at most so many are timed with workers."""
MAX_TIME_RATIO = 0.9
"""More workers are chosen only if a batch then takes at most this fraction of the time."""
SAMPLE_ERRORS = (
    *(LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError, RuntimeError),
    *(OSError, EOFError, NotImplementedError, PicklingError),
)
"""What samples raise for an index that their own sampler would not use, or in a worker."""
WORKER_TIMEOUT_S = 20.0
"""Time after which a worker that returns no sample counts as hung."""


@dataclass(frozen=True)
class WorkerChoice:
    """How many workers to use, and the measurements behind it."""

    num_workers: int | None  # None leaves the loader as it is
    seconds_per_batch: dict[int, float]  # by number of workers; 0 is this process; empty if not measured
    reason: str = ""  # why nothing was measured, or no more workers were tried


def choose_num_workers(loader: DataLoader[Any], *, max_workers: int, budget_s: float) -> WorkerChoice:
    """Try 0, 1, 2, 4 ... workers, until more do not help.

    `budget_s` is for all trials, the start of workers not counted.

    Example:
        >>> choose_num_workers(DataLoader(range(64)), max_workers=0, budget_s=0.1).num_workers
        0
    """
    counts = [2**power for power in range(16) if 2**power <= max_workers]
    budget_s /= 1 + len(counts)
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    reason = ""
    if counts and multiprocessing.current_process().daemon:
        reason = "this process may not start others"
    elif counts and method != "fork" and loader.num_workers == 0:
        reason = f"processes are started by {method}, which runs a script without a main guard again"
    # Lightning restores no state after an error, so none leaves the block.
    with isolate_rng(include_cuda=False):
        try:
            start = time.perf_counter()
            loader.dataset[0]
            sample_s = time.perf_counter() - start
            # Slow samples are timed in smaller batches.
            batch_size: int = getattr(loader.batch_sampler, "batch_size", None) or 1
            size = min(batch_size, max(1, int(budget_s / (3 * NUM_BATCHES * max(sample_s, 1e-9)))))
            samples, again = (list(_batches(loader, 0, size, 0)) for _ in range(2))
            is_random = not _are_equal(samples, again)
            tried = {0: _seconds_per_batch(loader, 0, size, budget_s) * batch_size / size}
        except SAMPLE_ERRORS as error:
            reason = f"a trial failed ({type(error).__name__}: {error})".splitlines()[0]
            return WorkerChoice(None, {}, reason)
        best = 0
        for count in () if reason else counts:
            try:
                # A file or another handle that processes share gives workers other samples.
                if not (is_random or _are_equal(samples, list(_batches(loader, count, size, 0)))):
                    return WorkerChoice(0, tried, "samples of a worker differ from this process's")
                tried[count] = _seconds_per_batch(loader, count, size, budget_s) * batch_size / size
            except SAMPLE_ERRORS as error:
                reason = f"{type(error).__name__} in a worker: {error}".splitlines()[0]
                return WorkerChoice(0, tried, reason)
            if tried[count] < MAX_TIME_RATIO * tried[best]:
                best = count
            elif count > 1:
                break
    return WorkerChoice(best, tried, reason)


def _batches(
    loader: DataLoader[Any], count: int, size: int, first: int, num_batches: int = NUM_BATCHES
) -> Iterator[Any]:
    """Return batches number `first` to `first + num_batches`, made by `count` workers."""
    num_samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    indices = [
        [(number * size + k) % num_samples for k in range(size)]
        for number in range(first, first + num_batches)
    ]
    keywords: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
    if count:
        keywords["multiprocessing_context"] = loader.multiprocessing_context
        keywords |= {"num_workers": count, "timeout": WORKER_TIMEOUT_S}
    if loader.batch_sampler is None:  # batch_size=None: the loader hands out samples
        return iter(DataLoader(loader.dataset, sampler=[i for i, *_ in indices], batch_size=None, **keywords))
    return iter(DataLoader(loader.dataset, batch_sampler=indices, **keywords))


def _seconds_per_batch(loader: DataLoader[Any], count: int, size: int, budget_s: float) -> float:
    """Time batches until the budget is spent or they are enough, after one batch for each worker."""
    # Others than were read before, which may still be in the system's cache of files.
    if count == 0:
        batches = _batches(loader, count, size, NUM_BATCHES)
    else:
        batches = _batches(loader, count, size, 2 * NUM_BATCHES, MAX_BATCHES)
    for _ in range(count):
        next(batches)
    start = now = time.perf_counter()
    num_done = 0
    for _ in batches:
        now, num_done = time.perf_counter(), num_done + 1
        is_enough = num_done >= 16 * max(1, count) and now - start > 0.1
        if is_enough or (now - start > budget_s and num_done >= max(1, count)):
            break
    return (now - start) / max(1, num_done)


def _are_equal(left: Any, right: Any) -> bool:
    """Compare batches; what cannot be compared counts as different."""
    pairs = tree_leaves(left), tree_leaves(right)
    return len(pairs[0]) == len(pairs[1]) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a is b or a == b)
        for a, b in zip(*pairs, strict=True)
    )
