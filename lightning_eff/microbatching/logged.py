"""What `self.log` makes of a batch that runs in parts: the same values as of the batch as a whole.

Lightning adds up what is logged over an epoch by the number of samples, which it takes from the batch: it is
shown each part. What is logged by step would be the last part's; it becomes the mean over the parts, or the
sum, the smallest, the largest, as `reduce_fx` says. Where parts have weights, means are by weight. A metric
of torchmetrics that is logged by step is computed from all parts of the batch.
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

from lightning_eff.core.errors import ConflictError
from lightning_eff.microbatching.splitting import Part, mean


@dataclass(frozen=True)
class Logged:
    """What one key has collected so far.

    Args:
        by_step: The last value by step.
        total: The sum over the epoch, of values times samples.
        samples: How many that were.
    """

    by_step: Any
    total: Any
    samples: Any


State = Mapping[str, Logged]
"""By key."""


def show(results: Any, part: Part) -> None:
    """Have what is logged from now on counted as of a micro-batch, or of a batch."""
    results.batch, results.batch_size = part.batch, part.num_samples


def state(results: Any) -> dict[str, Logged]:
    """Return what was logged, as it is now."""
    return {
        key: Logged(
            metric._forward_cache,  # noqa: SLF001
            metric.value if metric.is_tensor else None,
            getattr(metric, "cumulated_batch_size", None),
        )
        for key, metric in results.items()
    }


class BatchMetrics:
    """Computes a module's metrics over the parts of one batch.

    What `metric(...)` returns, and Lightning logs by step, is of the last part. A copy of the metric is
    updated with the parts of the batch at hand alone, one copy for the first call in each part, one for the
    second and so on. Only calls are observed, `metric.update(...)` gives Lightning nothing to log by step.

    Args:
        module: Has the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics: list[Metric] = []
        # By identity: a metric's hash changes with its state.
        self._copies: dict[tuple[int, int], Metric] = {}
        self._returned: dict[tuple[int, int], Any] = {}

    def begin(self) -> None:
        """Start a batch, or start it once more."""
        self._metrics = [each for each in self._module.modules() if isinstance(each, Metric)]
        for each in self._copies.values():
            each.reset()

    @contextmanager
    def observe(self) -> Generator[None]:
        """Update the copies with what the metrics are called with in one part."""
        calls = Counter[int]()
        self._returned.clear()

        def update(metric: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            call = id(metric), calls[id(metric)]
            calls[id(metric)] += 1
            if call not in self._copies:
                self._copies[call] = _reset_copy(metric)
            args, keywords = apply_to_collection((args, keywords), Tensor, Tensor.detach)
            self._copies[call].update(*args, **keywords)
            self._returned[call] = output

        with ExitStack() as stack:
            for each in self._metrics:
                stack.callback(each.register_forward_hook(update, with_kwargs=True).remove)
            yield

    def value(self, metric: Any, of_last_part: Any) -> Any:
        """Return a metric's value over the batch, by what the same call returned in the last part."""
        for call, returned in self._returned.items():
            if call[0] == id(metric) and returned is of_last_part:
                return self._copies[call].compute()
        return of_last_part


def _reset_copy(metric: Any) -> Metric:
    """Copy a metric without its state, of which some may carry the graph of a loss that was given to it."""
    states = [tensor for each in metric.modules() for tensor in tree_leaves(dict(vars(each)))]
    memo = {id(each): each.detach() for each in states if isinstance(each, Tensor) and not each.is_leaf}
    twin: Metric = copy.deepcopy(metric, memo)
    twin.reset()
    for each in twin.modules():
        if isinstance(each, Metric) and not each.dist_sync_on_step:
            each.distributed_available_fn = None  # as in `forward`, a rank's value is its own
    return twin


def combine(
    results: Any,
    states: Sequence[State],
    shares: Sequence[float | None],
    metrics: BatchMetrics,
    *,
    weighted: bool,
) -> None:
    """Set what parts have logged to what the batch as a whole would have.

    Args:
        results: Lightning's collection.
        states: What was logged before the first part, and after each.
        shares: What each part weighs.
        metrics: Has observed the parts.
        weighted: Whether these are weights, by which an epoch's mean has to count too.
    """
    for key in states[-1]:
        metric = results[key]
        changed = [
            (before.get(key), after[key], share)
            for (before, after), share in zip(itertools.pairwise(states), shares, strict=True)
            if key in after and _is_new(before.get(key), after[key])
        ]
        if len(changed) < 2:
            continue
        if not metric.is_tensor:
            metric._forward_cache = metrics.value(metric.value, metric._forward_cache)  # noqa: SLF001
            continue
        known = [share for *_, share in changed]
        if metric.meta.on_step:
            metric._forward_cache = _combined(metric.meta, [a.by_step for _, a, _ in changed], known)  # noqa: SLF001
            if not metric.meta.on_epoch:
                metric.value = metric._forward_cache  # noqa: SLF001 - as Lightning does
        if weighted and metric.meta.on_epoch and metric.meta.is_mean_reduction:
            _weigh_epoch(metric, changed, known)


def _is_new(before: Logged | None, after: Logged) -> bool:
    return before is None or after.by_step is not before.by_step or after.total is not before.total


def _weigh_epoch(metric: Any, changed: Sequence[Any], shares: Sequence[float | None]) -> None:
    """Count the weighted mean for all samples of the batch, in place of each part's mean for its own."""
    totals = [(b.total, b.samples) if b is not None else (0.0, 0) for b, _, _ in changed]
    values = [
        (after.total - total) / (after.samples - samples)
        for (total, samples), (_, after, _) in zip(totals, changed, strict=True)
    ]
    total, samples = totals[0]
    metric.value = total + mean(values, shares) * (metric.cumulated_batch_size - samples)


def _combined(meta: Any, values: Sequence[Tensor], shares: Sequence[float | None]) -> Tensor:
    if meta.is_mean_reduction:
        return mean(values, shares)
    if meta.is_sum_reduction:
        return torch.stack(list(values)).sum()
    return torch.stack(list(values)).max() if meta.is_max_reduction else torch.stack(list(values)).min()


def refuse_sync(results: Any) -> None:
    """Refuse values that are averaged over the ranks while they are logged by step.

    Raises:
        ConflictError: There is one; a rank that runs a batch once more would wait for the others for ever.
    """
    for metric in results.values():
        if metric.meta.on_step and metric.meta.sync.should:
            text = (
                f"callbacks/micro_batch with self.log({metric.meta.name!r}, on_step=True, sync_dist=True) on "
                "several ranks: a rank that runs out of memory logs more often than the others\n"
                "  try: on_step=False, on_epoch=True\n  try: callbacks.micro_batch.micro_batch_size=8"
            )
            raise ConflictError(text)
