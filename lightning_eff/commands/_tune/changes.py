"""The changes that `tune` tries on a recipe: each leaves the training the same, global batch included."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_eff.comparison.trial_plan import global_batch_size
from lightning_eff.launch.job import num_ranks
from lightning_eff.planner.advice import Options, mutually_exclusive

SPEED = ("torch_compile", "tiled_loss", "tiled_mlp", "channels_last", "data_preload", "triton_gemm")
"""Callbacks that may make a step faster."""
MEMORY: tuple[Options, ...] = (
    ("+callbacks=gradient_checkpointing", "callbacks.gradient_checkpointing.policy=selective"),
    ("+callbacks=gradient_checkpointing",),
    ("+callbacks=tiled_conv",),
)
"""What makes it fit, at the price of speed."""
PARTS = (2, 4)
"""Into how many micro-batches a batch is cut."""
NUM_COMBINED = 4
"""Changes of which all combinations are tried: those that helped most alone."""


def single_changes(values: Mapping[str, Any], *, has_batch_norm: bool) -> list[Options]:
    """Return each change of a recipe, as overrides: what it lacks is added, what it has is taken out.

    Args:
        values: The composed recipe.
        has_batch_norm: Whether the model's result depends on how many samples are computed at once.
    """
    present = values.get("callbacks") or {}
    changes: list[Options] = [
        (f"~callbacks.{name}",) if present.get(name) else (f"+callbacks={name}",) for name in SPEED
    ]
    changes += [each for each in MEMORY if each[0].removeprefix("+callbacks=") not in present]
    if (values.get("precision") or {}).get("precision") != "auto":
        changes.append(("precision=auto",))
    return changes if has_batch_norm else changes + _splits(values)


def _splits(values: Mapping[str, Any]) -> list[Options]:
    """Return other sizes of what is computed at once."""
    size = values["data"].get("batch_size")
    if not isinstance(size, int) or "micro_batch" in (values.get("callbacks") or {}):
        return []
    accumulation = (values.get("callbacks") or {}).get("gradient_accumulation") or {}
    if isinstance(accumulation.get("global_batch_size"), int):
        # The loader's batch is free: the step stays as large as the callback says.
        on_rank = global_batch_size(values) // num_ranks(values["trainer"])
        sizes = {on_rank // parts for parts in (1, *PARTS) if on_rank % parts == 0}
        return [(f"data.batch_size={each}",) for each in sorted(sizes - {size, 0})]
    key = "callbacks.micro_batch.micro_batch_size"
    return [("+callbacks=micro_batch", f"{key}={size // n}") for n in PARTS if size >= n and size % n == 0]


def combinations(helped: Sequence[Options]) -> list[Options]:
    """Return all combinations of at least two changes, the largest first.

    Args:
        helped: Changes that helped alone, the best first.

    Example:
        >>> combinations([("+callbacks=a",), ("data.batch_size=2",), ("data.batch_size=4",)])
        [('+callbacks=a', 'data.batch_size=2'), ('+callbacks=a', 'data.batch_size=4')]
    """
    best = helped[:NUM_COMBINED]
    found: list[Options] = []
    for number in range(len(best), 1, -1):
        for chosen in itertools.combinations(best, number):
            pairs = itertools.combinations(chosen, 2)
            if not any(mutually_exclusive(one[0], other[0]) for one, other in pairs):
                found.append(tuple(word for change in chosen for word in change))
    return found
