"""Search the longest sequence of a recipe that fits a device: a bisection of `data.context_length`.

Each length is a dry run (planner/dry_run.py) with a batch whose rows are repeated to it. A length that cannot
be predicted, for example of a model with fewer positions, counts as one that does not fit. Memory is nearly
linear in the length, so that the first lengths are where a line through two known ones meets the limit: a
handful of predictions in place of ten, most of which would be of long sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
NUM_GUESSES = 6
"""Predictions after which lengths are halved only, however memory grows."""


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
    start = values["data"]["context_length"]
    tried: dict[int, MemoryForecast] = {}
    low, high = 0, MAX_TOKENS // granule + 1  # in granules: the longest that fits, the shortest that does not
    length = min(max(1, start // granule), high - 1)
    while high - low > 1:
        num_tokens = length * granule
        sys.stderr.write(f" predicting {num_tokens:,} tokens\n")
        forecast = MemoryForecast(_predict(compose, example, memory, num_tokens), memory)
        tried[length] = forecast
        if forecast.num_bytes is not None and forecast.num_bytes <= memory.free_bytes:
            low = length
        else:
            high = length
        length = _next_length(tried, low, high, memory.free_bytes)
    too_long = high * granule if high in tried else None
    if not low:
        shortest = tried[1]
        needs = f"{granule:,} tokens need {human_bytes(shortest.num_bytes or 0)}"
        reason = shortest.prediction.reason or needs
        return LongestSequence(memory.name, too_long=too_long, reason=reason)
    longest = tried[low]
    host_bytes = longest.prediction.host_bytes
    return LongestSequence(memory.name, low * granule, too_long, longest.num_bytes, host_bytes)


def _next_length(tried: Mapping[int, MemoryForecast], low: int, high: int, free_bytes: int) -> int:
    """Return the length between `low` and `high` to try next, in granules."""
    middle = (low + high) // 2
    sizes = {length: forecast.num_bytes for length, forecast in tried.items() if forecast.num_bytes}
    if len(tried) >= NUM_GUESSES or (high in tried and high not in sizes):
        return middle
    if len(sizes) < 2:
        return min(8 * low, high - 1) if low else middle
    first, second = sorted(sizes, key=lambda length: abs(sizes[length] - free_bytes))[:2]
    slope = (sizes[second] - sizes[first]) / (second - first)
    guess = int(first + (free_bytes - sizes[first]) / slope) if slope > 0 else high
    return min(max(guess, low + 1), high - 1)


def _predict(compose: Compose, example: ExampleBatch, memory: DeviceMemory, num_tokens: int) -> Prediction:
    try:
        values: Any = compose([f"data.context_length={num_tokens}"])
    except PRE_RUN_ERRORS as error:
        return Prediction(reason=reason_of(error), error=error)
    batch = example.with_length(num_tokens)
    return dry_run(values, batch, is_cuda=memory.is_cuda, capability=memory.capability)
