"""Search the longest sequence of a recipe that fits a device, with and without host memory.

Each length is a dry run (planner/dry_run.py) with `data.context_length` of that length and a batch whose rows
are repeated to it. Memory is nearly linear in the length, so that the search interpolates: after the first
length one step usually comes within a granule, and two more show that it fits and one granule more does not.

Seconds are those of the predicted FLOPs at 40 % of the device's peak, the fraction that MosaicML's LLM
Foundry publishes for dense models of this size on H100s (40 to 46 %). They are an expectation: nothing is
timed. The causal half of attention is not counted, copies to the host neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_eff.core.errors import PRE_RUN_ERRORS
from lightning_eff.core.text import WIDTH, human_bytes, text_table
from lightning_eff.kernels.devices import Device
from lightning_eff.planner import gpus
from lightning_eff.planner.advice import CHECKPOINTING, Compose
from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
from lightning_eff.planner.dry_run import ExampleBatch, dry_run
from lightning_eff.planner.prediction import Prediction, reason_of
from lightning_eff.report.meter import samples_and_tokens
from lightning_eff.report.recording import CATEGORIES

GRANULE = 1024
"""Tokens to which a length is rounded down."""
MAX_TOKENS = 1 << 20
"""Longest length that is tried."""
MAX_RUNS = 6
"""Dry runs of one search."""
EFFICIENCY = 0.4
"""Fraction of a device's peak that a step is expected to reach."""
ON_DEVICE, WITH_HOST = "on the device", "with host memory"
LENGTH = "data.context_length"
Forecast = Callable[[int], MemoryForecast]
"""Predict a step with sequences of so many tokens."""


@dataclass(frozen=True)
class LongestSequence:
    """Result of a search.

    Args:
        where: Where the inputs of recomputed blocks are kept.
        words: Overrides that this takes.
        num_tokens: Longest length that fits; 0 if none was found.
        forecast: At that length; at the shortest one that was tried if none fits.
        too_long: Shortest length that does not fit; None if all that were tried fit.
        num_runs: Dry runs.
    """

    where: str
    words: Sequence[str]
    num_tokens: int
    forecast: MemoryForecast
    too_long: int | None
    num_runs: int

    @classmethod
    def of(
        cls, where: str, words: Sequence[str], tried: Mapping[int, MemoryForecast], free_bytes: int
    ) -> LongestSequence:
        """Evaluate the lengths that a search has tried."""
        fits = {length: _fits(forecast, free_bytes) for length, forecast in tried.items()}
        longest = max((length for length in fits if fits[length]), default=0)
        too_long = min((length for length in fits if not fits[length]), default=None)
        return cls(where, words, longest, tried[longest or min(tried)], too_long, len(tried))

    @property
    def about(self) -> str:
        """What the search found out about the next length."""
        words = f" ({' '.join(self.words)})" if self.words else ""
        fits = [f"{self.num_tokens:,} tokens fit"] if self.num_tokens else []
        fails = [f"{self.too_long:,} do not"] if self.too_long is not None else ["longer ones were not tried"]
        reason = self.forecast.prediction.reason
        return f"{self.where}{words}: {', '.join([*fits, *fails])}" + (f": {reason}" if reason else "")

    def step_s(self, device: Device | gpus.GPU, dtype: torch.dtype) -> float | None:
        """Return the seconds that a batch is expected to take; None where that is not known."""
        flops = self.forecast.prediction.flops - self.forecast.prediction.masked_flops
        peak = gpus.peak(device, dtype)
        return flops / (EFFICIENCY * peak) if self.num_tokens and peak else None


