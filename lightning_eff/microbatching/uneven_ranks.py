"""Train on ranks whose loaders return different numbers of batches: streams, WebDataset, uneven shards.

If loaders may differ in length, an all-reduce of two numbers before each batch detects whether any rank has
data left. A rank that has no batch left computes its last batch again, with weight 0. When no rank has a
batch left, the epoch ends on all ranks. All ranks therefore run the same collectives under any strategy, and
count the same steps. Repeated batches do not change the gradient.

A repeated batch changes neither random states nor buffers. Values of a repeated batch are logged again;
Lightning also logs values of samples that its DistributedSampler repeats. Synchronized batch norms are
rejected, because the other ranks' statistics would include the repeated batch.

Why not torch's `Join`: `Join` supports only DDP, and must wrap the training loop, which belongs to Lightning.

`lightning_loop.install` installs `UnevenRanks` if a run has several ranks. Lightning's private names
(`_combined_loader`, `_evaluation_step`, ...) are from 2.6.6.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import (
    _DataLoaderIterDataFetcher,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset

from lightning_eff.core.dataloaders import LoaderWrapper
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.microbatching.oom_retry import take_buffers, without_collectives

HAS_MORE, HAS_LAST, IS_OVER = 0, 1, 2
"""State of a rank's data: several batches left, the last batch, or no batch left."""


