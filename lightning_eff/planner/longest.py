"""Find the longest sequence with which a recipe fits a device, by a search over `data.context_length`.

`plan` calls `longest_sequence`. Each length needs one forecast, with a batch whose rows are repeated to that
length. A length that cannot be predicted, for example beyond the model's positions, counts as too long.
Memory is nearly linear in the length, so the first guesses come from a line through two known lengths. The
search takes about five predictions. Plain bisection would take ten predictions, most of them for long
sequences, which are slow to predict.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_eff.core.errors import PRE_RUN_ERRORS
from lightning_eff.core.text import human_bytes
from lightning_eff.planner.advice import AdvisedRecipe
from lightning_eff.planner.forecast import MemoryForecast, forecast
from lightning_eff.prediction.predict import Prediction, reason_of

GRANULE = 1024
"""Lengths are multiples of this number of tokens."""
MAX_TOKENS = 1 << 20
"""Largest number of tokens that is tried."""
NUM_GUESSES = 6
"""Number of predictions after which the search bisects."""


@dataclass(frozen=True)
class LongestSequence:
    """The longest sequence that fits, with its memory; if none fits, `num_tokens` is 0 with a `reason`."""

    device: str
    num_tokens: int = 0
    too_long: int | None = None
    """The next length, which does not fit; None if `MAX_TOKENS` fits."""
    peak_bytes: int | None = None
    host_bytes: int = 0
    reason: str = ""


def longest_sequence(recipe: AdvisedRecipe, *, granule: int = GRANULE) -> LongestSequence:
    """Search for the longest sequence, up to `MAX_TOKENS`, with which a recipe fits.

    Args:
        recipe: The recipe to lengthen.
        granule: Lengths are multiples of this number of tokens.
    """
    memory, example = recipe.memory, recipe.example
    start = (recipe.values.get("data") or {}).get("context_length")
    if not isinstance(start, int):
        reason = "the recipe's data have no length to vary (data.context_length)"
        return LongestSequence(memory.name, reason=reason)
    try:
        example.with_length(granule)
    except ValueError as error:
        return LongestSequence(memory.name, reason=reason_of(error))
    tried: dict[int, MemoryForecast] = {}
    low, high = 0, MAX_TOKENS // granule + 1  # in granules: the longest that fits, the shortest that does not
    length = min(max(1, start // granule), high - 1)
    while high - low > 1:
        num_tokens = length * granule
        sys.stderr.write(f" predicting {num_tokens:,} tokens\n")
        try:
            values = recipe.compose([f"data.context_length={num_tokens}"])
            tried[length] = forecast(values, memory, example.with_length(num_tokens))
        except PRE_RUN_ERRORS as error:
            tried[length] = MemoryForecast(Prediction(reason=reason_of(error), error=error), memory)
        # Invariant: `low` fits (or is 0), and `high` does not (or is beyond the limit).
        low, high = (length, high) if tried[length].fits else (low, length)
        length = _next_length(tried, low, high, memory.free_bytes)
    too_long = high * granule if high in tried else None
    if not low:
        shortest = tried[1]
        needs = f"{granule:,} tokens need {human_bytes(shortest.num_bytes or 0)}"
        reason = shortest.prediction.reason or needs
        return LongestSequence(memory.name, too_long=too_long, reason=reason)
    num_bytes, host_bytes = tried[low].num_bytes, tried[low].prediction.host_bytes
    return LongestSequence(memory.name, low * granule, too_long, num_bytes, host_bytes)


def _next_length(tried: Mapping[int, MemoryForecast], low: int, high: int, free_bytes: int) -> int:
    """Return the length between `low` and `high` to try next, in granules."""
    middle = (low + high) // 2
    sizes = {length: each.num_bytes for length, each in tried.items() if each.num_bytes}
    if len(tried) >= NUM_GUESSES or (high in tried and high not in sizes):
        return middle
    if len(sizes) < 2:
        # One size gives no line, so a length that fits grows by a factor of 8. Otherwise the range is halved.
        return min(8 * low, high - 1) if low else middle
    first, second = sorted(sizes, key=lambda length: abs(sizes[length] - free_bytes))[:2]
    # A line through the two sizes nearest to the free memory predicts the length that fills this memory.
    slope = (sizes[second] - sizes[first]) / (second - first)
    guess = int(first + (free_bytes - sizes[first]) / slope) if slope > 0 else high
    return min(max(guess, low + 1), high - 1)
