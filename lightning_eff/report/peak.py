"""Find the peak of a recorded step: bytes, phase, operation, categories and the largest holders.

The meter (for the report) and predict.py call `Peak.of` to replay a `Recorder`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_eff.report import recording
from lightning_eff.report.module_tracker import BACKWARD, PHASES, STEP, merged_path
from lightning_eff.report.recording import CATEGORIES, Allocation, Event, Recorder

MAX_HOLDERS = 12
"""Maximum number of holders (groups of storages) that are listed."""
PASSING = (recording.BATCH, recording.ACTIVATIONS, recording.TEMPORARIES)
POINTS = 200
"""Maximum number of points in a timeline."""
NOUNS = dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "linear", "convolution"), "output of") | {
    "_log_softmax": "log-probabilities in", "_to_copy": "cast in", "empty": "workspace in",
}  # fmt: skip
"""Description of a forward operation's result, to which the module's name is appended."""
BACKWARD_NOUNS = {
    "_log_softmax_backward_data": "gradient of the logits in",
    "nll_loss_backward": "gradient of the log-probabilities in",
}


@dataclass(frozen=True)
class Holder:
    """A group of storages that are alive at the peak and differ only in the number of their layer."""

    category: str
    operation: str
    name: str
    """Description, for example `logits of lm_head [1016, 2048]`, with the shape if all shapes are equal."""
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """Memory of a step at its peak and over time.

    Args:
        num_bytes: Maximum of live bytes.
        phase: Phase in which the peak occurs.
        operation: Operation whose allocation reached the peak; empty if the peak precedes the first
            operation.
        path: Name of the module that ran the operation.
        by_category: Bytes at the peak by category.
        by_phase: Bytes by category at the peak of each phase.
        passing_bytes: Maximum total of the batch, activations and temporaries outside the optimizer step. No
            sharding strategy divides these bytes.
        holders: The largest holders at the peak.
        timeline: Event number, phase and bytes by category, at up to `POINTS` moments.
    """

    num_bytes: int
    phase: str
    operation: str
    path: str
    by_category: dict[str, int]
    by_phase: dict[str, dict[str, int]]
    passing_bytes: int
    holders: list[Holder]
    timeline: list[dict[str, Any]] = field(repr=False)

    @classmethod
    def of(cls, recorder: Recorder, *, block_bytes: int = 1, on_device: bool = False) -> Peak:
        """Replay a record to find its peak.

        Args:
            recorder: The record of finished steps.
            block_bytes: Allocation granularity; each storage is rounded up to a multiple of `block_bytes`.
            on_device: Whether to leave out storages that stay in host memory.
        """
        left_out = recorder.on_host if on_device else set[int]()
        events = [event for event in recorder.events if event.allocation not in left_out]
        stretch = max(1, -(-len(events) // POINTS))
        sizes: dict[int, int] = {}
        now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        # By phase: maximum of live bytes, and negated index of its event, so that the earliest of equal
        # maxima wins.
        tops: dict[str, tuple[int, int]] = dict.fromkeys(PHASES, (0, -len(events)))
        by_phase = {phase: dict(now) for phase in PHASES}
        timeline: list[dict[str, Any]] = []
        total = top_of_stretch = max_passing = 0
        for index, event in enumerate(events):
            # Round up to a multiple of the block, as the allocator would reserve it.
            size = -(-event.num_bytes // block_bytes) * block_bytes
            change = size - sizes.get(event.allocation, 0)
            sizes[event.allocation] = size
            now[recorder.allocations[event.allocation].category] += change
            total += change
            if (total, -index) > tops[event.phase]:
                tops[event.phase], by_phase[event.phase] = (total, -index), dict(now)
            if event.phase != STEP:
                max_passing = max(max_passing, sum(now[category] for category in PASSING))
            # Keep only the maximum of each stretch of events.
            if index % stretch == 0:
                timeline.append({})
                top_of_stretch = -1
            if total > top_of_stretch:
                top_of_stretch = total
                timeline[-1] = {"event": index + 1, "phase": event.phase, **now}
        phase, (top, at) = max(tops.items(), key=lambda item: item[1])
        made = recorder.allocations[events[-at].allocation] if events else Allocation("", "", phase)
        return cls(
            num_bytes=top,
            phase=phase,
            operation=made.operation,
            path=made.path,
            by_category=by_phase[phase],
            by_phase=by_phase,
            passing_bytes=max_passing,
            holders=_holders(recorder, events[: 1 - at], block_bytes),  # up to the peak, inclusive
            timeline=timeline,
        )


def host_bytes(recorder: Recorder) -> int:
    """Return the peak bytes of storages that stay in host memory, even if the run uses a GPU."""
    sizes: dict[int, int] = {}
    live = top = 0
    for event in recorder.events:
        if event.allocation in recorder.on_host:
            live += event.num_bytes - sizes.get(event.allocation, 0)
            sizes[event.allocation] = event.num_bytes
            top = max(top, live)
    return top


def _holders(recorder: Recorder, events: Sequence[Event], block_bytes: int) -> list[Holder]:
    """Return the groups of storages with the most bytes after these events."""
    sizes: Counter[tuple[str, str, str]] = Counter()
    shapes: defaultdict[tuple[str, str, str], list[tuple[int, ...]]] = defaultdict(list)
    # Later events replace earlier events, so these are the sizes at the end of `events`.
    last_sizes = {event.allocation: event.num_bytes for event in events}
    for index, num_bytes in last_sizes.items():
        if num_bytes:
            made = recorder.allocations[index]
            key = made.category, made.operation, _name_of(made)
            sizes[key] += -(-num_bytes // block_bytes) * block_bytes
            shapes[key].append(made.shape)
    holders: list[Holder] = []
    for (category, operation, name), num_bytes in sizes.most_common(MAX_HOLDERS):
        found = shapes[category, operation, name]
        shape = f" {list(found[0])}" if len({*found}) == 1 and found[0] else ""
        holders.append(Holder(category, operation, f"{name}{shape}", num_bytes, len(found)))
    return holders


def _name_of(made: Allocation) -> str:
    """Return a readable name for a storage; corresponding storages of repeated blocks share one name."""
    noun, path = NOUNS.get(made.operation, f"result of {made.operation} in"), merged_path(made.path)
    if made.category in (recording.PARAMETERS, recording.BUFFERS):
        return path
    if made.category in (recording.STATE, recording.BATCH):
        return made.category
    if made.category == recording.GRADIENTS:
        return f"gradient of {path}"
    if made.phase == STEP:
        return f"result of {made.operation} in the optimizer step"
    if made.is_logits:
        noun = "logits of"
    elif made.phase == BACKWARD and not made.recomputed:
        noun = BACKWARD_NOUNS.get(made.operation, "gradient in")
    elif "softmax" in made.operation and made.shape[-1:] == made.shape[-2:-1]:
        noun = "attention scores of"
    elif "attention" in made.operation:
        noun = "output of"
    is_outside = path in ("", "(root)")
    return noun.rpartition(" ")[0] if is_outside else f"{noun} {path}"
