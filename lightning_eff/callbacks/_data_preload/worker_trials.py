"""Measure how long a loader takes for a batch, in this process and with workers, on samples of its dataset.

A trial makes batches from fixed indices of the dataset, so it advances no sampler.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

NUM_BATCHES, MAX_BATCHES = 4, 512
"""Batches that are compared, and timed in this process; at most so many are timed with workers."""
MAX_TIME_RATIO = 0.9
"""More workers are chosen only if a batch then takes at most this fraction of the time."""
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
    tried: dict[int, float] = {}
    samples: list[Any] = []
    best = 0
    # Lightning restores no state after an error, so none leaves the block.
    with isolate_rng(include_cuda=False):
        try:
            start = time.perf_counter()
            loader.dataset[0]
            sample_s = max(time.perf_counter() - start, 1e-9)
            # Slow samples are timed in smaller batches.
            batch_size: int = getattr(loader.batch_sampler, "batch_size", None) or 1
            size = min(batch_size, max(1, int(budget_s / (3 * NUM_BATCHES * sample_s))))
            for count in (0, *(() if reason else counts)):
                found, seconds = _trial(loader, count, size, budget_s)
                samples = samples or found
                # A file or another handle that processes share gives workers other samples; random ones
                # differ in this process too.
                if not _are_equal(samples, found) and _are_equal(samples, _trial(loader, 0, size, 0.0)[0]):
                    return WorkerChoice(0, tried, "samples of a worker differ from this process's")
                tried[count] = seconds * batch_size / size
                if tried[count] < MAX_TIME_RATIO * tried[best]:
                    best = count
                elif count > 1:
                    break
        except Exception as error:  # noqa: BLE001 - a user's dataset may raise anything
            reason = f"a trial failed ({type(error).__name__}: {error})".splitlines()[0]
            return WorkerChoice(0 if tried else None, tried, reason)
    return WorkerChoice(best, tried, reason)


def _trial(loader: DataLoader[Any], count: int, size: int, budget_s: float) -> tuple[list[Any], float]:
    """Return the first batches of `size` samples, and the seconds of a batch after them."""
    num_samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    # Workers are timed with samples that this process has not read: those may be in the cache of files.
    timed = range(2 * NUM_BATCHES, MAX_BATCHES) if count else range(NUM_BATCHES, 2 * NUM_BATCHES)
    indices = [
        [(number * size + k) % num_samples for k in range(size)] for number in (*range(NUM_BATCHES), *timed)
    ]
    keywords: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
    if count:
        keywords["multiprocessing_context"] = loader.multiprocessing_context
        keywords |= {"num_workers": count, "timeout": WORKER_TIMEOUT_S}
    if loader.batch_sampler is None:  # batch_size=None: the loader hands out samples
        keywords |= {"sampler": [index for index, *_ in indices], "batch_size": None}
    else:
        keywords["batch_sampler"] = indices
    batches = iter(DataLoader(loader.dataset, **keywords))
    # One batch of each worker at least, so that all have started.
    first = list(itertools.islice(batches, max(NUM_BATCHES, count)))[:NUM_BATCHES]
    start = now = time.perf_counter()
    num_done = 0
    for _ in batches:
        now, num_done = time.perf_counter(), num_done + 1
        is_enough = num_done >= 16 * max(1, count) and now - start > 0.1
        if is_enough or (now - start > budget_s and num_done >= max(1, count)):
            break
    return first, (now - start) / max(1, num_done)


def _are_equal(left: Any, right: Any) -> bool:
    """Compare batches; what cannot be compared counts as different."""
    pairs = tree_leaves(left), tree_leaves(right)
    return len(pairs[0]) == len(pairs[1]) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a is b or a == b)
        for a, b in zip(*pairs, strict=True)
    )
