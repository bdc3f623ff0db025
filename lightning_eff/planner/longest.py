"""Search the longest sequence of a recipe that fits a device: a bisection of `data.context_length`.

Each length is a dry run (planner/dry_run.py) with a batch whose rows are repeated to it. A length that cannot
be predicted, for example of a model with fewer positions, counts as one that does not fit.
"""

from __future__ import annotations

import bisect
import sys
from dataclasses import dataclass
from typing import Any

from lightning_eff.core.errors import PRE_RUN_ERRORS
from lightning_eff.core.text import human_bytes
from lightning_eff.planner.advice import Compose
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.dry_run import ExampleBatch, dry_run
from lightning_eff.planner.prediction import Prediction, reason_of

GRANULE = 1024
"""Tokens to which a length is rounded down."""
MAX_TOKENS = 1 << 20
"""Longest length that is tried."""


@dataclass(frozen=True)
class LongestSequence:
    """The longest length that fits, 0 if none does, and what it needs; or why there is none to search."""

    device: str
    num_tokens: int = 0
    too_long: int | None = None
    """The next length, which does not fit; None if longer ones were not tried."""
    peak_bytes: int | None = None
    host_bytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if not self.num_tokens:
            return f"no longest sequence on {self.device}: {self.reason}"
        host = f" and {human_bytes(self.host_bytes)} of host memory" if self.host_bytes else ""
        needs = f"{self.num_tokens:,} tokens fit, with {human_bytes(self.peak_bytes or 0)}{host}"
        above = "longer ones were not tried" if self.too_long is None else f"{self.too_long:,} do not fit"
        return f"longest sequence on {self.device}: {needs}; {above}"


def longest_sequence(compose: Compose, memory: DeviceMemory, *, granule: int = GRANULE) -> LongestSequence:
    """Bisect the length of a recipe's sequences, up to `MAX_TOKENS`.

    Args:
        compose: Compose the recipe with further overrides.
        memory: Memory of the device.
        granule: Tokens to which a length is rounded down.
    """
    values = compose(())
    if not isinstance((values.get("data") or {}).get("context_length"), int):
        reason = "the recipe's data have no length to vary (data.context_length)"
        return LongestSequence(memory.name, reason=reason)
    try:
        example = ExampleBatch.of(values)
        example.with_length(granule)
    except Exception as error:  # noqa: BLE001 - a user's data module may raise anything
        return LongestSequence(memory.name, reason=reason_of(error))
    tried: dict[int, MemoryForecast] = {}

    def is_too_long(num_tokens: int) -> bool:
        sys.stderr.write(f" predicting {num_tokens:,} tokens\n")
        tried[num_tokens] = found = MemoryForecast(_predict(compose, example, memory, num_tokens), memory)
        return found.num_bytes is None or found.num_bytes > memory.free_bytes

    lengths = range(granule, MAX_TOKENS + 1, granule)
    num_fitting = bisect.bisect_left(lengths, True, key=is_too_long)  # noqa: FBT003 - False sorts before True
    too_long = lengths[num_fitting] if num_fitting < len(lengths) else None
    if not num_fitting:
        shortest = tried[granule]
        needs = f"{granule:,} tokens need {human_bytes(shortest.num_bytes or 0)}"
        reason = shortest.prediction.reason or needs
        return LongestSequence(memory.name, too_long=too_long, reason=reason)
    longest = tried[lengths[num_fitting - 1]]
    host_bytes = longest.prediction.host_bytes
    return LongestSequence(memory.name, lengths[num_fitting - 1], too_long, longest.num_bytes, host_bytes)


def _predict(compose: Compose, example: ExampleBatch, memory: DeviceMemory, num_tokens: int) -> Prediction:
    try:
        values: Any = compose([f"data.context_length={num_tokens}"])
    except PRE_RUN_ERRORS as error:
        return Prediction(reason=reason_of(error), error=error)
    batch = example.with_length(num_tokens)
    return dry_run(values, batch, is_cuda=memory.is_cuda, capability=memory.capability)
