"""Load training batches ahead of use, with a measured number of workers and early copies to the GPU.

Workers load samples in separate processes. Workers save time if samples load slowly, and cost time if samples
load fast. So the best number of workers is measured on the loader's own samples before training; the result
can be 0. Batches from workers are copied to a GPU on a side stream while the previous step computes. The
data, their order and the random numbers of training stay the same.

Why no thread that fetches ahead: its samples would change the random numbers that training draws.

Saves: the time spent waiting for data, which the report shows as a fraction of the run.
Costs: host memory for each worker, and device memory for batches that were copied early. Measuring takes a
    few seconds at the start. Workers are tried only while all trials take at most a twentieth of the run's
    loading time. With a fixed number such as `num_workers=2`, nothing is measured. Loaders with the same type
    of dataset and batch size are measured once. With workers, samples draw different random numbers, and so
    do samplers that draw one index at a time. Streams, stateful loaders and loaders with their own `__iter__`
    keep their number of workers.
When not: samples that load fast, because no workers are then used.
Conflicts: a dataset that writes files when it is first read needs a fixed `num_workers`, because a trial that
    returns no sample for 20 s is killed. If custom hooks move batches (`transfer_batch_to_device`,
    `on_before_batch_transfer`), no batch is copied ahead of use.
Source: prefetching as in NVIDIA's Apex and DALI; https://docs.pytorch.org/docs/stable/data.html
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from inspect import GEN_CLOSED, GEN_CREATED, getgeneratorstate
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_eff.core import dataloaders
from lightning_eff.core.arguments import Count, CountOrZero, Positive, check_arguments
from lightning_eff.core.machine import num_cores
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome, Try
from lightning_eff.core.torch_private import torch_private
from lightning_eff.report.advice import Observed, Suggestion
from lightning_eff.report.live_bytes import tensors_in

TRANSFER_HOOKS = ("transfer_batch_to_device", "on_before_batch_transfer")
"""Hooks that must be called before a batch is on the device."""
NUM_BATCHES, MAX_BATCHES = 4, 512
"""Number of batches to compare, and to time without workers; maximum number of batches in a trial."""
MIN_WAIT = 0.1
"""The technique is suggested if a run spends more than this fraction of its time waiting for data."""
MAX_TIME_RATIO = 0.9
"""A larger number of workers is chosen only if a batch takes less than this fraction of the best time."""
MAX_RUN_FRACTION = 0.05
"""Limit on the total time of all trials, as a fraction of the run's loading time."""
WORKER_TIMEOUT_S = 20.0
"""Seconds after which a worker that returns no sample is considered hung."""


