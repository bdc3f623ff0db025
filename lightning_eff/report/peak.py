"""The moment of a step when most memory is in use: how much, in which phase, what for, and who holds it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_eff.report.recording import ACTIVATIONS, BATCH, CATEGORIES, TEMPORARIES, Event, Allocation, Recorder
from lightning_eff.report.module_tracker import PHASES, STEP

MOST_HOLDERS = 12
"""Holders that are kept by name."""
PASSING = (BATCH, ACTIVATIONS, TEMPORARIES)
POINTS = 200
"""Points of a timeline."""


@dataclass(frozen=True)
class Holder:
    """Storages that are alive at the peak, alike but for the number of their layer.

    Args:
        category: What they are for.
        path: The module that they were made in, or the parameter that they belong to, `*` for a number.
        operation: What made them; empty for what was there before the step.
        num_bytes: All together.
        count: How many.
    """

    category: str
    path: str
    operation: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """A step's memory at its peak, and on the way.

    Args:
        num_bytes: The most that was alive.
        phase: When.
        operation: What ran then; empty before the first.
        path: Where that was.
        by_category: Bytes of the peak by what they are for.
        by_phase: The same of the most in each phase.
        passing_bytes: The most that a step holds at once of its batch, activations and temporaries: what no
            strategy divides. The optimizer's step is left out.
        holders: The largest holders at the peak.
        timeline: Bytes by category on the way, at most `POINTS` times, with the phase.
    """

    num_bytes: int
    phase: str
    operation: str
    path: str
    by_category: dict[str, int]
    by_phase: dict[str, dict[str, int]]
    passing_bytes: int
    holders: list[Holder]
    timeline: list[dict[str, Any]]

    @classmethod
    def of(cls, recorder: Recorder, *, block_bytes: int = 1, on_device: bool = False) -> Peak:
        """Replay a record.

        Args:
            recorder: After the step.
            block_bytes: What each storage is rounded up to, as an allocator does.
            on_device: Leave out what would stay in the host's memory.
        """
        left_out = recorder.on_host if on_device else set[int]()
        events = [event for event in recorder.events if event.holding not in left_out]
        tops: dict[str, tuple[int, int]] = dict.fromkeys(PHASES, (0, -1))
        total = 0
        for index, (event, change) in enumerate(_changes(events, block_bytes)):
            total += change
            tops[event.phase] = max(tops[event.phase], (total, -index))  # the first of equals
        phase, (top, at) = max(tops.items(), key=lambda each: each[1])
        alive = _alive(events[: 1 - at], block_bytes)
        made = recorder.holdings[events[-at].holding] if events else Allocation("", "", phase)
        return cls(
            num_bytes=top,
            phase=phase,
            operation=made.operation,
            path=made.path,
            by_category=_by_category(recorder, alive),
            by_phase={
                name: _by_category(recorder, _alive(events[: 1 - index], block_bytes))
                for name, (_, index) in tops.items()
            },
            passing_bytes=_passing(recorder, events, block_bytes),
            holders=_holders(recorder, alive),
            timeline=_timeline(recorder, events, block_bytes),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return asdict(self)


def _alive(events: Sequence[Event], block_bytes: int) -> dict[int, int]:
    """Return the sizes of all storages after some events, 0 for those that are gone."""
    return {event.holding: _rounded(event.num_bytes, block_bytes) for event in events}


def _by_category(recorder: Recorder, alive: dict[int, int]) -> dict[str, int]:
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for index, num_bytes in alive.items():
        found[recorder.holdings[index].category] += num_bytes
    return found


def _rounded(num_bytes: int, block_bytes: int) -> int:
    return -(-num_bytes // block_bytes) * block_bytes


def _changes(events: Sequence[Event], block_bytes: int) -> Iterator[tuple[Event, int]]:
    """Yield each event with the bytes that it adds or takes away."""
    sizes: dict[int, int] = {}
    for event in events:
        size = _rounded(event.num_bytes, block_bytes)
        yield event, size - sizes.get(event.holding, 0)
        sizes[event.holding] = size


def _passing(recorder: Recorder, events: Sequence[Event], block_bytes: int) -> int:
    passing = {index for index, each in enumerate(recorder.holdings) if each.category in PASSING}
    total = most = 0
    for event, change in _changes(events, block_bytes):
        total += change if event.holding in passing else 0
        most = most if event.phase == STEP else max(most, total)
    return most


def _holders(recorder: Recorder, alive: dict[int, int]) -> list[Holder]:
    sizes: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for index, num_bytes in alive.items():
        if num_bytes:
            made = recorder.holdings[index]
            key = made.category, re.sub(r"(?<![^.])\d+(?![^.])", "*", made.path), made.operation
            sizes[key] += num_bytes
            counts[key] += 1
    largest = sizes.most_common(MOST_HOLDERS)
    return [Holder(*key, num_bytes=num_bytes, count=counts[key]) for key, num_bytes in largest]


def _timeline(recorder: Recorder, events: Sequence[Event], block_bytes: int) -> list[dict[str, Any]]:
    """Return the fullest moment of each of `POINTS` stretches."""
    stretch = max(1, -(-len(events) // POINTS))
    now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    points: list[dict[str, Any]] = []
    total, top = 0, -1
    for index, (event, change) in enumerate(_changes(events, block_bytes)):
        now[recorder.holdings[event.holding].category] += change
        total += change
        if index % stretch == 0:
            points.append({})
            top = -1
        if total > top:
            top = total
            points[-1] = {"phase": event.phase, **now}
    return points
