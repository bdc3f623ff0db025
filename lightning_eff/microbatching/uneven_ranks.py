"""Ranks whose loaders give different numbers of batches: streams, WebDataset, shards of different sizes.

Where the lengths of the loaders are not known to be equal, the ranks agree before each batch which of them
have one: an all-reduce of two numbers. A rank without a batch waits until the last one has none, and the
epoch ends on all of them together. While it waits it runs neither `training_step` nor hooks of the batch's
start, so its random states, buffers and metrics stay as they are. It does take part in the gradient, with
weight 0, in optimizer steps and schedules, and in `on_train_batch_end` (with the batch None), where
checkpoints are saved: all ranks count the same batches and steps.

In such batches DDP's own collectives are off, and the gradients are averaged after the backward pass. A
forward pass that communicates (sharded weights, synchronized batch norms, gathered embeddings) would wait
for the ranks without data forever: it is rejected.

Private names of Lightning (`_evaluation_step`, `_logger_connector`, a logged value's `meta.sync`, ...) are
those of 2.6.6; DDP's `reducer._rebuild_buckets` is that of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, cast
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import (
    _DataLoaderIterDataFetcher,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.trainer.call import (
    _call_callback_hooks,  # pyright: ignore[reportPrivateUsage]
    _call_lightning_module_hook,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,  # pyright: ignore[reportPrivateUsage]
    _ResultMetric,  # pyright: ignore[reportPrivateUsage]
    _Sync,  # pyright: ignore[reportPrivateUsage]
)
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import IterableDataset
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_eff.core.dataloaders import LoaderWrapper
from lightning_eff.core.errors import TO_DDP, ConfigError, ConflictError, Remedy
from lightning_eff.microbatching.oom_retry import without_collectives

HAS_MORE, HAS_LAST, IS_OVER = 0, 1, 2
"""What a rank knows of its data: it has a batch and another one, its last batch, or none."""
FAILED = -1
OTHER_FAILED = "another rank was rejected in a batch that this one does not have"


class UnevenRanks:
    """Lets ranks train on what each of them has.

    Args:
        trainer: Runs on several ranks.
    """

    is_on = False
    """Whether the training loaders of the ranks may differ in length."""
    is_idle = False
    """Whether this rank has no batch at the moment, while another one has."""
    has_idle = False
    """Whether any rank has none."""
    done = False
    """Whether no rank has another batch after the current one, as Lightning asks a fetcher."""
    is_validating_alone = False
    """Whether some ranks have reached the end of the validation loader that this one is in."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.num_batches = 0  # trained on while some rank had none
        self._num_own = 0  # this rank's of the current epoch
        self._is_any_silent = False  # whether a rank has had none in this epoch, and logged nothing

    @property
    def did(self) -> str:
        """Return what was trained on unevenly; empty for nothing."""
        count = self.num_batches
        plural = "es" * (count != 1)
        return f"{count} batch{plural} that not every rank had, counted by samples" if count else ""

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """Return the methods of Lightning's loops that ask here for batches, and what takes their place."""
        fit_loop: Any = self._trainer.fit_loop
        validation = fit_loop.epoch_loop.val_loop
        return [
            (fit_loop, "setup_data", self._setup_lengths),
            (fit_loop, "on_advance_end", self._end_epoch),
            (fit_loop.epoch_loop, "advance", self._advance_together),
            (validation, "on_run_start", self._begin_validation),
            (validation, "_evaluation_step", self._evaluate),
        ]

    def install(self) -> None:
        """Let Lightning's loops ask here for batches."""
        for loop, name, replacement in self._replacements():
            setattr(loop, name, replacement)

    def uninstall(self) -> None:
        """Undo it; a second call has no effect."""
        for loop, name, _ in self._replacements():
            vars(loop).pop(name, None)

    def _setup_lengths(self) -> None:
        """Make the loaders, and count with the longest rank's: schedules and validation depend on it."""
        fit_loop: Any = self._trainer.fit_loop
        before = fit_loop._combined_loader  # noqa: SLF001
        type(fit_loop).setup_data(fit_loop)
        loader = fit_loop._combined_loader  # noqa: SLF001
        if loader is None or loader is before:
            return
        is_known = all(has_known_length(each) for each in loader.flattened)
        length = float(fit_loop.max_batches)
        known = length if is_known else math.inf
        (shortest, _), (longest, max_batches) = self.agree(known, length)
        self.is_on = shortest != longest or longest == math.inf
        if max_batches == length:
            return
        fit_loop.max_batches = int(max_batches) if math.isfinite(max_batches) else math.inf
        trainer: Any = self._trainer
        interval = trainer.val_check_interval
        if isinstance(interval, float) and trainer.val_check_batch not in (None, math.inf):
            trainer.val_check_batch = max(1, int(fit_loop.max_batches * interval))

    def _advance_together(self, fetcher: Any) -> None:
        self._epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        is_asked = self.is_on and not isinstance(fetcher, _DataLoaderIterDataFetcher)
        self._fetcher = fetcher
        try:
            type(self._epoch_loop).advance(self._epoch_loop, self if is_asked else fetcher)
        except _NoBatch:
            self._advance_idle()
        finally:
            self.is_idle = False

    def __next__(self) -> Any:
        """Return this rank's next batch, as Lightning's fetchers do, when the ranks know who has one.

        Raises:
            StopIteration: No rank has one.
            _NoBatch: This rank has none.
            ConfigError: Some rank has none, and ranks of this strategy cannot wait.
        """
        batch = next(self._fetcher, None)
        state = IS_OVER if batch is None else HAS_LAST if self._fetcher.done else HAS_MORE
        (first,), (last,) = self.agree(state)
        self.done = first == HAS_LAST
        if first == IS_OVER:
            raise StopIteration
        if last == IS_OVER:
            if not self.has_idle:
                self.begin_waiting("train", self._epoch_loop.batch_progress.current.ready)
                (fewest,), _ = self.agree(self._num_own)
                self._is_any_silent = not fewest
            self.num_batches += 1
        self.has_idle, self.is_idle = last == IS_OVER, state == IS_OVER
        self._num_own += not self.is_idle
        if self.is_idle:
            raise _NoBatch
        return batch

    def _advance_idle(self) -> None:
        """Do what Lightning's loop does for a batch, but for the batch itself."""
        trainer, loop = self._trainer, self._epoch_loop
        logger_connector: Any = trainer._logger_connector  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        progress, batch_idx = loop.batch_progress, loop.batch_idx + 1
        progress.is_last_batch = self.done
        progress.increment_ready()
        logger_connector.on_batch_start(None)
        progress.increment_started()
        loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, OrderedDict(batch=None))
        progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():  # noqa: SLF001
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        _call_callback_hooks(trainer, "on_train_batch_end", None, None, batch_idx)
        _call_lightning_module_hook(trainer, "on_train_batch_end", None, None, batch_idx)
        logger_connector.on_batch_end()
        progress.increment_completed()
        logger_connector.update_train_step_metrics()

    def _end_epoch(self) -> None:
        if self._is_any_silent:
            self._share_logged()
        self._num_own, self.has_idle, self._is_any_silent = 0, False, False
        fit_loop: Any = self._trainer.fit_loop
        type(fit_loop).on_advance_end(fit_loop)

    def _share_logged(self) -> None:
        """Let ranks that logged nothing in this epoch take part in its values, as without samples.

        An epoch's values are reduced over the ranks one by one: those who have none would be left out.
        """
        trainer: Any = self._trainer
        results, device = trainer._results, trainer.strategy.root_device  # noqa: SLF001
        own = {key: value for key, value in results.items() if not value.has_reset}
        rows: list[Any] = []
        for key, value in own.items():
            fields = {each.name: getattr(value.meta, each.name) for each in dataclasses.fields(value.meta)}
            fields |= {"reduce_fx": value.meta.reduce_fx.__name__, "_sync": None}
            dtype = str(value.value.dtype).removeprefix("torch.") if value.is_tensor else ""
            rows.append((key, fields, value.meta.sync.should, dtype))
        written = torch.tensor([*json.dumps(rows).encode()], dtype=torch.uint8, device=device)
        of_ranks = [json.loads(bytes(each.tolist())) for each in gather_all_tensors(written)]
        for key, fields, is_synced, dtype in () if own else max(of_ranks, key=len):
            meta: Any = _Metadata(**fields)
            meta.sync = _Sync(_should=is_synced, fn=trainer.strategy.reduce)
            logged: Any = _ResultMetric(meta, is_tensor=bool(dtype))
            results[key] = logged.to(device)
            logged._update_count = 1  # noqa: SLF001 - else computing it warns
            if dtype:
                logged.value = logged.value.to(getattr(torch, dtype))
            else:
                logged.value = attrgetter(meta.metric_attribute)(trainer.lightning_module)

    def _begin_validation(self) -> None:
        """Let ranks wait for each other at the end of each validation loader, if lengths may differ."""
        validation: Any = self._trainer.fit_loop.epoch_loop.val_loop
        type(validation).on_run_start(validation)
        fetcher, loaders = validation._data_fetcher, validation._combined_loader.flattened  # noqa: SLF001
        self.is_validating_alone = False
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            return
        lengths = [
            float(limit) if has_known_length(loader) else math.inf
            for limit, loader in zip(validation.max_batches, loaders, strict=True)
        ]
        shortest, longest = self.agree(*lengths)
        if shortest != longest or math.inf in longest:
            validation._data_fetcher = _AgreedValidation(fetcher, self)  # noqa: SLF001

    def _evaluate(self, *args: Any) -> None:
        validation: Any = self._trainer.fit_loop.epoch_loop.val_loop
        try:
            with self.alone() if self.is_validating_alone else nullcontext():
                type(validation)._evaluation_step(validation, *args)  # noqa: SLF001
        except ConflictError:
            if self.is_validating_alone:
                self.agree(FAILED)
            raise

    def begin_waiting(self, stage: str, num_batches: int) -> None:
        """Reject strategies whose forward passes communicate, when a first rank has no batch left.

        All ranks call it.
        """
        model = self._trainer.strategy.model
        if stage == "val" and not num_batches:
            raise ConfigError("val_dataloaders", 0, allowed="at least one batch of each on every rank")
        if isinstance(model, DistributedDataParallel):
            # DDP does it in its second forward pass, with a broadcast.
            model.reducer._rebuild_buckets()  # noqa: SLF001
            if stage == "train" and not self.num_batches:
                rank_zero_info(f"a rank has only {num_batches} batches, and waits for the others")
            return
        limit = f"limit_{stage}_batches={num_batches}"
        raise ConfigError(
            key="strategy",
            value=type(self._trainer.strategy).__name__,
            allowed=f"ddp, or as many batches on each rank: one has only {num_batches} ({stage})",
            remedies=[TO_DDP, *([Remedy(f"trainer.{limit}", f"Trainer({limit})")] if num_batches else [])],
        )

    @contextmanager
    def alone(self) -> Generator[None]:
        """Run a forward pass that the ranks without data take no part in.

        Values that are logged by step with `sync_dist` are then those of this rank.
        """
        model, own_value = cast(Any, self._trainer.strategy.model), staticmethod(_Sync.no_op)
        with patch.object(_Sync, "__call__", own_value), without_collectives(model), _RejectsCollectives():
            yield

    @contextmanager
    def together(self) -> Generator[None]:
        """Let the rejection of a batch end those ranks too that wait for it; all ranks enter it."""
        if not self.has_idle:
            yield
            return
        error = None
        try:
            yield
        except ConflictError as caught:
            error = caught
        (first,), _ = self.agree(FAILED if error is not None else HAS_MORE)
        if first == FAILED:
            raise error or ConflictError(OTHER_FAILED)

    def agree(self, *own: float) -> tuple[list[float], list[float]]:
        """Return the smallest and the largest of each number over the ranks; all of them call it."""
        if not dist.is_initialized():
            return [*own], [*own]
        # The largest is the smallest of the negative numbers.
        both = torch.tensor([*own, *(-number for number in own)], dtype=torch.float64)
        both = both.to(self._trainer.strategy.root_device)
        dist.all_reduce(both, op=dist.ReduceOp.MIN)
        numbers = both.tolist()
        return numbers[: len(own)], [-number for number in numbers[len(own) :]]