class DataPreload(Managed):
    """Load training batches ahead of use.

    Args:
        num_workers: Number of processes that load samples. `auto` measures the best number.
        prefetch_factor: Number of batches that each worker keeps ready.
        persistent_workers: Keep the workers between epochs even if the loader does not. Persistent workers do
            not see later changes of the dataset.
        pin_memory: Use page-locked host memory, so that copies to a GPU overlap with computation. If None,
            page-locked memory is used if training runs on a GPU.
        num_batches_ahead: Number of batches from workers that are copied to the GPU ahead of use.
        max_measure_s: Maximum seconds for measuring, excluding the start of workers.

    Raises:
        ConfigError: A number is outside its range.

    Example:
        >>> trainer = pl.Trainer(callbacks=[DataPreload(num_workers=2)], logger=False, accelerator="cpu")
        >>> DataPreload(num_workers=-1)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: num_workers=-1: expected 'auto', or a whole number ...
    """

    lowers = ("time",)
    try_as = (Try(),)

    @check_arguments
    def __init__(
        self,
        *,
        num_workers: Literal["auto"] | CountOrZero = "auto",
        prefetch_factor: Count = 2,
        persistent_workers: bool = False,
        pin_memory: bool | None = None,
        num_batches_ahead: CountOrZero = 1,
        max_measure_s: Positive = 4.0,
    ) -> None:
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self.num_batches_ahead = num_batches_ahead
        self.max_measure_s = max_measure_s
        self._reset()

    def _reset(self) -> None:
        self._prepared: list[tuple[PrefetchLoader, WorkerChoice]] = []
        self._measured: dict[Any, WorkerChoice] = {}
        self._final: Outcome | None = None
        self._epoch = 0
        self._transfer_hook = ""

    def join_prediction(self, gpu: object) -> bool:
        """Return False, because no data is loaded while memory is being predicted."""
        del gpu
        return False

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest this technique for a run that waits for its data."""
        waited = run.measured["data_wait_share"] or 0.0
        why = f"the run waits for data {waited:.0%} of the time"
        return Suggestion(technique=DataPreload(), why=why) if waited > MIN_WAIT else None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        self._reset()
        datamodule: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        owners = [pl_module, *([datamodule] if datamodule is not None else [])]
        hooks = [(o, hook) for o in owners for hook in TRANSFER_HOOKS if is_overridden(hook, o)]
        self._transfer_hook = f"{type(hooks[0][0]).__name__}.{hooks[0][1]}" if hooks else ""
        self.cleanup.callback(self._finish)
        unhook = dataloaders.add_loader_transform(trainer, lambda loader: self._prepare(loader, trainer))
        self.cleanup.callback(unhook)

    def _prepare(self, loader: Any, trainer: pl.Trainer) -> PrefetchLoader:
        """Return the loader that training iterates in place of `loader`."""
        if trainer.current_epoch != self._epoch:
            for earlier, *_ in self._prepared:  # Lightning replaces these loaders
                earlier.end()
            self._prepared = []
        self._epoch = trainer.current_epoch
        device = trainer.strategy.root_device
        choice = self._choose(loader, trainer)
        num_workers, tuned = choice.num_workers, None
        if num_workers is not None:
            tuned = copy.copy(loader)  # the copy shares dataset and sampler; the user's loader is unchanged
            is_pinned = device.type == "cuda" if self.pin_memory is None else self.pin_memory
            values = {
                # A copy must not share the user's persistent workers.
                "_iterator": None,
                "num_workers": num_workers,
                "prefetch_factor": self.prefetch_factor if num_workers else None,
                "persistent_workers": num_workers > 0
                and (self.persistent_workers or loader.persistent_workers),
                "pin_memory": is_pinned or loader.pin_memory,
                "timeout": loader.timeout if num_workers else 0,
            }
            for name, value in values.items():
                object.__setattr__(tuned, name, value)  # DataLoader.__setattr__ forbids some names
        kind = StatefulPrefetchLoader if dataloaders.is_stateful(loader) else PrefetchLoader
        prepared = kind(loader, tuned)
        # Without workers nothing is fetched ahead: samples would draw random numbers during training steps.
        is_ahead = device.type == "cuda" and prepared.num_workers > 0 and not self._transfer_hook
        if is_ahead and self.num_batches_ahead:
            prepared.num_ahead, prepared.device = self.num_batches_ahead, device
        self._prepared.append((prepared, choice))
        return prepared

    def _choose(self, loader: Any, trainer: pl.Trainer) -> WorkerChoice:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            # A trial reads samples by index, and another number of workers would change a stream's order.
            return WorkerChoice(None, {}, "its dataset has no indices")
        if dataloaders.is_stateful(loader):
            return WorkerChoice(None, {}, "a stateful loader's position depends on its workers")
        if type(loader).__iter__ is not DataLoader.__iter__:
            return WorkerChoice(None, {}, "its class has its own `__iter__`")
        if isinstance(self.num_workers, int):
            return WorkerChoice(self.num_workers, {}, "set by num_workers")
        key = (type(loader.dataset), loader.batch_size)  # measure similar loaders once, also in later epochs
        if key not in self._measured:
            most = num_cores(getattr(trainer, "num_devices", 1))
            measured = choose_num_workers(
                loader,
                max_workers=most,
                budget_s=self.max_measure_s,
                num_batches=_num_batches_left(loader, trainer),
            )
            # All ranks measure, and all use rank 0's choice.
            self._measured[key] = trainer.strategy.broadcast(measured)
        return self._measured[key]

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for loader, *_ in self._prepared:
            loader.close()  # the next iteration belongs to the next epoch

    def _finish(self) -> None:
        """Store the outcome, and release the loaders and their data."""
        self._final = self.outcome()
        for loader, *_ in self._prepared:
            loader.end()
        self._prepared = []

    def outcome(self) -> Outcome:
        """Report the chosen numbers of workers and the measured times."""
        if self._final is not None:
            return self._final
        if not self._prepared:
            return Outcome(did="no training data yet", effective=False)
        texts: list[str] = []
        for loader, choice in self._prepared:
            text = "1 worker" if loader.num_workers == 1 else f"{loader.num_workers} workers"
            if choice.seconds_per_batch:
                tried = [f"{s * 1e3:.2f} ms with {n}" for n, s in choice.seconds_per_batch.items()]
                text += f" (a batch takes {', '.join(tried)})"
                text += f", no more: {choice.reason}" if choice.reason else ""
            else:
                text += f", not measured: {choice.reason}"
            text += "; batches on the GPU ahead of use" if loader.num_ahead else ""
            texts.append(text)
        parts = list(dict.fromkeys(texts))
        if self._transfer_hook:
            parts.append(f"not moved ahead: {self._transfer_hook} moves batches itself")
        nums_workers = [loader.num_workers for loader, _ in self._prepared]
        seconds = [choice.seconds_per_batch for _, choice in self._prepared]
        numbers = {"num_workers": nums_workers, "seconds_per_batch": seconds}
        return Outcome(did="; ".join(parts), effective=any(nums_workers), numbers=numbers)


@dataclass(frozen=True)
class WorkerChoice:
    """A number of workers, and the measurements that led to this number."""

    num_workers: int | None  # None leaves the loader unchanged
    seconds_per_batch: dict[int, float]  # by number of workers, 0 for this process; empty if not measured
    reason: str = ""  # why nothing was measured, or why no more workers were tried


def _num_batches_left(loader: DataLoader[Any], trainer: pl.Trainer) -> float:
    """Return the number of batches that the rest of the run loads; infinity if nothing limits the run."""
    num_batches, limit = float(sized_len(loader) or "inf"), trainer.limit_train_batches
    num_batches = min(num_batches, limit) if isinstance(limit, int) else num_batches * limit
    if trainer.max_epochs in (None, -1):
        num_batches = float("inf")
    else:
        num_batches *= trainer.max_epochs - trainer.current_epoch
    if trainer.max_steps == -1:
        return num_batches
    return min(num_batches, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)


def choose_num_workers(
    loader: DataLoader[Any], *, max_workers: int, budget_s: float, num_batches: float
) -> WorkerChoice:
    """Try 0, 1, 2, 4, ... workers until more workers do not help, or the trials take too long.

    A trial loads fixed indices of the dataset, so no sampler advances.

    Args:
        loader: The loader to measure.
        max_workers: Maximum number of workers to try.
        budget_s: Maximum seconds for all trials, excluding the start of workers.
        num_batches: Number of batches that the run loads. Workers are tried only while all trials take at
            most a twentieth of the time of loading these batches without workers.
    """
    counts = [2**power for power in range(16) if 2**power <= max_workers]
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    # If the loader already has workers, the script is able to start processes.
    if method != "fork" and loader.num_workers == 0:
        return WorkerChoice(None, {}, f"the start method {method} runs a script without a main guard again")
    tried: dict[int, float] = {}
    samples: list[Any] = []
    best, reason, trial_s, end = 0, "", 0.0, 0.0
    # Lightning's isolate_rng restores no state after an error, so no error may leave the block.
    with isolate_rng(include_cuda=False):
        try:
            sample_s = max(_trial(loader, 0, 1, 0.0)[1], 1e-9)
            batch_size: int = getattr(loader.batch_sampler, "batch_size", None) or 1
            # Estimate the run's loading time from single samples, because this time limits the trials.
            # Each trial gets an equal part of the budget.
            run_s = sample_s * batch_size * num_batches
            budget_s = min(budget_s, MAX_RUN_FRACTION * run_s) / (1 + len(counts))
            # Slow samples are tried in smaller batches, so that a trial stays within its budget.
            size = min(batch_size, max(1, int(budget_s / (3 * NUM_BATCHES * sample_s))))
            for count in (0, *counts):
                start = time.perf_counter()
                if count and start + trial_s > end:
                    reason = f"trials may take {MAX_RUN_FRACTION:.0%} of the run's loading time"
                    break
                found, seconds = _trial(loader, count, size, budget_s)
                now = time.perf_counter()
                trial_s = now - start
                samples = samples or found
                # Workers that share a file handle read wrong samples. Random samples differ in each load, so
                # samples count as wrong only if a second load without workers gives the same samples.
                if not _are_equal(samples, found) and _are_equal(samples, _trial(loader, 0, size, 0.0)[0]):
                    return WorkerChoice(0, tried, "workers load other samples")
                # Convert to seconds per batch of the loader's own batch size.
                tried[count] = seconds * batch_size / size
                if not count:
                    end = now + MAX_RUN_FRACTION * tried[0] * num_batches
                # More workers must be clearly faster. The first doubling that is not faster ends the trials.
                if tried[count] < MAX_TIME_RATIO * tried[best]:
                    best = count
                elif count > 1:
                    break
        except Exception as error:  # noqa: BLE001 - a user's dataset may raise anything
            # The text of a worker's error ends with the cause.
            reason = f"a trial failed ({f'{type(error).__name__}: {error}'.strip().splitlines()[-1]})"
            return WorkerChoice(0 if tried else None, tried, reason)
    return WorkerChoice(best, tried, reason)


def _trial(loader: DataLoader[Any], count: int, size: int, budget_s: float) -> tuple[list[Any], float]:
    """Return the first batches, of `size` samples each, and the mean seconds per later batch."""
    num_samples = len(loader.dataset)  # pyright: ignore[reportArgumentType]
    # Time workers on samples that were not read before, because read samples may be in the file cache.
    timed = range(2 * NUM_BATCHES, MAX_BATCHES) if count else range(NUM_BATCHES, 2 * NUM_BATCHES)
    numbers = (*range(NUM_BATCHES), *timed)
    indices = [[(number * size + k) % num_samples for k in range(size)] for number in numbers]
    keywords: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
    if count:
        keywords["multiprocessing_context"] = loader.multiprocessing_context
        keywords |= {"num_workers": count, "timeout": WORKER_TIMEOUT_S}
    if loader.batch_sampler is None:  # batch_size=None: the loader hands out samples
        keywords |= {"sampler": [index for index, *_ in indices], "batch_size": None}
    else:
        keywords["batch_sampler"] = indices
    trial: Any = Trial(DataLoader(loader.dataset, **keywords), budget_s)
    if not count:
        # Loading could open a file or change the dataset, so this trial runs in another process too.
        own: Any = {"batch_size": None, "collate_fn": tuple, "num_workers": 1, "timeout": WORKER_TIMEOUT_S}
        trial = DataLoader(trial, multiprocessing_context=loader.multiprocessing_context, **own)
    *first, seconds = (value for (value,) in trial)
    return first[:NUM_BATCHES], seconds


class Trial(IterableDataset[tuple[Any]]):
    """Yields a loader's first batches, then the mean seconds per later batch, also in a worker."""

    def __init__(self, loader: DataLoader[Any], budget_s: float) -> None:
        self.loader, self.budget_s = loader, budget_s

    @override
    def __iter__(self) -> Iterator[tuple[Any]]:
        # Without this, torch 2.13 collates into shared memory, which takes longer than in the main process.
        torch_private("torch.utils.data._utils:worker", "DataPreload")._worker_info = None  # noqa: SLF001
        batches, count = iter(self.loader), max(1, self.loader.num_workers)
        # Wait for one batch from each worker, so that the timing excludes the start of workers.
        yield from ((batch,) for batch in itertools.islice(batches, max(NUM_BATCHES, count)))
        start, seconds, num_done = time.perf_counter(), 0.0, 0
        for num_done, _ in enumerate(batches, 1):
            seconds = time.perf_counter() - start
            # Stop after enough batches per worker for a stable mean, or when the budget is used up.
            is_enough = num_done >= 16 * count and seconds > 0.1
            if is_enough or (seconds > self.budget_s and num_done >= count):
                break
        yield (seconds / max(1, num_done),)


