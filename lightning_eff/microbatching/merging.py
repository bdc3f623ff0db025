"""Merge what the micro-batches of a batch returned and logged into what the full batch would have.

`training_step` returns outputs next to the loss: `merge_outputs` concatenates or averages them. Lightning
accumulates what is logged over an epoch by the number of samples, which it takes from the current batch:
micro_batch_runner.py sets it to each micro-batch. What is logged by step would be the last micro-batch's;
`merge_logged` makes it the mean over the micro-batches, or sum, minimum or maximum, as `reduce_fx` says. With
weights, means are by weight. A torchmetrics metric that is logged by step is computed over all micro-batches.

The private names of Lightning's result collection (`_forward_cache`, `cumulated_batch_size`, `meta`) are
those of 2.6.6, and used here only.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_eff.core.arguments import accepts
from lightning_eff.core.errors import ConflictError
from lightning_eff.microbatching.splitting import MicroBatchPart


def merge_outputs(outputs: Sequence[Mapping[str, Any]], parts: Sequence[MicroBatchPart]) -> dict[str, Any]:
    """Merge what `training_step` returned next to the loss.

    Tensors and lists with one row per sample are concatenated, other numbers averaged by samples (`weight` is
    summed); of anything else the last micro-batch's is returned.

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
        if key == "weight" and None not in values:
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
    metrics: BatchMetrics,
    *,
    is_weighted: bool,
) -> None:
    """Set what micro-batches have logged to what the full batch would have.

    Args:
        results: Lightning's collection.
        states: What was logged before the first micro-batch, and after each.
        weights: Weight or samples of each micro-batch.
        metrics: Has observed the micro-batches.
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
            metric._forward_cache = metrics.value(metric.value, metric._forward_cache)  # noqa: SLF001
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
            text = (
                f"callbacks/micro_batch with self.log({metric.meta.name!r}, on_step=True, sync_dist=True) on "
                "several ranks: a rank that runs out of memory logs more often than the others\n"
                "  try: on_step=False, on_epoch=True\n  try: callbacks.micro_batch.micro_batch_size=8"
            )
            raise ConflictError(text)


class BatchMetrics:
    """Computes a module's torchmetrics over all micro-batches of one batch.

    `metric(...)` returns the value of its micro-batch, and Lightning logs that by step. So copies of the
    metric are updated with the micro-batches of the current batch only: one copy for the first call in each
    micro-batch, one for the second and so on. Only calls are observed: after `metric.update(...)` Lightning
    has nothing to log by step.

    Args:
        module: Has the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics: list[Metric] = []
        # Keys are identity and number of the call: a metric's hash changes with its state.
        self._copies: dict[tuple[int, int], Metric] = {}
        self._returned: dict[tuple[int, int], Any] = {}

    def begin(self) -> None:
        """Start a batch, or start it again."""
        self._metrics = [module for module in self._module.modules() if isinstance(module, Metric)]
        for metric in self._copies.values():
            metric.reset()

    @contextmanager
    def observe(self) -> Generator[None]:
        """Update the copies with the arguments of the metrics' calls in one micro-batch."""
        calls = Counter[int]()
        self._returned.clear()

        def update(metric: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            call = id(metric), calls[id(metric)]
            calls[id(metric)] += 1
            if call not in self._copies:
                # Copied without its state, parts of which may hold the graph of a loss.
                states = [leaf for module in metric.modules() for leaf in tree_leaves(dict(vars(module)))]
                tensors = [state for state in states if isinstance(state, Tensor) and not state.is_leaf]
                result: Any = copy.deepcopy(metric, {id(tensor): tensor.detach() for tensor in tensors})
                result.reset()
                for module in result.modules():
                    if isinstance(module, Metric) and not module.dist_sync_on_step:
                        module.distributed_available_fn = None  # as in `forward`, this rank's own value
                self._copies[call] = result
            args, keywords = apply_to_collection((args, keywords), Tensor, Tensor.detach)
            self._copies[call].update(*args, **keywords)
            self._returned[call] = output

        with ExitStack() as stack:
            for metric in self._metrics:
                stack.callback(metric.register_forward_hook(update, with_kwargs=True).remove)
            yield

    def value(self, metric: Any, last_value: Any) -> Any:
        """Return a metric's value over the batch, for what the same call returned in the last micro-batch."""
        for call, returned in self._returned.items():
            if call[0] == id(metric) and returned is last_value:
                return self._copies[call].compute()
        return last_value
