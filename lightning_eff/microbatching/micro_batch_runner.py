"""Run a Trainer's batches in micro-batches; `ExactStep` calls this module when a batch is split.

oom_retry.py splits batches and retries steps. This module connects oom_retry.py to Lightning's strategy and
optimizer. This module also merges the outputs and logged values of the micro-batches of one batch:

- Outputs of `training_step` other than the loss are concatenated or averaged.
- Values logged over an epoch: Lightning weights each value by the number of samples in the current batch.
  While a micro-batch runs, it is therefore set as Lightning's current batch.
- Values logged per step: Lightning would keep the last micro-batch's value. This module replaces that value
  by the mean, sum, minimum or maximum over the micro-batches, according to `reduce_fx`. A mean is weighted if
  `training_step` returns weights.
- Torchmetrics metrics logged per step are also replaced by the mean of the micro-batches' values. For
  accuracy, this mean equals the full batch's value; for an F1 score it does not. Over an epoch, every metric
  is computed from all samples.

These private names are from Lightning 2.6.6: `_results`, `_block_parallel_sync_behavior`, and the attributes
`_forward_cache`, `cumulated_batch_size` and `meta` of a logged value.
"""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.utilities import (
    _block_parallel_sync_behavior,  # pyright: ignore[reportPrivateUsage]
)
from torch import Tensor

from lightning_eff.core.arguments import accepts
from lightning_eff.core.errors import ConflictError, ConflictWarning
from lightning_eff.microbatching.mean_check import buffer_versions, changed_buffers
from lightning_eff.microbatching.oom_retry import FIXED_SIZE, MicroBatchSize, OomRetry
from lightning_eff.microbatching.snapshot import StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart, mean
from lightning_eff.microbatching.window import Window, weight_of

MAX_NAMES = 12
"""Maximum number of names in a warning."""
Arguments = OrderedDict[str, Any]
"""The arguments of `training_step`, by name."""


@dataclass
class StepFunctions:
    """The functions of Lightning's loop that run one batch of a step."""

    # Calls `training_step` and returns the scaled loss; takes the arguments, the micro-batch, and the number
    # of samples in the full batch.
    forward: Callable[[Arguments, MicroBatchPart, int | None], ClosureResult]
    zero_grad: Callable[[], None] | None  # None if this batch adds to existing gradients
    backward: Callable[[Tensor], None] | None  # None without a backward pass
    check_mean: Callable[[Arguments], None]  # called before a batch is split
    position: int  # position of the batch in its step, from 0
    is_last: bool  # whether the optimizer steps after this batch


@dataclass(frozen=True)
class LoggedValue:
    """The values logged so far under one key of `self.log`."""

    by_step: Any  # the last value logged per step
    total: Any  # sum over the epoch of value * samples; None for a metric
    num_samples: Any  # number of samples in `total`


LoggedValues = Mapping[str, LoggedValue]
NOTHING_LOGGED = LoggedValue(None, total=0.0, num_samples=0)
PartResult = tuple[ClosureResult, LoggedValues, LoggedValues]
"""The output of a micro-batch, and the logged values before and after this micro-batch."""


