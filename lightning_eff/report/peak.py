"""Find the peak of a recorded step: bytes, phase, operation, categories and the largest holders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_eff.report.module_tracker import PHASES, STEP
from lightning_eff.report.recording import (
    ACTIVATIONS,
    BATCH,
    CATEGORIES,
    TEMPORARIES,
    Allocation,
    Event,
    Recorder,
)

MAX_HOLDERS = 12
"""Holders that are listed."""
PASSING = (BATCH, ACTIVATIONS, TEMPORARIES)
POINTS = 200
"""Maximum points of a timeline."""


@dataclass(frozen=True)
class Holder:
    """Storages alive at the peak that differ only in the number of their layer.

    Args:
        category: One of `recording.CATEGORIES`.
        path: Module that they were allocated in, or their parameter's name, with `*` for a number.
        operation: Operation that allocated them; empty if they existed before the step.
        num_bytes: Their total size.
        count: Number of storages.
    """

    category: str
    path: str
    operation: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """Memory of a step at its peak and over time.

    Args:
        num_bytes: Maximum of live bytes.
        phase: Phase of the peak.
        operation: Operation at the peak; empty before the first one.
        path: Module of that operation.
        by_category: Bytes at the peak by category.
        by_phase: Bytes by category at the peak of each phase.
        passing_bytes: Maximum of batch, activations and temporaries at once, outside the optimizer step:
            what no sharding strategy divides.
        holders: The largest holders at the peak.
        timeline: Phase and bytes by category at up to `POINTS` moments.
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
            block_bytes: Allocation granularity; each storage is rounded up to a multiple of it.
            on_device: Leave out storages that stay in host memory.
        """
        left_out = recorder.on_host if on_device else set[int]()
        events = [event for event in recorder.events if event.allocation not in left_out]
        # By phase: the maximum of live bytes, and minus the index of its event (the first of equal ones).
        tops: dict[str, tuple[int, int]] = dict.fromkeys(PHASES, (0, -1))
        total = 0
        for index, (event, change) in enumerate(_changes(events, block_bytes)):
            total += change
            tops[event.phase] = max(tops[event.phase], (total, -index))
        phase, (top, at) = max(tops.items(), key=lambda item: item[1])
        alive = _alive(events[: 1 - at], block_bytes)
        made = recorder.allocations[events[-at].allocation] if events else Allocation("", "", phase)
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
            passing_bytes=_passing_bytes(recorder, events, block_bytes),
            holders=_holders(recorder, alive),
            timeline=_timeline(recorder, events, block_bytes),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return asdict(self)


def _rounded(num_bytes: int, block_bytes: int) -> int:
    return -(-num_bytes // block_bytes) * block_bytes


def _alive(events: Sequence[Event], block_bytes: int) -> dict[int, int]:
    """Return the size of every storage after some events, 0 if freed."""
    return {event.allocation: _rounded(event.num_bytes, block_bytes) for event in events}


def _changes(events: Sequence[Event], block_bytes: int) -> Iterator[tuple[Event, int]]:
    """Yield each event with the bytes that it adds or removes."""
    sizes: dict[int, int] = {}
    for event in events:
        size = _rounded(event.num_bytes, block_bytes)
        yield event, size - sizes.get(event.allocation, 0)
        sizes[event.allocation] = size


def _by_category(recorder: Recorder, alive: dict[int, int]) -> dict[str, int]:
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for index, num_bytes in alive.items():
        found[recorder.allocations[index].category] += num_bytes
    return found


def _passing_bytes(recorder: Recorder, events: Sequence[Event], block_bytes: int) -> int:
    total = top = 0
    for event, change in _changes(events, block_bytes):
        total += change if recorder.allocations[event.allocation].category in PASSING else 0
        top = top if event.phase == STEP else max(top, total)
    return top


def _holders(recorder: Recorder, alive: dict[int, int]) -> list[Holder]:
    sizes: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for index, num_bytes in alive.items():
        if num_bytes:
            made = recorder.allocations[index]
            key = made.category, re.sub(r"(?<![^.])\d+(?![^.])", "*", made.path), made.operation
            sizes[key] += num_bytes
            counts[key] += 1
    largest = sizes.most_common(MAX_HOLDERS)
    return [Holder(*key, num_bytes=num_bytes, count=counts[key]) for key, num_bytes in largest]


def _timeline(recorder: Recorder, events: Sequence[Event], block_bytes: int) -> list[dict[str, Any]]:
    """Return the maximum of each of `POINTS` stretches of events."""
    stretch = max(1, -(-len(events) // POINTS))
    now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    points: list[dict[str, Any]] = []
    total, top = 0, -1
    for index, (event, change) in enumerate(_changes(events, block_bytes)):
        now[recorder.allocations[event.allocation].category] += change
        total += change
        if index % stretch == 0:
            points.append({})
            top = -1
        if total > top:
            top = total
            points[-1] = {"phase": event.phase, **now}
    return points
