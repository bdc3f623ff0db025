"""Advise which techniques lower a step's peak, by how much and at what cost in time, and how much more fits.

Each technique is switched on and the step is predicted again: no table knows where a model's peak is. After
each choice the remaining ones are predicted again, since the peak moves. Candidates that conflict with what
is on are listed with the reason. Times are by arithmetic (report/roofline.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lightning_eff.core.errors import PRE_RUN_ERRORS
from lightning_eff.core.text import WIDTH, human_bytes, text_table
from lightning_eff.planner.advised_recipe import ADAPTERS, AdvisedRecipe, Options, Size
from lightning_eff.planner.device_memory import MemoryForecast

MIN_SAVING = 0.01
"""Fraction of the peak that a technique must save to be worth its cost."""


@dataclass(frozen=True)
class Saving:
    """Effect of a candidate.

    Args:
        words: The candidate as it is typed.
        saved_bytes: Bytes saved at the peak; None if the step cannot be predicted with it.
        peak_bytes: The new peak.
        time_ratio: Time of a batch with it over that without, by arithmetic; None if unknown.
        why: Why it cannot be on, or the phase of the new peak.
    """

    words: Options
    saved_bytes: int | None
    peak_bytes: int | None = None
    time_ratio: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Largest:
    """Largest value of a size that fits.

    Args:
        what: Name of the size.
        typed: Override key.
        value: The value.
    """

    what: str
    typed: str
    value: int


@dataclass
class Advice:
    """Result of the search.

    Args:
        first: Every candidate alone.
        chosen: Candidates to add in order, each the best one after those before it.
        fits: Whether the step fits as it is.
        largest: The largest value of each size that fits as it is.
        unfinished: Whether time ran out.
        reason: Why there is no advice.
    """

    first: list[Saving] = field(default_factory=list[Saving])
    chosen: list[Saving] = field(default_factory=list[Saving])
    fits: bool = True
    largest: list[Largest] = field(default_factory=list[Largest])
    unfinished: bool = False
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"no advice: {self.reason}"
        lines = ["the batch fits: techniques that save memory only pay off with a larger batch"]
        if not self.fits:
            lines = ["the batch does not fit; add in this order:"]
            lines += [
                f" {' '.join(each.words)}: peak {human_bytes(each.peak_bytes or 0)}" for each in self.chosen
            ]
        lines += [f"{each.what} that fits: {each.typed}={each.value}" for each in self.largest]
        cells: list[list[str]] = []
        for saving in self.first:
            saved = "-"
            if saving.saved_bytes is not None:
                saved = ("-" if saving.saved_bytes < 0 else "") + human_bytes(abs(saving.saved_bytes))
            ratio = "-" if saving.time_ratio is None else f"x{saving.time_ratio:.2f}"
            cells.append([saved, ratio, " ".join(saving.words), saving.why])
        lines.append(text_table(["saves", "time (estimate)", "alone", "effect"], cells, width=WIDTH))
        lines += ["not all candidates were tried: time ran out"] if self.unfinished else []
        return "\n".join(lines)


def mutually_exclusive(first: Options, second: Options) -> bool:
    """Return whether two candidates are two options of one technique or group.

    Example:
        >>> mutually_exclusive(("precision=bf16_mixed",), ("precision=bf16_true",))
        True
        >>> mutually_exclusive(("+callbacks=micro_batch",), ("+callbacks=gradient_checkpointing",))
        False
    """
    # A callback that a recipe adds is compared as a whole, a group by its name.
    names = [word if word.startswith("+") else word.split("=")[0] for word in (first[0], second[0])]
    return names[0] == names[1]


def advise(training: AdvisedRecipe, *, budget_s: float = 60.0) -> Advice:
    """Predict a training with each candidate, then with the best of them and each other one, until it fits.

    Args:
        training: The training.
        budget_s: Seconds after which no further prediction starts.
    """
    until = time.monotonic() + budget_s
    now = training.forecast(())
    if now.num_bytes is None:
        return Advice(reason=now.prediction.reason)
    free_bytes = training.memory.free_bytes
    found = Advice(fits=now.num_bytes <= free_bytes)
    left, options = list(training.candidates), ()
    while left:
        tried = [_try(training, options, each, now) for each in left if time.monotonic() < until]
        found.unfinished = len(tried) < len(left)
        pairs = sorted(tried, key=lambda pair: -(pair[0].saved_bytes or 0))
        found.first = found.first or [saving for saving, _ in pairs]
        allowed = (pair for pair in pairs if pair[0].words != ADAPTERS)
        best, then = next(allowed, (None, None))
        if found.fits or best is None or then is None or then.num_bytes is None or not best.saved_bytes:
            break
        found.chosen.append(best)
        now, options = then, (*options, *best.words)
        left = [each for each in left if not mutually_exclusive(each, best.words)]
        if then.num_bytes <= free_bytes or found.unfinished:
            break
    for size in training.sizes():
        value = largest_that_fits(size, free_bytes, until)
        found.largest += [] if value is None else [Largest(size.what, size.typed, value)]
    return found


def _try(
    training: AdvisedRecipe, before: Options, candidate: Options, now: MemoryForecast
) -> tuple[Saving, MemoryForecast | None]:
    """Predict the step with a candidate in addition to the options before it."""
    try:
        then = training.forecast((*before, *candidate))
    except PRE_RUN_ERRORS as error:
        return Saving(candidate, None, why=str(error).splitlines()[0]), None
    if then.num_bytes is None or now.num_bytes is None or then.peak is None:
        return Saving(candidate, None, why=f"not predicted: {then.prediction.reason}"), None
    saved = now.num_bytes - then.num_bytes
    ratio = then.seconds / now.seconds if then.seconds and now.seconds else None
    why = f"new peak: {then.peak.phase}"
    if saved < MIN_SAVING * now.num_bytes:
        why = "saves < 1 %" if saved > 0 else "saves nothing here"
    why = f"trains fewer weights; {why}" if candidate == ADAPTERS else why
    return Saving(candidate, saved, then.num_bytes, ratio, why), then


def largest_that_fits(size: Size, free_bytes: int, until: float) -> int | None:
    """Return the largest value of a size that fits, by interpolation between predicted values.

    None if even the smallest value does not fit, or none was found before `until`, a time of the monotonic
    clock after which no further prediction starts.
    """
    known: dict[int, int] = {}
    # Invariant: `low` fits (0 is unknown), `high` does not fit (or is the limit).
    low, high, value = 0, size.most, size.now
    while high - low > size.step:
        if value not in known:
            needed = size.forecast(value).num_bytes if time.monotonic() < until else None
            if needed is None:
                break
            known[value] = needed
        low, high = (value, high) if known[value] <= free_bytes else (low, value)
        guess = 2 * value
        if len(known) > 1:  # memory grows almost linearly: where the line through two values meets the limit
            small, large = sorted(known)[-2:]
            slope = (known[large] - known[small]) / (large - small)
            guess = int(small + (free_bytes - known[small]) / slope) if slope > 0 else guess
        value = min(max(guess // size.step * size.step, low + size.step), high - size.step)
    return low or None
