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
        # Every size in multiples of the block, as the allocator would reserve it.
        events = [
            Event(event.allocation, -(-event.num_bytes // block_bytes) * block_bytes, event.phase)
            for event in recorder.events
            if event.allocation not in left_out
        ]
        # By phase: the maximum of live bytes, and minus the index of its event (the first of equal ones).
        tops: dict[str, tuple[int, int]] = dict.fromkeys(PHASES, (0, -1))
        total = passing = max_passing = 0
        for index, (event, change) in enumerate(_changes(events)):
            total += change
            passing += change if recorder.allocations[event.allocation].category in PASSING else 0
            tops[event.phase] = max(tops[event.phase], (total, -index))
            max_passing = max_passing if event.phase == STEP else max(max_passing, passing)
        # The event of the peak has index -at; events[: 1 - at] ends with it.
        phase, (top, at) = max(tops.items(), key=lambda item: item[1])
        made = recorder.allocations[events[-at].allocation] if events else Allocation("", "", phase)
        by_phase = {name: _by_category(recorder, events[: 1 - index]) for name, (_, index) in tops.items()}
        return cls(
            num_bytes=top,
            phase=phase,
            operation=made.operation,
            path=made.path,
            by_category=by_phase[phase],
            by_phase=by_phase,
            passing_bytes=max_passing,
            holders=_holders(recorder, events[: 1 - at]),
            timeline=_timeline(recorder, events),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return asdict(self)


def _changes(events: Sequence[Event]) -> Iterator[tuple[Event, int]]:
    """Yield each event with the bytes that it adds or removes."""
    sizes: dict[int, int] = {}
    for event in events:
        yield event, event.num_bytes - sizes.get(event.allocation, 0)
        sizes[event.allocation] = event.num_bytes


def _by_category(recorder: Recorder, events: Sequence[Event]) -> dict[str, int]:
    """Return the live bytes after some events."""
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for event, change in _changes(events):
        found[recorder.allocations[event.allocation].category] += change
    return found


def _holders(recorder: Recorder, events: Sequence[Event]) -> list[Holder]:
    sizes: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    last_sizes = {event.allocation: event.num_bytes for event in events}
    for index, num_bytes in last_sizes.items():
        if num_bytes:
            made = recorder.allocations[index]
            key = made.category, re.sub(r"(?<![^.])\d+(?![^.])", "*", made.path), made.operation
            sizes[key] += num_bytes
            counts[key] += 1
    largest = sizes.most_common(MAX_HOLDERS)
    return [Holder(*key, num_bytes=num_bytes, count=counts[key]) for key, num_bytes in largest]


def _timeline(recorder: Recorder, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the maximum of each of `POINTS` stretches of events."""
    stretch = max(1, -(-len(events) // POINTS))
    now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    points: list[dict[str, Any]] = []
    total, top = 0, -1
    for index, (event, change) in enumerate(_changes(events)):
        now[recorder.allocations[event.allocation].category] += change
        total += change
        if index % stretch == 0:
            points.append({})
            top = -1
        if total > top:
            top = total
            points[-1] = {"phase": event.phase, **now}
    return points