class _NoBatch(Exception):  # noqa: N818
    """This rank has no batch, while another one has."""


class _AgreedValidation(LoaderWrapper):
    """A data fetcher that waits at the end of each loader until all ranks are there."""

    OWN = ("loader", "ranks", "pending", "current", "num_given")

    def __init__(self, fetcher: Any, ranks: UnevenRanks) -> None:
        super().__init__(fetcher)
        self.ranks = ranks
        self.pending: Any = None
        self.current = 0.0  # the index of the loader that the ranks are in
        self.num_given = 0  # its batches so far

    def __next__(self) -> Any:
        over = None, None, math.inf
        self.pending = next(self.loader, over) if self.pending is None else self.pending
        *_, own = self.pending  # the index of the loader that this rank's next batch is of
        first = -1.0
        while first != own:
            (first,), (last,) = self.ranks.agree(own)
            if first == FAILED:
                raise ConflictError(OTHER_FAILED)
            self.num_given *= first == self.current
            self.current = first
            if first != last:
                self.ranks.begin_waiting("val", self.num_given)
            self.ranks.is_validating_alone = first != last
            self.num_given += 1  # rounds, in which a rank that waits has none
        batch, self.pending = self.pending, None
        if own == math.inf:
            raise StopIteration
        return batch


class _RejectsCollectives(TorchDispatchMode):
    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise ConflictError(
                f"the forward pass waits for other ranks ({func.__name__}), and some have no batch left\n"
                "  try: as many batches on each rank (limit_train_batches, limit_val_batches)\n"
                "  try: no synchronized batch norms, and no collectives in training_step or validation_step"
            )
        return func(*args, **(kwargs or {}))


def has_known_length(loader: Any) -> bool:
    """Return whether a loader gives as many batches as its length says: its indices are torch's samplers'."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    # `__class__`: a wrapped sampler shows the class of the one inside.
    origins = {each.__class__.__module__.split(".")[0] for each in samplers if each is not None}
    is_indexed = not isinstance(getattr(loader, "dataset", None), (IterableDataset, type(None)))
    return is_indexed and origins <= {"torch", "lightning"} and sized_len(loader) is not None
