"""Format the planner's forecasts, advice and tables as text, or as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_eff.core.text import WIDTH, human_bytes, text_table
from lightning_eff.planner.advice import Advice
from lightning_eff.planner.forecast import SYNTHETIC_BATCH, MemoryForecast
from lightning_eff.planner.longest import LongestSequence
from lightning_eff.planner.sharding import ShardingTable
from lightning_eff.report.module_tracker import PHASES

COLUMNS = ("weights", "gradients", "optimizer", "gathered", "buffers", "activations", "device", "host")
"""Columns of the table that lists memory by number of devices."""
MAX_HOLDERS = 8
"""Maximum number of tensors shown, the largest at the peak first."""


@dataclass(frozen=True)
class Plan:
    """All results of `plan` for one recipe.

    Args:
        forecast: Predicted memory of a step of the recipe.
        advice: Savings of further techniques; None if not requested.
        longest: The longest sequence that fits; None if not requested.
    """

    forecast: MemoryForecast
    advice: Advice | None = None
    longest: LongestSequence | None = None

    def __str__(self) -> str:
        sharding = self.forecast.sharding
        sections = [forecast_text(self.forecast), "\n".join(_attention_lines(self.forecast))]
        sections += [advice_text(self.advice)] if self.advice is not None else []
        sections += [longest_text(self.longest)] if self.longest is not None else []
        sections.append(sharding_text(sharding))
        if sharding.num_devices in sharding.shares:
            sections.append(verdict(self.forecast, sharding.num_devices))
        return "\n\n".join(filter(None, sections))

    def as_dict(self) -> dict[str, Any]:
        """Return the results as plain values for JSON."""
        forecast, attention = self.forecast, self.forecast.prediction.attention
        division, memory = forecast.sharding, forecast.memory
        found: dict[str, Any] = {
            "division": division.rows(),
            "division_about": division.about,
            "division_assumed": division.assumed,
            "peak": {
                "device": memory.name,
                "device_bytes": memory.memory_bytes,
                "peak_bytes": forecast.num_bytes,
                "fits": None if forecast.num_bytes is None else forecast.fits,
                "host_bytes": forecast.host_bytes,
                "tensors": None if forecast.peak is None else asdict(forecast.peak),
                "assumed": forecast.assumed,
                "reason": forecast.prediction.reason,
                "warned": forecast.prediction.warned,
            },
            "attention": {
                "calls": [row.as_dict() for row in attention],
                "scores_not_held_bytes": forecast.scores_not_held_bytes,
            },
        }
        parts = {"advice": self.advice, "longest": self.longest}
        return found | {name: asdict(part) for name, part in parts.items() if part is not None}


def forecast_text(forecast: MemoryForecast) -> str:
    """Return as text the peak of a step, by phase and by tensor, and the assumptions behind the peak."""
    peak, memory = forecast.peak, forecast.memory
    warned = [f"warning: {text}" for text in forecast.prediction.warned]
    if peak is None or forecast.num_bytes is None:
        return "\n".join([f"peak not predicted: {forecast.prediction.reason}", *warned])
    left = memory.free_bytes - forecast.num_bytes  # negative if the step does not fit
    fits = f"fits, {human_bytes(left)} left" if left >= 0 else f"does not fit: {human_bytes(-left)} short"
    path = f" in {peak.path}" if peak.path else ""
    what = "a step on one device, without sharding" if forecast.sharding.shares else "a step"
    needed = f"{human_bytes(forecast.num_bytes)} of {human_bytes(memory.memory_bytes)} on {memory.name}"
    headline = f"predicted peak of {what}: {needed}: {fits}; reached in the {peak.phase} "
    headline += f"({peak.operation or 'start'}{path})"
    on_host = forecast.host_bytes
    headline += f"\nin host memory: {human_bytes(on_host)} more" if on_host else ""
    notes = [f"{'note' if text == SYNTHETIC_BATCH else 'assumed'}: {text}" for text in forecast.assumed]
    # Bytes by category at the peak of each phase.
    kept = [name for name in peak.by_category if any(peak.by_phase[phase][name] for phase in PHASES)]
    rows = [[name, *(human_bytes(peak.by_phase[phase][name]) for phase in PHASES)] for name in kept]
    rows.append(["total", *(human_bytes(sum(peak.by_phase[phase].values())) for phase in PHASES)])
    phases = [f"{phase} (peak)" if phase == peak.phase else phase for phase in PHASES]
    holders = [
        [human_bytes(each.num_bytes), str(each.count), each.category, each.name]
        for each in peak.holders[:MAX_HOLDERS]
    ]
    header = ["at the peak", "tensors", "category", "what"]
    tables = [text_table(["peak of phase", *phases], rows), text_table(header, holders, width=WIDTH)]
    return "\n".join([headline, *tables, *notes, *warned])


def _attention_lines(forecast: MemoryForecast) -> Iterator[str]:
    for row in forecast.prediction.attention:
        remedy = f" (try: {row.remedy})" if row.remedy else ""
        yield f"attention on {forecast.memory.name}: {row}{remedy}"
    if forecast.scores_not_held_bytes:
        yield f" {human_bytes(forecast.scores_not_held_bytes)} of scores not held"


def advice_text(advice: Advice) -> str:
    """Return as text the techniques to add, in order, and a table of what each technique saves alone."""
    if advice.reason:
        return f"no advice: {advice.reason}"
    lines = ["the batch fits: techniques that save memory only pay off with a larger batch"]
    if not advice.fits:
        lines = ["the batch does not fit; add in this order:"]
        lines += [
            f" {' '.join(each.words)}: peak {human_bytes(each.peak_bytes or 0)}" for each in advice.chosen
        ]
    cells: list[list[str]] = []
    for saving in advice.alone:
        saved = "-"
        if saving.saved_bytes is not None:
            saved = ("-" if saving.saved_bytes < 0 else "") + human_bytes(abs(saving.saved_bytes))
        ratio = "-" if saving.flops_ratio is None else f"x{saving.flops_ratio:.2f}"
        cells.append([saved, ratio, " ".join(saving.words), saving.why])
    lines.append(text_table(["saves", "FLOPs", "alone", "effect"], cells, width=WIDTH))
    lines += ["time ran out before everything was tried"] if advice.unfinished else []
    return "\n".join(lines)


def longest_text(longest: LongestSequence) -> str:
    """Return as text the longest sequence that fits, or why no sequence fits."""
    if not longest.num_tokens:
        return f"no longest sequence on {longest.device}: {longest.reason}"
    host = f" and {human_bytes(longest.host_bytes)} of host memory" if longest.host_bytes else ""
    needs = f"{longest.num_tokens:,} tokens fit, with {human_bytes(longest.peak_bytes or 0)}{host}"
    above = "longer ones were not tried" if longest.too_long is None else f"{longest.too_long:,} do not fit"
    return f"longest sequence on {longest.device}: {needs}; {above}"


def sharding_text(sharding: ShardingTable) -> str:
    """Return as text the table of memory by number of devices; empty if the strategy does not shard."""
    if not sharding.shares:
        return sharding.about
    rows = sharding.rows()
    columns = {name: [row[f"{name}_bytes"] for row in rows] for name in COLUMNS}
    columns["per device"] = columns.pop("device")
    # A value that is the same for all numbers of devices is printed once, below the table.
    same = {title: sizes[0] for title, sizes in columns.items() if len({*sizes}) == 1}
    shown = {title: map(human_bytes, sizes) for title, sizes in columns.items() if title not in same}
    cells = zip((str(row["devices"]) for row in rows), *shown.values(), strict=True)
    table = text_table(["devices", *shown], [*cells])
    sizes = [f"{title} {human_bytes(size)}" for title, size in same.items() if size]
    on_each = [f" on any number of devices: {', '.join(sizes)}"] if sizes else []
    return "\n".join([sharding.about, table, *on_each, *(f"assumed: {text}" for text in sharding.assumed)])


def verdict(forecast: MemoryForecast, num_devices: int) -> str:
    """Summarize whether the run fits in each device's free memory, on `num_devices` devices."""
    sharding, memory = forecast.sharding, forecast.memory
    share, passing_bytes, on_host = sharding.shares[num_devices], sharding.passing_bytes, ""
    needed = share.device(passing_bytes or 0)
    if not memory.is_cuda:
        needed += share.host  # a CPU uses host memory
    elif share.host:
        on_host = f" and {human_bytes(share.host)} of host memory"
    left = memory.free_bytes - needed
    fits = f"fits on {memory.name}, {human_bytes(left)} left"
    if left < 0:
        fits = f"does not fit on {memory.name}, {human_bytes(-left)} short"
    about = "about " if passing_bytes is not None else "(without activations) "
    which = "the device needs" if num_devices == 1 else f"each of {num_devices} devices needs"
    return f"{which} {about}{human_bytes(needed)}{on_host}: {fits}"
