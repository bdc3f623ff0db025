"""What trials have measured, as rows: the fastest round, ratios to the baseline, differences of loss.

Whatever else a machine does only slows a trial down, so the fastest of its rounds is nearest to what the
technique costs; how far the slowest one is from it is told beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_eff.core.text import human_bytes, text_table

MEASURED, PREDICTED, NOT_RUN, FAILED = "measured", "predicted", "not run", "failed"
HEADER = ("technique", "samples/s", "x base", "peak", "x base", "loss diff", "status")


@dataclass(frozen=True)
class TrialResult:
    """What one process has to say of one trial in one round.

    Args:
        status: `measured`, `not run` or `failed`.
        reason: Why not, in one line.
        report: The efficiency report; empty unless measured.
    """

    status: str
    reason: str = ""
    report: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class ComparisonRow:
    """A row of the table; absent figures are None.

    Args:
        technique: What was on.
        status: `measured`, `predicted`, `not run` or `failed`.
        reason: Why it was not measured, or what to know of it.
        overrides: What makes it of the recipe.
        samples_per_s: Of the fastest round.
        samples_per_s_spread: What the slowest one had less.
        speed_ratio: Against the baseline.
        peak_bytes: Live bytes on a CPU, `max_memory_allocated` on a GPU.
        peak_ratio: Against the baseline.
        predicted_peak_bytes: By the same step on fake tensors.
        losses: Of each step.
        loss: Mean over the last quarter of the steps.
        loss_difference: To the baseline's in the last quarter of the steps that both have.
        first_batch_s: Longest batch before timing began; compiling is in it.
        num_rounds: Processes that measured it.
    """

    technique: str
    status: str
    reason: str = ""
    overrides: list[str] = field(default_factory=list[str])
    samples_per_s: float | None = None
    samples_per_s_spread: float | None = None
    speed_ratio: float | None = None
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    predicted_peak_bytes: int | None = None
    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    loss: float | None = None
    loss_difference: float | None = None
    first_batch_s: float | None = None
    num_rounds: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)


def summarize_rounds(name: str, overrides: Sequence[str], results: Sequence[TrialResult]) -> ComparisonRow:
    """Put the rounds of a trial together.

    Args:
        name: The trial's.
        overrides: What makes it.
        results: One of each round that it took part in.
    """
    measured = [each for each in results if each.status == MEASURED]
    if not measured:
        last = results[-1] if results else TrialResult(NOT_RUN, "its turn did not come")
        return ComparisonRow(name, last.status, last.reason, list(overrides))
    figures = [each.report["measured"] for each in measured]
    rates = [each["samples_per_s"] for each in figures if each.get("samples_per_s")]
    peaks = [each["peak_bytes"] for each in figures if each.get("peak_bytes")]
    firsts = [each["first_batch_s"] for each in figures if each.get("first_batch_s")]
    losses = [(int(step), float(loss)) for step, loss in measured[0].report.get("losses", ())]
    return ComparisonRow(
        name,
        MEASURED,
        _remarks(name, results, measured[0].report),
        list(overrides),
        samples_per_s=max(rates) if rates else None,
        samples_per_s_spread=max(rates) - min(rates) if len(rates) > 1 else None,
        peak_bytes=max(peaks) if peaks else None,
        losses=losses,
        loss=_last([loss for _, loss in losses]),
        first_batch_s=max(firsts) if firsts else None,
        num_rounds=len(measured),
    )


def compare_to_baseline(rows: Sequence[ComparisonRow], baseline: ComparisonRow) -> None:
    """Fill in what compares each row to the baseline."""
    for each in rows:
        if each.samples_per_s and baseline.samples_per_s:
            each.speed_ratio = each.samples_per_s / baseline.samples_per_s
        if each.peak_bytes and baseline.peak_bytes:
            each.peak_ratio = each.peak_bytes / baseline.peak_bytes
        if each is not baseline:
            known = dict(baseline.losses)
            each.loss_difference = _last([loss - known[step] for step, loss in each.losses if step in known])


def gain(each: ComparisonRow) -> float:
    """Return how much a row helps: its speed's ratio over its memory's; 1 where neither changes.

    Example:
        >>> gain(Row("x", MEASURED, speed_ratio=2.0, peak_ratio=0.5))
        4.0
    """
    return (each.speed_ratio or 1.0) / (each.peak_ratio or 1.0)


def format_rows(rows: Sequence[ComparisonRow]) -> str:
    """Return the table for a terminal."""
    return text_table(HEADER, [cells(each) for each in rows])


def format_noise(rows: Sequence[ComparisonRow]) -> list[str]:
    """Say, in a line or none, how far rounds of the same trial are apart.

    Example:
        >>> noise([Row("x", MEASURED, samples_per_s=10.0, samples_per_s_spread=2.0)])
        [' rounds of a trial differ by 20% here (median): smaller differences in speed say nothing']
    """
    apart = [
        each.samples_per_s_spread / each.samples_per_s
        for each in rows
        if each.samples_per_s and each.samples_per_s_spread is not None
    ]
    words = "rounds of a trial differ by {:.0%} here (median): smaller differences in speed say nothing"
    if apart:
        return [f" {words.format(statistics.median(apart))}"]
    measured = any(each.samples_per_s for each in rows)
    return [" one round: how far apart two of them are is not known, nor what a difference says"] * measured


def cells(each: ComparisonRow) -> tuple[str, ...]:
    """Return a row's cells in words, `-` where there is nothing."""
    rate = "-" if each.samples_per_s is None else f"{each.samples_per_s:.1f}"
    if each.samples_per_s_spread is not None:
        rate += f" (-{each.samples_per_s_spread:.1f})"
    status = f"{each.status}: {each.reason}" if each.reason else each.status
    if each.first_batch_s is not None and each.status == MEASURED and each.first_batch_s > 5.0:
        status += f"{';' if each.reason else ','} first batch {each.first_batch_s:.0f} s"
    return (
        each.technique,
        rate,
        "-" if each.speed_ratio is None else f"{each.speed_ratio:.2f}",
        _peak(each),
        "-" if each.peak_ratio is None else f"{each.peak_ratio:.2f}",
        _difference(each.loss_difference),
        status,
    )