def _are_equal(left: Any, right: Any) -> bool:
    """Return whether two lists of batches have equal tensors and values."""
    pairs = tree_leaves(left), tree_leaves(right)
    return len(pairs[0]) == len(pairs[1]) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a is b or a == b)
        for a, b in zip(*pairs, strict=True)
    )


class PrefetchLoader(dataloaders.LoaderWrapper):
    """Wraps a training loader, to use another number of workers and to copy batches to the device early.

    If the loader is iterated a second time after a pass has begun, for example to look at some images, the
    second iteration uses the wrapped loader, and takes no batches from training.

    Args:
        loader: The wrapped loader.
        tuned: A copy of the loader with another number of workers, for training; if None, `loader` is used.
        num_ahead: Number of batches to fetch ahead of use.
        device: CUDA device to copy batches to, on a side stream; None copies nothing.
    """

    OWN = ("loader", "num_ahead", "device", "_tuned", "_current", "_source", "_taken_state", "_is_over")
    num_workers = property(lambda self: getattr(self._tuned, "num_workers", 0))

    def __init__(
        self, loader: Any, tuned: Any = None, *, num_ahead: int = 0, device: torch.device | None = None
    ) -> None:
        super().__init__(loader)
        self.num_ahead = num_ahead
        self.device = device
        self._tuned = loader if tuned is None else tuned
        self._current: Generator[Any] | None = None
        self._source: Iterator[Any] | None = None
        """The iterator of `tuned` in this pass; None before the first batch is fetched."""
        self._taken_state: Any = None
        """The loader's state after the last batch handed out."""
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_over or self._has_begun():
            return iter(self.loader)
        self.close()  # Lightning 2.6 creates a second iterator before the first epoch of a second fit
        self._source = self._taken_state = None
        # `tuned` must draw the same random numbers as `loader` would. In torch 2.13, a loader without workers
        # draws a seed when its iterator is created, and the sampler's seed at the first batch. A loader with
        # workers draws both when its iterator is created; with persistent workers, later passes draw no seed.
        tuned, loader, seed = self._tuned, self.loader, 0
        is_at_once = tuned is loader or loader.num_workers > 0
        # The persistent workers of `tuned` draw no seed, but new workers of `loader` would.
        is_kept = is_at_once and tuned is not loader and tuned._iterator is not None  # noqa: SLF001
        if not is_at_once or (is_kept and not loader.persistent_workers):
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        if is_at_once:
            self._source = source = iter(tuned)
            if tuned is not loader and not tuned.num_workers:
                # Like workers, request the first index now, because this request makes the sampler draw.
                indices = source._sampler_iter  # noqa: SLF001
                source._sampler_iter = itertools.chain(list(itertools.islice(indices, 1)), indices)  # noqa: SLF001
        else:
            # A loader without workers seeds its sampler with this draw; `tuned` must use the same seed.
            object.__setattr__(tuned, "generator", torch.Generator().manual_seed(seed))
        self._current = self._batches()
        return self._current

    def _has_begun(self) -> bool:
        """Return whether the current pass has handed out a batch and is not over."""
        is_idle = (GEN_CREATED, GEN_CLOSED)
        return self._current is not None and getgeneratorstate(self._current) not in is_idle

    def _batches(self) -> Generator[Any]:
        """Yield the batches of one pass."""
        # The batch to hand out next, and up to `num_ahead` further batches.
        ready: deque[tuple[Any, Any, Any]] = deque()
        is_over = False
        stream = None if self.device is None else torch.cuda.Stream(self.device)
        while True:
            while len(ready) <= self.num_ahead and not is_over:
                try:
                    ready.append(self._fetch(stream))
                except StopIteration:
                    is_over = True
            if not ready:
                return
            # No variable here may refer to the batch during its step, since this would keep its memory alive.
            yield self._take(*ready.popleft())

    def _fetch(self, stream: Any) -> tuple[Any, Any, Any]:
        """Fetch a batch, read a stateful loader's state, and start the batch's copy on a stream."""
        if self._source is None:
            self._source = iter(self._tuned)
        batch, arrived = next(self._source), None
        # Read the loader's state now, before the next fetch advances the loader.
        state = self.loader.state_dict() if isinstance(self, StatefulPrefetchLoader) else None
        if self.device is not None:
            with torch.cuda.stream(stream):
                batch, arrived = move_data_to_device(batch, self.device), stream.record_event()
        return batch, state, arrived

    def _take(self, batch: Any, state: Any, arrived: Any) -> Any:
        """Return a fetched batch, and make the current stream wait for its copy."""
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            # The copy runs on the side stream, so computation must wait for the copy.
            current.wait_event(arrived)
            # Without this record, the allocator could reuse the memory while the current stream reads it.
            for tensor in tensors_in(batch):
                tensor.record_stream(current)
        self._taken_state = state
        return batch

    def close(self) -> None:
        """End the pass, drop fetched batches, and end workers that are not persistent."""
        if self._current is None:
            return
        self._current.close()
        self._current = None
        source, self._source = self._source, None
        if self._tuned is not self.loader and not self._tuned.persistent_workers:
            # End the workers explicitly, since a traceback may keep the iterator alive.
            end_workers = getattr(source, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()

    def end(self) -> None:
        """Close this loader permanently, and end all workers; later iterations use the wrapped loader."""
        self.close()
        self._is_over = True
        if self._tuned is not self.loader:
            if self._tuned._iterator is not None:  # noqa: SLF001
                self._tuned._iterator._shutdown_workers()  # noqa: SLF001
                self._tuned._iterator = None  # noqa: SLF001
            self._tuned = self.loader

    @property
    def _iterator(self) -> Any:
        """Close the pass, and return the inner iterator, whose workers Lightning 2.6 shuts down."""
        self.close()
        return self._tuned._iterator  # noqa: SLF001

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets attributes on this object; the loader that is iterated needs the same values.
        if name not in self.OWN and self._tuned is not self.loader:
            setattr(self._tuned, name, value)
        super().__setattr__(name, value)


class StatefulPrefetchLoader(PrefetchLoader):
    """A `PrefetchLoader` for a stateful loader; `state_dict` is the state after the last batch handed out."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch handed out."""
        return self.loader.state_dict() if self._taken_state is None else self._taken_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state in the next iteration."""
        self.close()
        self._taken_state = None
        self.loader.load_state_dict(state_dict)
