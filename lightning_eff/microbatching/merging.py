"""Merge what the micro-batches of a batch returned and logged into what the full batch would have.

`training_step` returns outputs next to the loss: `merge_outputs` concatenates or averages them. Lightning
accumulates what is logged over an epoch by the number of samples, which it takes from the current batch:
micro_batch_runner.py sets it to each micro-batch. What is logged by step would be the last micro-batch's;
`merge_logged` makes it the mean over the micro-batches, or sum, minimum or maximum, as `reduce_fx` says. With
weights, means are by weight. Of a torchmetrics metric that is logged by step it is the mean of the
micro-batches' values too, which equals the full batch's for an accuracy and not for an F1 score; over an
epoch, every metric is that of all samples.

The private names of Lightning's result collection (`_forward_cache`, `cumulated_batch_size`, `meta`) are
those of 2.6.6, and used here only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.core.arguments import accepts
from lightning_eff.core.errors import ConflictError
from lightning_eff.microbatching.micro_batch_size import FIXED_SIZE
from lightning_eff.microbatching.splitting import MicroBatchPart


def merge_outputs(outputs: Sequence[Mapping[str, Any]], parts: Sequence[MicroBatchPart]) -> dict[str, Any]:
    """Merge what `training_step` returned next to the loss.

    Tensors and lists with one row per sample are concatenated, other numbers averaged by samples
    (`loss_weight` is summed); of anything else the last micro-batch's is returned.

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
        kinds: set[Any] = set()  # what values with one row per sample have in common; None for others
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


def mean(values: Sequence[Any], weights: Sequence[float | None]) -> Any:
    """Return the mean of numbers by their samples or weights; an unknown one (None) counts 1."""
    known = [1.0 if weight is None else float(weight) for weight in weights]
    if len(values) == 1 or not any(known):
        return values[0]
    total = sum(known)
    # A mean over nothing is NaN, and so is NaN times 0: such values are left out.
    return sum(value * (weight / total) for value, weight in zip(values, known, strict=True) if weight)


@dataclass(frozen=True)
class LoggedValue:
    """What one key of `self.log` has collected so far."""

    by_step: Any  # the last value by step
    total: Any  # the sum over the epoch, of values times samples; None for a metric
    num_samples: Any  # the samples of that sum


LoggedValues = Mapping[str, LoggedValue]
NOTHING_LOGGED = LoggedValue(None, total=0.0, num_samples=0)


def logged_values(results: Any) -> dict[str, LoggedValue]:
    """Return what was logged so far."""
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
    """Set what micro-batches have logged to what the full batch would have.

    Args:
        results: Lightning's collection.
        states: What was logged before the first micro-batch, and after each.
        weights: Weight or samples of each micro-batch.
        is_weighted: Whether these are weights, by which an epoch's mean counts too.
    """
    for key in states[-1]:
        metric = results[key]
        meta = metric.meta
        changes: list[tuple[LoggedValue, LoggedValue]] = []
        counts: list[float | None] = []
        for (before, after), weight in zip(itertools.pairwise(states), weights, strict=True):
            old, new = before.get(key, NOTHING_LOGGED), after.get(key)
            if new is not None and (new.by_step is not old.by_step or new.total is not old.total):
                changes.append((old, new))
                counts.append(weight)
        if len(changes) < 2:
            continue
        if not metric.is_tensor:
            values = [new.by_step for _, new in changes]
            if all(isinstance(value, Tensor) for value in values):  # None after `metric.update(...)`
                metric._forward_cache = mean(values, counts)  # noqa: SLF001
            continue
        if meta.on_step:
            metric._forward_cache = _reduced(meta, [new.by_step for _, new in changes], counts)  # noqa: SLF001
            if not meta.on_epoch:
                metric.value = metric._forward_cache  # noqa: SLF001 - as Lightning does
        if is_weighted and meta.on_epoch and meta.is_mean_reduction:
            # Lightning's epoch sum: total += value_i * samples_i for each micro-batch i. Replaced by
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
    """Reject values that are averaged over the ranks while they are logged by step.

    Raises:
        ConflictError: There is one: a rank that computes a batch again would wait for the others forever.
    """
    for metric in results.values():
        if metric.meta.on_step and metric.meta.sync.should:
            raise ConflictError(
                f"callbacks/micro_batch with self.log({metric.meta.name!r}, on_step=True, sync_dist=True) on "
                "several ranks: a rank that runs out of memory logs more often than the others\n"
                f"  try: on_step=False, on_epoch=True\n  try: {FIXED_SIZE}"
            )