class MicroBatchRunner:
    """Runs the batches of one `fit` in micro-batches.

    Args:
        trainer: The Trainer, whose strategy holds the model.
        micro_batch_size: The current micro-batch size, and the rules that choose it.
        window: The window, which scales the losses of a step.
    """

    def __init__(self, trainer: pl.Trainer, micro_batch_size: MicroBatchSize, window: Window) -> None:
        self._trainer = trainer
        self._named: set[str] = set()  # state that a warning has named
        self._is_compared = False  # whether a micro-batch's changes to buffers are known
        # Lightning's collection of the values logged in this epoch.
        self._results: Any = trainer._results  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        strategy: Any = trainer.strategy
        device = strategy.root_device
        snapshot = StepSnapshot(trainer.lightning_module, device, self._results)
        self.retry = OomRetry(micro_batch_size, window, snapshot, strategy.model, device)

    def find_size(self, arguments: Arguments, forward: Callable[[Arguments], Tensor | None]) -> None:
        """Find the largest micro-batch size that fits in memory, and set this size."""

        def run_part(part: MicroBatchPart) -> None:
            self._results.batch, self._results.batch_size = part.batch, part.num_samples
            loss = forward(OrderedDict(arguments, batch=part.batch))
            if loss is not None:
                self._trainer.lightning_module.backward(loss)

        self.retry.find(arguments["batch"], run_part, self._trainer.optimizers[0])

    def run(self, arguments: Arguments, functions: StepFunctions) -> ClosureResult:
        """Run one batch in micro-batches; return and log the full batch's values."""
        batch = arguments["batch"]
        outputs = self.retry.run(batch, partial(self._run_part, arguments, functions), functions.position)
        # With a batch size of None, Lightning counts the samples of the full batch itself.
        self._results.batch, self._results.batch_size = batch, None
        if len(outputs) == 1:
            (_, (result, *_)), *_ = outputs
            result.closure_loss = result.loss  # Lightning reads None as a skipped step
            return result
        kept: list[tuple[MicroBatchPart, PartResult]]
        # `training_step` may skip micro-batches by returning None.
        kept = [(part, output) for part, output in outputs if output[0].loss is not None]
        if not kept:
            return ClosureResult(None)
        parts = [part for part, _ in kept]
        results = [result for _, (result, *_) in kept]
        weights = [weight_of(result.extra) for result in results]
        is_weighted = None not in weights
        weights = weights if is_weighted else [part.num_samples for part in parts]
        # The logged values before the first micro-batch, then after each micro-batch.
        states = [kept[0][1][1], *(after for _, (*_, after) in kept)]
        merge_logged(self._results, states, weights, is_weighted=is_weighted)
        extra = merge_outputs([result.extra for result in results], parts)
        return ClosureResult(mean([result.loss for result in results], weights), extra=extra)

    def warn_of_changes(self, changed: set[str]) -> None:
        """Warn about state that changes once per micro-batch, once per name."""
        new = sorted(changed - self._named)
        self._named |= changed
        if new:
            some = ", ".join(new[:MAX_NAMES])
            text = f"MicroBatch: training_step changes {some}, which happens once per micro-batch now: "
            warnings.warn(f"{text}change them in on_train_batch_end", ConflictWarning, stacklevel=2)

    def _run_part(
        self,
        arguments: Arguments,
        functions: StepFunctions,
        part: MicroBatchPart,
        batch_samples: int | None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> PartResult:
        results = self._results
        results.batch, results.batch_size = part.batch, part.num_samples
        is_full_batch = is_first and is_last
        if is_first and not is_full_batch:
            functions.check_mean(arguments)
        before = {} if is_full_batch else logged_values(results)
        # The check of the loss runs in evaluation mode, so also compare buffers in training mode. Use the
        # second micro-batch, because DDP may broadcast buffers in the first, and because a number that is
        # only set, not counted, has the same value as after the first.
        is_compared = not (is_first or self._is_compared)
        module = self._trainer.lightning_module
        buffers = buffer_versions(module) if is_compared else {}
        numbers = vars(module).items() if is_compared else ()
        counters = {name: value for name, value in numbers if type(value) is int}
        # The strategy averages gradients over the ranks only in the last backward pass of a step.
        synchronize = is_last and functions.is_last
        is_blocked = not synchronize and self.retry.replica is None
        with _block_parallel_sync_behavior(self._trainer.strategy) if is_blocked else nullcontext():
            result = functions.forward(OrderedDict(arguments, batch=part.batch), part, batch_samples)
            if is_first and functions.zero_grad is not None:
                functions.zero_grad()
            if functions.backward is not None and result.closure_loss is not None:
                functions.backward(result.closure_loss)
        result.closure_loss = None  # frees the graph
        if is_compared:
            self._is_compared = True
            # The rule about batch norms reports their counters.
            changed = changed_buffers(module, buffers)
            changed |= {name for name, value in counters.items() if vars(module).get(name) != value}
            self.warn_of_changes({name for name in changed if not name.endswith("num_batches_tracked")})
        if self.retry.replica is not None:
            reject_step_sync(results)
        return result, before, {} if is_full_batch else logged_values(results)


def merge_outputs(outputs: Sequence[Mapping[str, Any]], parts: Sequence[MicroBatchPart]) -> dict[str, Any]:
    """Merge the outputs of `training_step` other than the loss.

    Tensors and lists with one row per sample are concatenated. Numbers are averaged, weighted by samples;
    `loss_weight` is summed. For other types, the last micro-batch's value is returned.

    Example:
        >>> parts = [MicroBatchPart(None, 3), MicroBatchPart(None, 1)]
        >>> outputs = [{"top": torch.tensor(1.0), "ids": [1, 2, 3]}, {"top": torch.tensor(5.0), "ids": [4]}]
        >>> merge_outputs(outputs, parts)
        {'top': tensor(2.), 'ids': [1, 2, 3, 4]}
    """
    if len(outputs) == 1:
        return dict(outputs[0])
    sizes = [part.num_samples for part in parts]
    merged: dict[str, Any] = {}
    for key, last in outputs[-1].items():
        values: list[Any] = [output.get(key) for output in outputs]
        kinds: set[Any] = set()  # (row shape, dtype, device) for a dense tensor, "list", or None
        for value in values:
            is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
            if is_dense and value.dim():
                kinds.add((value.shape[1:], value.dtype, value.device))
            else:
                kinds.add("list" if isinstance(value, list) else None)
        if key == "loss_weight" and None not in values:
            merged[key] = sum(values[1:], start=values[0])
        elif len(kinds) == 1 and None not in kinds and [len(value) for value in values] == sizes:
            is_list = isinstance(last, list)
            merged[key] = list(itertools.chain.from_iterable(values)) if is_list else torch.cat(values)
        else:
            scalars = [
                value.dim() == 0 if isinstance(value, Tensor) else accepts(float, value) for value in values
            ]
            merged[key] = mean(values, sizes) if all(scalars) else last
    return merged


def logged_values(results: Any) -> dict[str, LoggedValue]:
    """Return the values logged so far, by key."""
    return {
        key: LoggedValue(
            metric._forward_cache,  # noqa: SLF001
            metric.value if metric.is_tensor else None,
            getattr(metric, "cumulated_batch_size", None),
        )
        for key, metric in results.items()
    }


def merge_logged(
    results: Any,
    states: Sequence[LoggedValues],
    weights: Sequence[float | None],
    *,
    is_weighted: bool,
) -> None:
    """Replace the micro-batches' logged values by the full batch's values.

    Args:
        results: Lightning's collection of logged values.
        states: The logged values before the first micro-batch, and after each micro-batch.
        weights: The weight of each micro-batch; its number of samples if `training_step` returns no weights.
        is_weighted: Whether `training_step` returns weights; if so, means over the epoch are weighted too.
    """
    for key in states[-1]:
        metric = results[key]
        meta = metric.meta
        changes: list[tuple[LoggedValue, LoggedValue]] = []
        counts: list[float | None] = []
        for (before, after), weight in zip(itertools.pairwise(states), weights, strict=True):
            old, new = before.get(key, NOTHING_LOGGED), after.get(key)
            # Compare by identity, because a newly logged value may equal the old value.
            if new is not None and (new.by_step is not old.by_step or new.total is not old.total):
                changes.append((old, new))
                counts.append(weight)
        if len(changes) < 2:
            continue
        if not metric.is_tensor:
            values = [new.by_step for _, new in changes]
            if all(isinstance(value, Tensor) for value in values):  # a value is None after `metric.update`
                metric._forward_cache = mean(values, counts)  # noqa: SLF001
            continue
        if meta.on_step:
            metric._forward_cache = _reduced(meta, [new.by_step for _, new in changes], counts)  # noqa: SLF001
            if not meta.on_epoch:
                metric.value = metric._forward_cache  # noqa: SLF001 - as Lightning does
        if is_weighted and meta.on_epoch and meta.is_mean_reduction:
            # Lightning's sum over an epoch: total += value_i * samples_i for micro-batch i. Replace it by
            # total_before + (sum_i w_i value_i / sum_i w_i) * (samples of all micro-batches).
            values = [(new.total - old.total) / (new.num_samples - old.num_samples) for old, new in changes]
            first, _ = changes[0]
            num_samples = metric.cumulated_batch_size - first.num_samples
            metric.value = first.total + mean(values, counts) * num_samples


def _reduced(meta: Any, values: Sequence[Any], weights: Sequence[float | None]) -> Tensor:
    if meta.is_mean_reduction:
        return mean(values, weights)
    stacked = torch.stack(list(values))
    if meta.is_sum_reduction:
        return stacked.sum()
    return stacked.max() if meta.is_max_reduction else stacked.min()


def reject_step_sync(results: Any) -> None:
    """Reject values that Lightning averages over the ranks when they are logged.

    Raises:
        ConflictError: A value is averaged when it is logged. A rank that repeats a batch would average more
            often than the other ranks, and wait for them forever.
    """
    for metric in results.values():
        if metric.meta.on_step and metric.meta.sync.should:
            raise ConflictError(
                f"callbacks/micro_batch with self.log({metric.meta.name!r}, on_step=True, sync_dist=True) on "
                "several ranks: a rank that runs out of memory logs more often than the others\n"
                f"  try: on_step=False, on_epoch=True\n  try: {FIXED_SIZE}"
            )
