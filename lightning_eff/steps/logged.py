"""What `self.log` makes of a batch that runs in parts: the same values as of the batch as a whole.

Lightning adds up what is logged over an epoch by the number of samples, which it takes from the batch: it is
shown each part. What is logged by step would be the last part's; it becomes the mean over the parts, or the
sum, the smallest, the largest, as `reduce_fx` says. Where parts have weights, means are by weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.errors import ConflictError
from lightning_eff.steps.batches import Part, mean


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


def combine(results: Any, states: Sequence[State], shares: Sequence[float | None], *, weighted: bool) -> None:
    """Set what parts have logged to what the batch as a whole would have.

    Args:
        results: Lightning's collection.
        states: What was logged before the first part, and after each.
        shares: What each part weighs.
        weighted: Whether these are weights, by which an epoch's mean has to count too.
    """
    for key in states[-1]:
        metric = results[key]
        changed = [
            (before.get(key), after[key], share)
            for (before, after), share in zip(itertools.pairwise(states), shares, strict=True)
            if key in after and _is_new(before.get(key), after[key])
        ]
        if len(changed) < 2 or not metric.is_tensor:
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