class UnevenRanks:
    """Lets every rank train on all its batches; replaces Lightning's data fetcher.

    Args:
        trainer: The Trainer, which runs on several ranks.
    """

    is_on = False
    """Whether the training loaders of the ranks may differ in length."""
    is_idle = False
    """Whether this rank has no batch left and repeats its last batch, while another rank has data."""
    has_idle = False
    """Whether any rank repeats a batch."""
    done = False
    """Whether the current batch is the last on all ranks; Lightning reads this attribute of a fetcher."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._last: Any = None  # this rank's last batch, as a fetcher returns it
        self.num_batches = 0  # number of times that at least one rank repeated a batch

    @property
    def did(self) -> str:
        """Return the report's text about batches that not every rank had; empty without such batches."""
        count = self.num_batches
        plural = "es" * (count != 1)
        return f"{count} batch{plural} that not every rank had, counted by samples" if count else ""

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """Return the replaced methods of Lightning's loops, each as loop, method name and new method."""
        fit_loop: Any = self._trainer.fit_loop
        return [
            (fit_loop, "setup_data", self._setup_lengths),
            (fit_loop.epoch_loop, "advance", self._advance),
            (fit_loop.epoch_loop.val_loop, "on_run_start", self._begin_validation),
            (fit_loop.epoch_loop.val_loop, "_evaluation_step", self._evaluate),
        ]

    def install(self) -> None:
        """Replace the methods of Lightning's loops."""
        for loop, name, replacement in self._replacements():
            setattr(loop, name, replacement)

    def uninstall(self) -> None:
        """Restore the methods of Lightning's loops; a second call has no effect."""
        for loop, name, _ in self._replacements():
            vars(loop).pop(name, None)
        self._last = None

    def _setup_lengths(self) -> None:
        """Set up the loaders, and set the epoch's length to the largest length of any rank.

        Schedules and validation intervals depend on this length.
        """
        fit_loop: Any = self._trainer.fit_loop
        before = fit_loop._combined_loader  # noqa: SLF001
        type(fit_loop).setup_data(fit_loop)
        loader = fit_loop._combined_loader  # noqa: SLF001
        if loader is None or loader is before:
            return
        is_known = all(has_known_length(each) for each in loader.flattened)
        length = float(fit_loop.max_batches)
        # Infinity stands for an unknown length. If any length is unknown, the ranks agree before each batch.
        known = length if is_known else math.inf
        (shortest, _), (longest, max_batches) = self._agree(known, length)
        self.is_on = shortest != longest or longest == math.inf
        self.has_idle = self.is_idle = False
        if max_batches == length:
            return
        # A rank with a shorter length would end its epoch before the other ranks.
        fit_loop.max_batches = int(max_batches) if math.isfinite(max_batches) else math.inf
        trainer: Any = self._trainer
        # Lightning has computed the validation interval from the rank's own length.
        interval = trainer.val_check_interval
        if isinstance(interval, float) and trainer.val_check_batch not in (None, math.inf):
            trainer.val_check_batch = max(1, int(fit_loop.max_batches * interval))

    def _advance(self, fetcher: Any) -> None:
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        is_asked = self.is_on and not isinstance(fetcher, _DataLoaderIterDataFetcher)
        self._fetcher = fetcher
        type(epoch_loop).advance(epoch_loop, self if is_asked else fetcher)

    def __next__(self) -> Any:
        """Return this rank's next batch, as Lightning's fetchers do, or repeat the rank's last batch.

        Raises:
            StopIteration: No rank has a batch left.
            ConfigError: A rank has never had a batch.
            ConflictError: A rank has no batch left, and the model has synchronized batch norms.
        """
        batch: Any = next(self._fetcher, None)
        state = IS_OVER if batch is None else HAS_LAST if self._fetcher.done else HAS_MORE
        if batch is not None and batch[0] is not None:  # a loader may return None, which Lightning skips
            self._last = batch
        # The smallest state means the most data left, and the largest state the least.
        (first,), (last,) = self._agree(state)
        if first == IS_OVER:
            raise StopIteration
        self.done, self.has_idle, self.is_idle = first == HAS_LAST, last == IS_OVER, state == IS_OVER
        if self.has_idle:
            self.num_batches += 1
            self._last = self._last or self._first_batch()
            (is_each_filled,), _ = self._agree(self._last is not None)
            if not is_each_filled:
                raise ConfigError("train_dataloader", 0, allowed="at least one batch on every rank")
            if any(isinstance(each, nn.SyncBatchNorm) for each in self._trainer.lightning_module.modules()):
                raise ConflictError(
                    "synchronized batch norms would count the batch that a rank without data repeats\n"
                    "  try: as many batches on each rank (limit_train_batches)"
                )
        return self._last if self.is_idle else batch

    def _first_batch(self) -> Any:
        """Return the first batch, for a run that resumed at the end of its loader; None if it has no data."""
        fit_loop: Any = self._trainer.fit_loop
        loaders = fit_loop._combined_loader.iterables  # noqa: SLF001
        # Iterate over the loaders inside our wrappers, because the wrappers would count the batch.
        with isolate_rng():
            return next(iter(CombinedLoader(tree_map(_unwrapped, loaders), "max_size_cycle")), None)

    @contextmanager
    def without_trace(self) -> Generator[None]:
        """Return a context that undoes a repeated forward pass's changes to random states and buffers."""
        before = [(each, each.clone()) for each in self._trainer.lightning_module.buffers()]
        with isolate_rng():
            yield
        for buffer, value in before:
            if not torch.equal(buffer, value):  # a write to an unchanged buffer would break recomputation
                buffer.data.copy_(value)

    def _begin_validation(self) -> None:
        validation: Any = self._trainer.fit_loop.epoch_loop.val_loop
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # Broadcast once, not in each forward pass, because ranks may run different numbers of passes.
            take_buffers(model)
        type(validation).on_run_start(validation)

    def _evaluate(self, *args: Any) -> None:
        """Evaluate a batch without communication, because other ranks may have no batch left."""
        validation: Any = self._trainer.fit_loop.epoch_loop.val_loop
        model = self._trainer.strategy.model
        is_ddp = isinstance(model, DistributedDataParallel)
        with without_collectives(model) if is_ddp else nullcontext():
            type(validation)._evaluation_step(validation, *args)  # noqa: SLF001

    def _agree(self, *own: float) -> tuple[list[float], list[float]]:
        """Return the minimum and maximum of each number over the ranks; all ranks must call this method."""
        if not dist.is_initialized():
            return [*own], [*own]
        # max(x) = -min(-x), so one all-reduce computes minimum and maximum.
        both = torch.tensor([*own, *(-number for number in own)], dtype=torch.float64)
        both = both.to(self._trainer.strategy.root_device)
        dist.all_reduce(both, op=dist.ReduceOp.MIN)
        numbers = both.tolist()
        return numbers[: len(own)], [-number for number in numbers[len(own) :]]


def _unwrapped(loader: Any) -> Any:
    while isinstance(loader, LoaderWrapper):
        loader = loader.loader
    return loader


def has_known_length(loader: Any) -> bool:
    """Return whether a loader's length is reliable: map-style data, and samplers of torch or Lightning."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    # `__class__`, not `type()`: our wrapper of a sampler has the inner sampler's class as its `__class__`.
    origins = {each.__class__.__module__.split(".")[0] for each in samplers if each is not None}
    is_indexed = not isinstance(getattr(loader, "dataset", None), (IterableDataset, type(None)))
    return is_indexed and origins <= {"torch", "lightning"} and sized_len(loader) is not None
