"""Which techniques would lower a step's peak, by how much, and the largest micro-batch that fits.

Each technique is switched on by the words that a user would type, and the step is predicted anew: no table
knows where a model's peak is. After each choice the rest is predicted once more, since the peak moves. What
is refused beside the rest of the recipe is left out, and what saves nothing at this peak is said to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_eff import plan
from lightning_eff.errors import ConfigError, ConflictError, EnvironmentLacksError, UsageError
from lightning_eff.measure.room import Expectation, Room
from lightning_eff.measure.tables import human_bytes, text_table
from lightning_eff.planning.dry_run import Example, dry_run, example_of, on_device
from lightning_eff.run import build_trainer

CHECKPOINTING = "callbacks.gradient_checkpointing.policy"
CANDIDATES: tuple[tuple[str, ...], ...] = (
    ("+callbacks=gradient_checkpointing",),
    ("+callbacks=gradient_checkpointing", f"{CHECKPOINTING}=selective"),
    ("optimizer=in_backward", "trainer.gradient_clip_val=null"),
    ("optimizer=adamw_8bit_bnb",),
    ("optimizer=cpu_offload",),
    ("precision=bf16_mixed",),
    ("precision=bf16_true",),
    ("+callbacks=micro_batch", "callbacks.micro_batch.micro_batch_size=1"),
)
"""What to try, as it is typed; how each changes the training is told by `ls`."""
REFUSALS = (ConfigError, ConflictError, EnvironmentLacksError, UsageError)
LEAST_SHARE = 0.01
"""Share of the peak that is worth a technique."""
MOST_ROWS = 1 << 16

Compose = Callable[[Sequence[str]], Mapping[str, Any]]
"""Composes the recipe with some more words."""


@dataclass(frozen=True)
class Saving:
    """What some words would save.

    Args:
        words: As they are typed.
        saved_bytes: At the peak; None where the step cannot be predicted with them.
        peak_bytes: What is left.
        why: Why it cannot be on.
    """

    words: tuple[str, ...]
    saved_bytes: int | None
    peak_bytes: int | None = None
    why: str = ""


@dataclass
class Advice:
    """What was found.

    Args:
        first: Each candidate alone.
        chosen: Candidates one after the other, each the best beside those before it.
        fits: Whether the recipe fits as it is.
        micro_batch_size: The largest that fits as it is; None where that was not looked for.
        unfinished: Whether time ran out.
    """

    first: list[Saving] = field(default_factory=list[Saving])
    chosen: list[Saving] = field(default_factory=list[Saving])
    fits: bool = True
    micro_batch_size: int | None = None
    unfinished: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = ["the batch fits: memory techniques would only slow this run, unless for a larger batch"]
        if not self.fits:
            lines = ["the batch does not fit; by bytes saved, the best beside those before it:"]
            lines += [
                f" {' '.join(each.words)}: {human_bytes(each.peak_bytes or 0)} left" for each in self.chosen
            ]
        if self.micro_batch_size is not None:
            lines.append(f"largest micro-batch that fits: data.micro_batch_size={self.micro_batch_size}")
        rows = [[_saved(each), " ".join(each.words), each.why] for each in self.first]
        lines.append(text_table(["saves", "alone", "because"], rows))
        return "\n".join([*lines, *(["more was not tried: time ran out"] if self.unfinished else [])])


def advise(compose: Compose, room: Room, *, budget_s: float = 120.0) -> Advice:
    """Predict a recipe with each technique, then with the best of them and each other, until it fits.

    Args:
        compose: Composes the recipe with some more words.
        room: Of the device.
        budget_s: Seconds after which no further prediction is begun.
    """
    until = time.monotonic() + budget_s
    values = on_device(compose(()), room)
    fed = example_of(values)
    if fed is None:
        return Advice()
    peak = _peak(values, room, fed)
    if peak is None:
        return Advice()
    found = Advice(fits=peak <= room.free_bytes)
    left, words = list(CANDIDATES), ()
    while left:
        tried = [
            _saving(compose, room, fed, (words, each), peak) for each in left if time.monotonic() < until
        ]
        found.unfinished = len(tried) < len(left)
        tried.sort(key=lambda each: -(each.saved_bytes or 0))
        found.first = found.first or tried
        best = tried[0] if tried else None
        if found.fits or best is None or best.peak_bytes is None or not best.saved_bytes:
            break
        found.chosen.append(best)
        peak, words = best.peak_bytes, (*words, *best.words)
        left = [each for each in left if not _instead(each, best.words)]
        if peak <= room.free_bytes or found.unfinished:
            break
    found.micro_batch_size = _largest(values, room, fed, until)
    return found


def _instead(one: Sequence[str], other: Sequence[str]) -> bool:
    """Say whether two candidates are two options of one thing."""
    return one[0] == other[0] or (
        not one[0].startswith("+") and one[0].partition("=")[0] == other[0].partition("=")[0]
    )


def _peak(values: Mapping[str, Any], room: Room, fed: Example) -> int | None:
    return Expectation(dry_run(values, fed), room).num_bytes


def _saving(
    compose: Compose, room: Room, fed: Example, words: tuple[Sequence[str], tuple[str, ...]], peak: int
) -> Saving:
    """Predict the step with a candidate beside the words before it."""
    before, candidate = words
    try:
        values = on_device(compose((*before, *candidate)), room)
        trainer = build_trainer(values)
        plan.raise_refused(plan.check(plan.objects_of(trainer), plan.run_facts(trainer)))
    except REFUSALS as error:
        return Saving(candidate, None, why=str(error).splitlines()[0])
    expected = Expectation(dry_run(values, fed), room)
    if expected.num_bytes is None:
        return Saving(candidate, None, why=f"not predicted: {expected.prediction.reason}")
    saved = peak - expected.num_bytes
    where = expected.peak.phase if expected.peak is not None else ""
    why = "useless at this peak" if saved < LEAST_SHARE * peak else f"the peak is then in the {where}"
    return Saving(candidate, saved, expected.num_bytes, why)


def _saved(saving: Saving) -> str:
    if saving.saved_bytes is None:
        return "-"
    sign = "-" if saving.saved_bytes < 0 else ""
    return sign + human_bytes(abs(saving.saved_bytes))


def _largest(values: Mapping[str, Any], room: Room, fed: Example, until: float) -> int | None:
    """Return the largest micro-batch that fits, found on the line through two that were predicted."""
    size = fed.batch_size
    if not size or "micro_batch_size" not in (values.get("data") or {}):
        return None
    known: dict[int, int] = {}

    def fits(rows: int) -> bool | None:
        if rows not in known and time.monotonic() < until:
            one = replace(fed, batch=_with_rows(fed.batch, size, rows), batch_size=rows)
            taken = _peak(_with_micro_batch(values, size, rows), room, one)
            if taken is not None:
                known[rows] = taken
        return known[rows] <= room.free_bytes if rows in known else None

    low, high = 0, MOST_ROWS
    rows = size
    while high - low > 1:
        answer = fits(rows)
        if answer is None:
            return low or None
        low, high = (rows, high) if answer else (low, rows)
        rows = min(max(_guess(known, room.free_bytes, 2 * rows), low + 1), high - 1)
    return low or None


def _guess(known: Mapping[int, int], free_bytes: int, otherwise: int) -> int:
    """Return where the line through the two largest sizes that are known meets the memory there is."""
    if len(known) < 2:
        return otherwise
    one, two = sorted(known)[-2:]
    slope = (known[two] - known[one]) / (two - one)
    return int(one + (free_bytes - known[one]) / slope) if slope > 0 else otherwise


def _with_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Return a batch of more or fewer rows, each one of its own."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        return leaf[torch.arange(wanted) % rows]

    return tree_map(change, batch)


def _with_micro_batch(values: Mapping[str, Any], size: int, rows: int) -> dict[str, Any]:
    """Return a recipe with another micro-batch, and as many of them in a step."""
    changed = dict(values) | {"data": values["data"] | {"micro_batch_size": rows}}
    callbacks = dict(values.get("callbacks") or {})
    whole = (callbacks.get("gradient_accumulation") or {}).get("global_batch_size")
    if isinstance(whole, int):
        accumulated = {"global_batch_size": max(1, whole // size) * rows}
        callbacks["gradient_accumulation"] = callbacks["gradient_accumulation"] | accumulated
    return changed | {"callbacks": callbacks}
