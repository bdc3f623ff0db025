"""What `self.log` makes of a batch that runs in parts: the same values as of the batch as a whole.

Lightning adds up what is logged over an epoch by the number of samples, which it takes from the batch: it is
shown each part. What is logged by step would be the last part's; it becomes the mean over the parts, or the
sum, the smallest, the largest, as `reduce_fx` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_eff.batches import Part, mean
from lightning_eff.errors import ConflictError

Caches = Mapping[str, Any]
"""The values by step of what was logged, by key."""


def show(results: Any, part: Part) -> None:
    """Have what is logged from now on counted as of a micro-batch, or of a batch."""
    results.batch, results.batch_size = part.batch, part.num_samples


def caches(results: Any) -> dict[str, Any]:
    """Return the values by step as they are now."""
    return {key: metric._forward_cache for key, metric in results.items()}  # noqa: SLF001


def new(results: Any, before: Caches) -> dict[str, Any]:
    """Return the values by step that were logged since."""
    now = caches(results)
    return {key: value for key, value in now.items() if value is not None and value is not before.get(key)}


def combine(results: Any, logged: Sequence[Caches], shares: Sequence[float | None]) -> None:
    """Set the values by step to those of the batch as a whole.

    Args:
        results: Lightning's collection.
        logged: The values of each part.
        shares: What each part weighs.
    """
    for key in dict.fromkeys(key for values in logged for key in values):
        metric = results[key]
        there = [(values[key], share) for values, share in zip(logged, shares, strict=True) if key in values]
        if len(there) < 2 or not metric.is_tensor:
            continue
        metric._forward_cache = _combined(metric.meta, *zip(*there, strict=True))  # noqa: SLF001
        if not metric.meta.on_epoch:
            metric.value = metric._forward_cache  # noqa: SLF001 - as Lightning does


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
