"""Which techniques would lower a step's peak, by how much and at what cost in time, and how much more fits.

Each technique is switched on and the step is predicted anew: no table knows where a model's peak is. After
each choice the rest is predicted once more, since the peak moves. What is refused beside what is there is
left out, and what saves nothing at this peak is said to. Times are by arithmetic (report/roofline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from lightning_eff.core.errors import REFUSALS
from lightning_eff.core.text import human_bytes, text_table
from lightning_eff.planner.device_memory import MemoryForecast, DeviceMemory

LEAST_SHARE = 0.01
"""Share of the peak that is worth a technique."""

Words = tuple[str, ...]
"""A technique as it is typed."""


@dataclass(frozen=True)
class Size:
    """Something of a batch that may be larger or smaller: its rows, or their length.

    Args:
        what: Its name, for a sentence.
        typed: What is typed before its number.
        now: What it is.
        most: Where nobody looks any further.
        step: What it is changed by.
        expect: Predicts the step with another one.
    """

    what: str
    typed: str
    now: int
    most: int
    step: int
    expect: Callable[[int], MemoryForecast]


class AdvisedTraining(Protocol):
    """A training that techniques can be tried on, without being run."""

    @property
    def room(self) -> DeviceMemory:
        """The device's memory."""
        ...

    @property
    def candidates(self) -> Sequence[Words]:
        """Techniques to try."""
        ...

    def expect(self, words: Words) -> MemoryForecast:
        """Predict the step with some techniques; one of `errors.REFUSALS` where they cannot be on."""
        ...

    def instead(self, one: Words, other: Words) -> bool:
        """Say whether two candidates are two options of one thing."""
        ...

    def changes_trainable_params(self, words: Words) -> bool:
        """Say whether it would be another training: of fewer weights. It is tried, and never chosen."""
        ...

    def sizes(self) -> Sequence[Size]:
        """Return what of a batch can be changed."""
        ...


@dataclass(frozen=True)
class Saving:
    """What some words would save.

    Args:
        words: As they are typed.
        saved_bytes: At the peak; None where the step cannot be predicted with them.
        peak_bytes: What is left.
        time_ratio: A batch's time with them over that without, by arithmetic; None where nobody knows.
        why: Why it cannot be on, or where the peak is then.
    """

    words: Words
    saved_bytes: int | None
    peak_bytes: int | None = None
    time_ratio: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Largest:
    """The largest of a size that fits as it is.

    Args:
        what: The size.
        typed: What is typed for it.
        value: The number.
    """

    what: str
    typed: str
    value: int


@dataclass
class Advice:
    """What was found.

    Args:
        first: Each candidate alone.
        chosen: Candidates one after the other, each the best beside those before it.
        fits: Whether it fits as it is.
        largest: What would fit of each size, as it is.
        unfinished: Whether time ran out.
        reason: Why nothing was found.
    """

    first: list[Saving] = field(default_factory=list[Saving])
    chosen: list[Saving] = field(default_factory=list[Saving])
    fits: bool = True
    largest: list[Largest] = field(default_factory=list[Largest])
    unfinished: bool = False
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.reason:
            return f"no advice: {self.reason}"
        lines = ["the batch fits: memory techniques would only slow this run, unless for a larger batch"]
        if not self.fits:
            lines = ["the batch does not fit; by bytes saved, the best beside those before it:"]
            lines += [
                f" {' '.join(each.words)}: {human_bytes(each.peak_bytes or 0)} left" for each in self.chosen
            ]
        lines += [f"{each.what} that fits: {each.typed}={each.value}" for each in self.largest]
        rows = [[_saved(each), _time(each), " ".join(each.words), each.why] for each in self.first]
        lines.append(text_table(["saves", "time, expected", "alone", "because"], rows))
        return "\n".join([*lines, *(["more was not tried: time ran out"] if self.unfinished else [])])


