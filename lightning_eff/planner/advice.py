"""Advise which techniques lower a step's peak, by how much and at what cost in time, and how much more fits.

Each technique is switched on and the step is predicted again: no table knows where a model's peak is. After
each choice the remaining ones are predicted again, since the peak moves. Candidates that conflict with what
is on are listed with the reason. Times are by arithmetic (report/roofline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from lightning_eff.core.errors import PRE_RUN_ERRORS
from lightning_eff.core.text import human_bytes, text_table
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast

MIN_SAVING = 0.01
"""Fraction of the peak that a technique must save to be worth its cost."""

Options = tuple[str, ...]
"""A technique as it is typed: overrides of a recipe, or a constructor call for a script."""


@dataclass(frozen=True)
class Size:
    """A size of a batch that can be changed: its samples, or their length.

    Args:
        what: Its name in a sentence.
        typed: Override key.
        now: Current value.
        most: Upper limit of the search.
        step: Granularity.
        forecast: Predicts the step with another value.
    """

    what: str
    typed: str
    now: int
    most: int
    step: int
    forecast: Callable[[int], MemoryForecast]


class AdvisedTraining(Protocol):
    """A training that can be predicted with other techniques."""

    @property
    def memory(self) -> DeviceMemory:
        """Memory of the device."""
        ...

    @property
    def candidates(self) -> Sequence[Options]:
        """Techniques to try."""
        ...

    def forecast(self, options: Options) -> MemoryForecast:
        """Predict the step with some techniques; raise one of `errors.REFUSALS` if they conflict."""
        ...

    def mutually_exclusive(self, first: Options, second: Options) -> bool:
        """Return whether two candidates are two options of one technique or group."""
        ...

    def changes_trainable_params(self, options: Options) -> bool:
        """Return whether other parameters would be trained: such a candidate is tried, but never chosen."""
        del options
        return False

    def sizes(self) -> Sequence[Size]:
        """Return the sizes of a batch that can be changed; none if it is unknown how batches are made."""
        return ()


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

    @property
    def cells(self) -> list[str]:
        """Row of the table."""
        saved = "-"
        if self.saved_bytes is not None:
            saved = ("-" if self.saved_bytes < 0 else "") + human_bytes(abs(self.saved_bytes))
        ratio = "-" if self.time_ratio is None else f"x{self.time_ratio:.2f}"
        return [saved, ratio, " ".join(self.words), self.why]


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

    def as_dict(self) -> dict[str, Any]:
        """Return the advice as plain values, for JSON."""
        return asdict(self)

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
        header = ["saves", "time (estimate)", "alone", "effect"]
        lines.append(text_table(header, [each.cells for each in self.first]))
        lines += ["not all candidates were tried: time ran out"] if self.unfinished else []
        return "\n".join(lines)


def advise(training: AdvisedTraining, *, budget_s: float = 60.0) -> Advice:
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
        allowed = (pair for pair in pairs if not training.changes_trainable_params(pair[0].words))
        best, then = next(allowed, (None, None))
        if found.fits or best is None or then is None or then.num_bytes is None or not best.saved_bytes:
            break
        found.chosen.append(best)
        now, options = then, (*options, *best.words)
        left = [each for each in left if not training.mutually_exclusive(each, best.words)]
        if then.num_bytes <= free_bytes or found.unfinished:
            break
    for size in training.sizes():
        value = largest_that_fits(size, free_bytes, until)
        found.largest += [] if value is None else [Largest(size.what, size.typed, value)]
    return found


def _try(
    training: AdvisedTraining, before: Options, candidate: Options, now: MemoryForecast
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
    why = f"trains fewer weights; {why}" if training.changes_trainable_params(candidate) else why
    return Saving(candidate, saved, then.num_bytes, ratio, why), then


def largest_that_fits(size: Size, free_bytes: int, until: float) -> int | None:
    """Return the largest value of a size that fits, by interpolation between predicted values.

    Args:
        size: The size; values change in its steps from the current one.
        free_bytes: Memory to fit into.
        until: Time of the monotonic clock after which no further prediction starts.

    Returns:
        None if even the smallest value does not fit, or none was found in time.
    """
    known: dict[int, int] = {}

    def fits(value: int) -> bool | None:
        if value not in known and time.monotonic() < until:
            needed = size.forecast(value).num_bytes
            if needed is not None:
                known[value] = needed
        return known[value] <= free_bytes if value in known else None

    # Invariant: `low` fits (0 is unknown), `high` does not fit (or is the limit).
    low, high, value = 0, size.most, size.now
    while high - low > size.step:
        answer = fits(value)
        if answer is None:
            return low or None
        low, high = (value, high) if answer else (low, value)
        guess = 2 * value
        if len(known) > 1:  # memory grows almost linearly: where the line through two values meets the limit
            small, large = sorted(known)[-2:]
            slope = (known[large] - known[small]) / (large - small)
            guess = int(small + (free_bytes - known[small]) / slope) if slope > 0 else guess
        value = min(max(guess // size.step * size.step, low + size.step), high - size.step)
    return low or None


def default_micro_batch(samples: int) -> int:
    """Return the micro-batch size to try: an eighth of a batch; a prediction's time grows with their number.

    Example:
        >>> default_micro_batch(32), default_micro_batch(20), default_micro_batch(3)
        (4, 2, 1)
    """
    return max(1, samples // 8)