def search(
    forecast: Forecast, start: int, free_bytes: int, *, granule: int = GRANULE, max_runs: int = MAX_RUNS
) -> dict[int, MemoryForecast]:
    """Predict lengths until one fits and the next one, a granule longer, does not; return all by length.

    Args:
        forecast: Of a length in tokens. A length that cannot be predicted counts as one that does not fit.
        start: Length to begin with, rounded down to a granule.
        free_bytes: What a step may need.
        granule: Tokens between two lengths.
        max_runs: Lengths that are tried at most.
    """
    tried: dict[int, MemoryForecast] = {}
    used: dict[int, int] = {}
    low, high, length = 0, MAX_TOKENS // granule * granule + granule, max(granule, start // granule * granule)
    while low < length < high and len(tried) < max_runs:
        found = tried[length] = forecast(length)
        if found.peak is not None and found.num_bytes is not None:
            if not used:  # without any tokens: what the model and its optimizer keep
                kept = sum(found.peak.by_category[name] for name in CATEGORIES[:4])
                used[0] = min(kept, found.num_bytes)
            used[length] = found.num_bytes
        low, high = (length, high) if _fits(found, free_bytes) else (low, length)
        guess = _interpolate(used, low, high, free_bytes)
        if guess >= high:  # which cannot be predicted, or is the limit
            guess = (low + high) // 2 if high in tried else MAX_TOKENS
        length = min(max(guess // granule, low // granule + 1), high // granule - 1) * granule
    return tried


def _fits(forecast: MemoryForecast, free_bytes: int) -> bool:
    return forecast.num_bytes is not None and forecast.num_bytes <= free_bytes


def _interpolate(used: Mapping[int, int], low: int, high: int, free_bytes: int) -> int:
    """Return the length that takes `free_bytes` by the line through the two known lengths next to it."""
    below, above = ([n for n in sorted(used) if n <= low], [n for n in sorted(used) if n >= high])
    pair = [*below[-1:], *above[:1]] if above else below[-2:]
    if len(pair) < 2:
        return (low + high) // 2
    first, second = pair
    slope = (used[second] - used[first]) / (second - first)
    return int(first + (free_bytes - used[first]) / slope) if slope > 0 else MAX_TOKENS


@dataclass(frozen=True)
class LongestSequences:
    """The longest sequence with each place for block inputs, as a section of `plan`."""

    device: Device | gpus.GPU
    dtype: torch.dtype
    num_rows: int = 0
    """Sequences of a batch."""
    found: list[LongestSequence] = field(default_factory=list[LongestSequence])
    reason: str = ""
    """Why there is none."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        rows = [
            {
                "where": each.where,
                "overrides": list(each.words),
                "num_tokens": each.num_tokens,
                "too_long": each.too_long,
                "peak_bytes": each.forecast.num_bytes,
                "by_category": each.forecast.peak.by_category if each.forecast.peak is not None else None,
                "host_bytes": each.forecast.prediction.host_bytes,
                "expected_step_s": each.step_s(self.device, self.dtype),
            }
            for each in self.found
        ]
        return {"rows": self.num_rows, "efficiency": EFFICIENCY, "found": rows, "reason": self.reason}

    def __str__(self) -> str:
        if self.reason:
            return f"no longest sequence: {self.reason}"
        forecasts = [each.forecast for each in self.found]
        sizes = {
            name: [each.peak.by_category[name] if each.peak is not None else 0 for each in forecasts]
            for name in CATEGORIES
        }
        sizes["total"] = [each.num_bytes or 0 for each in forecasts]
        sizes["host memory"] = [each.prediction.host_bytes for each in forecasts]
        rows = [["tokens", *(f"{each.num_tokens:,}" for each in self.found)]]
        rows += [[name, *map(human_bytes, numbers)] for name, numbers in sizes.items() if any(numbers)]
        times = [each.step_s(self.device, self.dtype) for each in self.found]
        name, peak = str(self.dtype).removeprefix("torch."), gpus.peak(self.device, self.dtype)
        expected = [] if peak else [f"time of a step: unknown, as the speed of {self.device.name} in {name}"]
        if peak and any(times):
            rows.append(["expected step", *("-" if time is None else f"{time:.3g} s" for time in times)])
            expected = [
                f"expected, not measured: time of a batch of {self.num_rows} at {EFFICIENCY:.0%} of the "
                f"{peak / 1e12:.0f} TFLOP/s of {self.device.name} in {name}; copies to the host are not "
                "included"
            ]
        title = f"longest sequence on {self.device.name}"
        table = text_table([title, *(each.where for each in self.found)], rows, width=WIDTH)
        return "\n".join([table, *(each.about for each in self.found), *expected])


@dataclass(frozen=True)
class _Lengths:
    """A recipe at any length."""

    compose: Compose
    memory: DeviceMemory
    example: ExampleBatch

    def forecast(self, words: Sequence[str], num_tokens: int) -> MemoryForecast:
        """Predict a length; one that cannot be composed is a prediction without a peak."""
        sys.stderr.write(f" predicting {' with '.join([f'{num_tokens:,} tokens', *words])}\n")
        try:
            values = self.compose([*words, f"{LENGTH}={num_tokens}"])
        except PRE_RUN_ERRORS as error:
            return MemoryForecast(Prediction(reason=reason_of(error), error=error), self.memory)
        example = self.example.with_length(num_tokens)
        memory = self.memory
        found = dry_run(values, example, is_cuda=memory.is_cuda, capability=memory.capability)
        return MemoryForecast(found, memory)


def longest_sequences(
    compose: Compose,
    memory: DeviceMemory,
    device: Device | gpus.GPU,
    dtype: torch.dtype,
    *,
    granule: int = GRANULE,
) -> LongestSequences:
    """Search with the recipe's own techniques, and on a GPU with block inputs in host memory too.

    Args:
        compose: Compose the recipe with further overrides.
        memory: Memory of the device.
        device: Peak of the device.
        dtype: Of matrix products.
        granule: Tokens to which a length is rounded down.
    """
    result = LongestSequences(device, dtype)
    values = compose(())
    start = (values.get("data") or {}).get("context_length")
    if not isinstance(start, int):
        return replace(result, reason=f"the recipe's data has no length to vary ({LENGTH})")
    try:
        example = ExampleBatch.of(values)
        result = replace(result, num_rows=samples_and_tokens(example.with_length(granule).batch)[0])
    except Exception as error:  # noqa: BLE001 - a user's data module may raise anything
        return replace(result, reason=reason_of(error))
    lengths = _Lengths(compose, memory, example)
    for where, words in _places(values, is_cuda=memory.is_cuda).items():
        tried = search(partial(lengths.forecast, words), start, memory.free_bytes, granule=granule)
        found = LongestSequence.of(where, words, tried, memory.free_bytes)
        result.found.append(found)
        start = max(found.num_tokens, granule)
    if all(each.forecast.peak is None for each in result.found):
        return replace(result, reason=result.found[0].forecast.prediction.reason)
    return result


def _places(values: Mapping[str, Any], *, is_cuda: bool) -> Mapping[str, Sequence[str]]:
    """Return where the inputs of recomputed blocks may be kept, with the overrides that this takes."""
    policy = ((values.get("callbacks") or {}).get("gradient_checkpointing") or {}).get("policy")
    offload = [*([] if policy else ["+callbacks=gradient_checkpointing"]), f"{CHECKPOINTING}=offload"]
    places = {ON_DEVICE: [f"{CHECKPOINTING}=full"] if policy == "offload" else []}
    return places | ({WITH_HOST: [] if policy == "offload" else offload} if is_cuda else {})
