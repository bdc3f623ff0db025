"""Compute how many loader batches and micro-batches each rank processes per optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_eff.core.errors import ConfigError, Remedy

PREFIX = "callbacks.gradient_accumulation"
GLOBAL_BATCH_SIZE = f"{PREFIX}.global_batch_size"


def batches_per_step(
    global_batch_size: int, batch_size: int, num_ranks: int, *, key: str = "global_batch_size"
) -> int:
    """Return the number of batches per optimizer step on each rank.

    Args:
        global_batch_size: Number of samples per step, over all ranks.
        batch_size: Number of samples per batch on each rank.
        num_ranks: Number of ranks; each rank has its own batches.
        key: Setting that the error names; the error has remedies only for `global_batch_size`.

    Raises:
        ConfigError: `global_batch_size` is not a multiple of `batch_size * num_ranks`.

    Example:
        >>> batches_per_step(64, 8, num_ranks=2)
        4
        >>> batches_per_step(16, 16, num_ranks=2)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: global_batch_size=16: expected a multiple of 32 (batches of ...
    """
    unit = batch_size * num_ranks
    count, remainder = divmod(global_batch_size, unit)
    if not remainder:
        return count
    # Propose the nearest multiples below and above; zero is not a batch size.
    multiples = [multiple * unit for multiple in (count, count + 1) if multiple]
    ranks = f" x {num_ranks} ranks" if num_ranks > 1 else ""
    allowed = f"a multiple of {unit} (batches of {batch_size}{ranks}): {' or '.join(map(str, multiples))}"
    remedies: list[Remedy] = []
    if key.endswith("global_batch_size"):
        on_rank, rest = divmod(global_batch_size, num_ranks)
        # Propose the largest batch that divides a rank's samples: the global batch then stays the same.
        if on_rank and not rest:
            fits = next(size for size in range(min(batch_size, on_rank), 0, -1) if on_rank % size == 0)
            remedies.append(Remedy(f"data.batch_size={fits}", f"batch_size={fits}"))
        remedies += [
            Remedy(f"{GLOBAL_BATCH_SIZE}={size}", f"GradientAccumulation(global_batch_size={size})")
            for size in multiples
        ]
    raise ConfigError(key=key, value=global_batch_size, allowed=allowed, remedies=remedies)


def check_global_batch(values: Mapping[str, Any], least_ranks: int, most_ranks: int | None = None) -> None:
    """Reject a global batch size that does not fit every possible number of ranks, before any rank starts.

    Only data modules of this package are checked before the run: their `data.batch_size` is known to be the
    batch size per rank. For other data modules, GradientAccumulation checks the loader during the run.

    Args:
        values: A run's config.
        least_ranks: Number of ranks that are started.
        most_ranks: Largest number of ranks of an elastic job; None if the number of ranks is fixed.

    Raises:
        ConfigError: As in `batches_per_step`.

    Example:
        >>> values = {"callbacks": {"gradient_accumulation": {"global_batch_size": 16}}}
        >>> values["data"] = {"_target_": "lightning_eff.data.text.Text", "batch_size": 4}
        >>> check_global_batch(values, 1, 3)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: callbacks...=16: expected a multiple of 24, to fit any of ...
    """
    data: Any = values.get("data") or {}
    accumulation: Any = (values.get("callbacks") or {}).get("gradient_accumulation") or {}
    size, batch_size = accumulation.get("global_batch_size"), data.get("batch_size")
    is_ours = str(data.get("_target_")).startswith(f"{__name__.partition('.')[0]}.")
    if not (is_ours and isinstance(size, int) and isinstance(batch_size, int) and min(size, batch_size) > 0):
        return
    if most_ranks in (None, least_ranks):
        batches_per_step(size, batch_size, least_ranks, key=GLOBAL_BATCH_SIZE)
        return
    counts = range(least_ranks, (most_ranks or 0) + 1)
    # An elastic job may have any of these numbers of ranks.
    if all(size % (batch_size * count) == 0 for count in counts):
        return
    # A multiple of this unit fits every number of ranks in the range.
    unit = batch_size * math.lcm(*counts)
    allowed = (
        f"a multiple of {unit}, to fit any of {least_ranks} to {most_ranks} ranks (batches of {batch_size})"
    )
    by_batches = f"{GLOBAL_BATCH_SIZE}=null {PREFIX}.num_batches=1  # a step of fewer ranks is smaller"
    remedies = [f"{GLOBAL_BATCH_SIZE}={unit}", by_batches]
    raise ConfigError(key=GLOBAL_BATCH_SIZE, value=size, allowed=allowed, remedies=remedies)


def micro_batches_per_step(values: Mapping[str, Any], num_ranks: int) -> int:
    """Return the number of micro-batches per optimizer step on each rank, from a config.

    Example:
        >>> accumulation = {"gradient_accumulation": {"global_batch_size": 64}}
        >>> micro_batches_per_step({"data": {"batch_size": 8}, "callbacks": accumulation}, num_ranks=2)
        4
    """
    callbacks: Any = values.get("callbacks") or {}
    batch_size: Any = (values.get("data") or {}).get("batch_size")
    accumulation: Any = callbacks.get("gradient_accumulation") or {}
    global_size = accumulation.get("global_batch_size")
    micro_size = (callbacks.get("micro_batch") or {}).get("micro_batch_size")
    count = accumulation.get("num_batches") or (values.get("trainer") or {}).get("accumulate_grad_batches")
    count = count or 1
    if isinstance(batch_size, int) and isinstance(global_size, int):
        # A global batch size has precedence over the Trainer's accumulate_grad_batches.
        count = max(1, math.ceil(global_size / (batch_size * num_ranks)))
    if isinstance(batch_size, int) and isinstance(micro_size, int):
        # Round up, since the last micro-batch of a batch may be smaller.
        count *= max(1, math.ceil(batch_size / micro_size))
    return count