def advise(subject: AdvisedTraining, *, budget_s: float = 60.0) -> Advice:
    """Predict a training with each technique, then with the best of them and each other, until it fits.

    Args:
        subject: The training.
        budget_s: Seconds after which no further prediction is begun.
    """
    until = time.monotonic() + budget_s
    now = subject.expect(())
    if now.num_bytes is None:
        return Advice(reason=now.prediction.reason)
    room = subject.room
    found = Advice(fits=now.num_bytes <= room.free_bytes)
    left, words = list(subject.candidates), ()
    while left:
        tried = [_saving(subject, words, each, now) for each in left if time.monotonic() < until]
        found.unfinished = len(tried) < len(left)
        pairs = sorted(tried, key=lambda each: -(each[0].saved_bytes or 0))
        found.first = found.first or [each for each, _ in pairs]
        same = (pair for pair in pairs if not subject.changes_trainable_params(pair[0].words))
        best, then = next(same, (None, None))
        if found.fits or best is None or then is None or then.num_bytes is None or not best.saved_bytes:
            break
        found.chosen.append(best)
        now, words = then, (*words, *best.words)
        left = [each for each in left if not subject.instead(each, best.words)]
        if then.num_bytes <= room.free_bytes or found.unfinished:
            break
    for size in subject.sizes():
        value = largest(size, room, until)
        found.largest += [] if value is None else [Largest(size.what, size.typed, value)]
    return found


def _saving(
    subject: AdvisedTraining, before: Words, candidate: Words, now: MemoryForecast
) -> tuple[Saving, MemoryForecast | None]:
    """Predict the step with a candidate beside the words before it."""
    try:
        then = subject.expect((*before, *candidate))
    except REFUSALS as error:
        return Saving(candidate, None, why=str(error).splitlines()[0]), None
    if then.num_bytes is None or now.num_bytes is None:
        return Saving(candidate, None, why=f"not predicted: {then.prediction.reason}"), None
    saved = now.num_bytes - then.num_bytes
    ratio = then.seconds / now.seconds if then.seconds and now.seconds else None
    where = then.peak.phase if then.peak is not None else ""
    useless = saved < LEAST_SHARE * now.num_bytes
    why = "useless at this peak" if useless else f"the peak is then in the {where}"
    why = f"fewer weights are trained; {why}" if subject.changes_trainable_params(candidate) else why
    return Saving(candidate, saved, then.num_bytes, ratio, why), then


def _saved(saving: Saving) -> str:
    if saving.saved_bytes is None:
        return "-"
    sign = "-" if saving.saved_bytes < 0 else ""
    return sign + human_bytes(abs(saving.saved_bytes))


def _time(saving: Saving) -> str:
    return "-" if saving.time_ratio is None else f"x{saving.time_ratio:.2f}"


def largest(size: Size, room: DeviceMemory, until: float) -> int | None:
    """Return the largest value of a size that fits, found on the line through two that were predicted.

    Args:
        size: What is changed, in its own steps from what it is.
        room: To fit into.
        until: Time of the monotonic clock after which nothing is predicted any more.

    Returns:
        None where not even the least fits, or that was not found out in time.
    """
    known: dict[int, int] = {}

    def fits(value: int) -> bool | None:
        if value not in known and time.monotonic() < until:
            taken = size.expect(value).num_bytes
            if taken is not None:
                known[value] = taken
        return known[value] <= room.free_bytes if value in known else None

    low, high = 0, size.most
    value = size.now
    while high - low > size.step:
        answer = fits(value)
        if answer is None:
            return low or None
        low, high = (value, high) if answer else (low, value)
        guess = _guess(known, room.free_bytes, 2 * value) // size.step * size.step
        value = min(max(guess, low + size.step), high - size.step)
    return low or None


def default_micro_batch(rows: int) -> int:
    """Return the micro-batch to try: the largest of at least eight parts; predicting takes as long as parts.

    Example:
        >>> eighth(32), eighth(20), eighth(3)
        (4, 2, 1)
    """
    return max(1, rows // 8)


def _guess(known: dict[int, int], free_bytes: int, otherwise: int) -> int:
    """Return where the line through the two largest sizes that are known meets the memory there is."""
    if len(known) < 2:
        return otherwise
    one, two = sorted(known)[-2:]
    slope = (known[two] - known[one]) / (two - one)
    return int(one + (free_bytes - known[one]) / slope) if slope > 0 else otherwise