def _peak(each: ComparisonRow) -> str:
    """Return what was measured, or in brackets what is predicted."""
    if each.peak_bytes is not None:
        return human_bytes(each.peak_bytes)
    return "-" if each.predicted_peak_bytes is None else f"({human_bytes(each.predicted_peak_bytes)})"


def _difference(value: float | None) -> str:
    if value is None:
        return "-"
    return "0 (exact)" if value == 0.0 else f"{value:+.2g}"


def _last(values: Sequence[float]) -> float | None:
    """Return the mean over the last quarter of some values, None of none."""
    last = values[-max(1, len(values) // 4) :]
    return sum(last) / len(last) if last else None


def _remarks(name: str, results: Sequence[TrialResult], report: Mapping[str, Any]) -> str:
    """Say what is to be known of a row beside its figures."""
    failed = [each.reason for each in results if each.status == FAILED]
    if failed:
        return f"{len(failed)} of {len(results)} rounds failed: {failed[0]}"
    return _idle(name, report)


def _idle(name: str, report: Mapping[str, Any]) -> str:
    """Name techniques that had no effect; durable saves do not count, for nothing is saved meanwhile."""
    idle = [
        each["technique"].rpartition("/")[2]
        for each in report.get("ledger", ())
        if each["status"] == "no effect" and each["technique"].startswith(("callbacks/", "strategy/"))
    ]
    alone = len(idle) == 1 and (name == idle[0] or name.startswith("optimizer="))
    return "no effect" if alone else f"no effect: {', '.join(idle)}" if idle else ""
