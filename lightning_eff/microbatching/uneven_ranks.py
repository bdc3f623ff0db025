"""Ranks whose loaders return different numbers of batches: streams, WebDataset, shards of different sizes.

If the loaders' lengths are not known to be equal, the ranks agree before each batch which of them have one.
This costs an all-reduce of two numbers. A rank without a batch waits until no rank has one; then the epoch
ends on all ranks. While it waits, it runs neither `training_step` nor the hooks at the start of a batch, so
its random states, buffers and metrics do not change. It does take part with weight 0 in the gradient, in
optimizer steps and schedules, and in `on_train_batch_end` (with batch None), where checkpoints are saved. So
all ranks count the same batches and steps.

While any rank waits, DDP's own collectives are off, and the gradients are averaged after the backward pass. A
forward pass that communicates (sharded weights, synchronized batch norms, gathered embeddings) would wait
forever for the ranks without data, so it is rejected.

`lightning_loop.install` installs this class on several ranks. The private names of Lightning
(`_evaluation_step`, `_logger_connector`, a logged value's `meta.sync`, ...) are from 2.6.6; DDP's
`reducer._rebuild_buckets` is from torch 2.13.
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
"""State of a rank's data: it has a batch that is not its last, its last batch, or no batch."""
FAILED = -1
OTHER_FAILED = "another rank was rejected in a batch that this one does not have"


class UnevenRanks:
    """Lets every rank train on all of its batches.

    Args:
        trainer: Runs on several ranks.
    """

    is_on = False
    """Whether the training loaders of the ranks may differ in length."""
    is_idle = False
    """Whether this rank has no current batch, but another rank has."""
    has_idle = False
    """Whether any rank has no current batch."""
    done = False
    """Whether the current batch is the last on all ranks; Lightning reads this attribute of a fetcher."""
    is_validating_alone = False
    """Whether other ranks have already finished the validation loader that this rank is in."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.num_batches = 0  # batches that at least one rank did not have
        self._num_own = 0  # this rank's batches in the current epoch
        self._is_any_silent = False  # whether some rank had no batch in this epoch, and so logged nothing

    @property
    def did(self) -> str:
        """Return the report's text on uneven batches; empty if there were none."""
        count = self.num_batches
        plural = "es" * (count != 1)
        return f"{count} batch{plural} that not every rank had, counted by samples" if count else ""

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """Return the methods of Lightning's loops to replace: loop, method name, replacement."""
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
        """Replace the methods of Lightning's loops."""
        for loop, name, replacement in self._replacements():
            setattr(loop, name, replacement)

    def uninstall(self) -> None:
        """Restore the methods; a second call has no effect."""
        for loop, name, _ in self._replacements():
            vars(loop).pop(name, None)

    def _setup_lengths(self) -> None:
        """Set up the loaders, and set the epoch's length to the longest rank's.

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
        # Infinity stands for unknown: it differs from every length, so ranks then agree batch by batch.
        known = length if is_known else math.inf
        (shortest, _), (longest, max_batches) = self.agree(known, length)
        self.is_on = shortest != longest or longest == math.inf
        if max_batches == length:
            return
        # With its own, shorter length a rank would end its epoch before the others.
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
        """Agree with the other ranks, then return this rank's next batch, as Lightning's fetchers do.

        Raises:
            StopIteration: No rank has a batch.
            _NoBatch: This rank has no batch, but another rank has.
            ConfigError: Some rank has no batch, and the strategy does not support waiting.
        """
        batch = next(self._fetcher, None)
        # The states are ordered: the minimum over ranks says whether any rank has more, the maximum whether
        # any is over.
        state = IS_OVER if batch is None else HAS_LAST if self._fetcher.done else HAS_MORE
        (first,), (last,) = self.agree(state)
        # No rank has a batch after this one.
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
            # Lightning's loop expects a batch here; `_advance_together` catches this and runs an idle batch.
            raise _NoBatch
        return batch

    def _advance_idle(self) -> None:
        """Run the bookkeeping of Lightning's loop for a batch that this rank does not have."""
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
        """Create empty logged values on ranks that logged nothing in this epoch.

        At the end of an epoch, each logged value is reduced over the ranks by a collective. A rank that does
        not have the value would not take part, and the others would wait.
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
        # JSON in a byte tensor: `gather_all_tensors` accepts tensors of a different length on each rank.
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
        """If the loaders' lengths may differ, make ranks wait for each other at the end of each loader."""
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
        """Reject strategies whose forward passes communicate, when the first rank runs out of batches.

        All ranks call this together.
        """
        model = self._trainer.strategy.model
        if stage == "val" and not num_batches:
            raise ConfigError("val_dataloaders", 0, allowed="at least one batch of each on every rank")
        if isinstance(model, DistributedDataParallel):
            # DDP rebuilds its buckets in its second forward pass, with a broadcast. A waiting rank runs no
            # forward pass, so do it now, while all ranks are here.
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
        """Context for a forward pass in which the ranks without data take no part.

        Values logged by step with `sync_dist` are then this rank's alone.
        """
        model, own_value = cast(Any, self._trainer.strategy.model), staticmethod(_Sync.no_op)
        with patch.object(_Sync, "__call__", own_value), without_collectives(model), _RejectsCollectives():
            yield

    @contextmanager
    def together(self) -> Generator[None]:
        """Context that all ranks enter: if one rank rejects its batch, the waiting ranks stop as well."""
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
        """Return the minimum and the maximum of each number over the ranks. A collective."""
        if not dist.is_initialized():
            return [*own], [*own]
        # max(x) = -min(-x), so one all-reduce returns both.
        both = torch.tensor([*own, *(-number for number in own)], dtype=torch.float64)
        both = both.to(self._trainer.strategy.root_device)
        dist.all_reduce(both, op=dist.ReduceOp.MIN)
        numbers = both.tolist()
        return numbers[: len(own)], [-number for number in numbers[len(own) :]]


class _NoBatch(Exception):  # noqa: N818
    """This rank has no batch, but another rank has."""


class _AgreedValidation(LoaderWrapper):
    """A data fetcher that waits at the end of each loader until all ranks have reached it."""

    OWN = ("loader", "ranks", "pending", "current", "num_given")

    def __init__(self, fetcher: Any, ranks: UnevenRanks) -> None:
        super().__init__(fetcher)
        self.ranks = ranks
        self.pending: Any = None
        self.current = 0.0  # index of the loader that the ranks are in
        self.num_given = 0  # batches of this loader so far

    def __next__(self) -> Any:
        over = None, None, math.inf
        self.pending = next(self.loader, over) if self.pending is None else self.pending
        *_, own = self.pending  # index of the loader of this rank's next batch; infinity after the last one
        # Ranks go through the loaders in order. Those that are ahead wait in this loop until the slowest rank
        # (`first`) reaches their loader.
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
            self.num_given += 1  # also counts rounds in which this rank waits
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
    """Return whether a loader's length is reliable: map-style data with samplers of torch or Lightning."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    # Not `type()`: a wrapped sampler reports the inner sampler's class as `__class__`.
    origins = {each.__class__.__module__.split(".")[0] for each in samplers if each is not None}
    is_indexed = not isinstance(getattr(loader, "dataset", None), (IterableDataset, type(None)))
    return is_indexed and origins <= {"torch", "lightning"} and sized_len(loader) is not None
