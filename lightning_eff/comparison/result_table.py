"""Summarize the rounds of each trial in one row, and render the rows as a table or a page.

Other load on the machine can only slow a trial down, so the fastest round is closest to the true speed.
The table also shows how much slower the slowest round was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_eff.core.text import human_bytes, text_table
from lightning_eff.report import charts
from lightning_eff.report.display import render_page

MEASURED, NOT_RUN, FAILED = "measured", "not run", "failed"
NO_EFFECT, CHANGES_LOSS, DIVERGES = "no effect", "changes the loss", "diverges"
BASELINE = "baseline"
HEADER = ("technique", "samples/s", "x base", "peak", "x base", "loss diff", "status")
SLOW_FIRST_BATCH_S = 5.0


@dataclass(frozen=True)
class TrialResult:
    """The outcome of one trial in one round: status, efficiency report, and a reason if not measured."""

    status: str
    reason: str = ""
    report: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class ComparisonRow:
    """A row of the table; its ratios are relative to the baseline, and missing figures are None.

    judgement.py fills in the ratios, the difference of losses, and `excluded`.

    Args:
        technique: Name of the trial.
        status: `measured`, `not run` or `failed`.
        reason: Why the trial was not measured, or why some of its rounds failed.
        overrides: Overrides that turn the recipe into this trial.
        samples_per_s: Throughput of the fastest round.
        samples_per_s_spread: Throughput of the fastest round minus the throughput of the slowest round.
        peak_bytes: Live bytes on a CPU, `max_memory_allocated` on a GPU.
        losses: Pairs of a step and its loss.
        loss: Mean loss over the last quarter of the steps.
        loss_difference: Mean difference from the baseline's loss, in the last quarter of the common steps.
        first_batch_s: Seconds of the longest batch before timing started, compilation included.
        num_rounds: Number of rounds in which the trial was measured.
        techniques: Techniques of the run by name; True if a technique promises the loss of the plain run.
        idle: Callbacks and strategies without effect; names that are also idle in the baseline are removed.
        precision: Precision of the Trainer.
        draws_random_numbers: Whether training draws random numbers.
        excluded: Why the row is excluded from the verdict: `no effect`, `changes the loss` or `diverges`.
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
    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    loss: float | None = None
    loss_difference: float | None = None
    first_batch_s: float | None = None
    num_rounds: int = 0
    techniques: dict[str, bool] = field(default_factory=dict[str, bool])
    idle: list[str] = field(default_factory=list[str])
    precision: str = ""
    draws_random_numbers: bool = False
    excluded: str = ""


def summarize_rounds(name: str, overrides: list[str], results: Sequence[TrialResult]) -> ComparisonRow:
    """Return the row of a trial from its overrides and its results, one per round."""
    measured = [result for result in results if result.status == MEASURED]
    if not measured:
        last = results[-1] if results else TrialResult(NOT_RUN, "interrupted before its turn")
        return ComparisonRow(name, last.status, last.reason, overrides)

    def figures(key: str) -> list[Any]:
        return [value for result in measured if (value := result.report["measured"].get(key))]

    # All rounds train with the same seed, so losses and ledger are taken from the first measured round.
    rates, report = figures("samples_per_s"), measured[0].report
    losses = [(int(step), float(loss)) for step, loss in report.get("losses", ())]
    ledger: Sequence[Mapping[str, Any]] = report.get("ledger", ())
    failed = [result.reason for result in results if result.status == FAILED]
    return ComparisonRow(
        name,
        MEASURED,
        f"{len(failed)} of {len(results)} rounds failed: {failed[0]}" if failed else "",
        overrides,
        # Take the fastest round, because other processes can only slow a round down.
        samples_per_s=max(rates, default=None),
        samples_per_s_spread=max(rates) - min(rates) if len(rates) > 1 else None,
        # The largest peak, since a run needs this memory in its worst round.
        peak_bytes=max(figures("peak_bytes"), default=None),
        losses=losses,
        loss=last_quarter([loss for _, loss in losses]),
        first_batch_s=max(figures("first_batch_s"), default=None),
        num_rounds=len(measured),
        techniques={entry["technique"]: entry.get("exact", False) for entry in ledger},
        # Other groups are left out: checkpoint_io/durable has no effect, since a trial saves no checkpoint.
        idle=[
            entry["technique"]
            for entry in ledger
            if entry["status"] == NO_EFFECT and entry["technique"].startswith(("callbacks/", "strategy/"))
        ],
        precision=report.get("precision", ""),
        draws_random_numbers=report.get("draws_random_numbers", False),
    )


def last_quarter(values: Sequence[float]) -> float | None:
    """Return the mean of the last quarter of the values (at least one value), or None without values."""
    last = values[-max(1, len(values) // 4) :]
    return sum(last) / len(last) if last else None


def comparison_table(rows: Sequence[ComparisonRow]) -> str:
    """Return the table for a terminal."""
    return text_table(HEADER, [cells(row) for row in rows])


def cells(row: ComparisonRow) -> tuple[str, ...]:
    """Return a row's cells as text, with `-` for each missing figure."""
    rate = "-" if row.samples_per_s is None else f"{row.samples_per_s:.1f}"
    if row.samples_per_s_spread is not None:
        rate += f" (-{row.samples_per_s_spread:.1f})"
    peak = "-" if row.peak_bytes is None else human_bytes(row.peak_bytes)
    ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.speed_ratio, row.peak_ratio)]
    ratios[0] += " (noise)" * (row.excluded == NO_EFFECT and row.speed_ratio is not None)
    difference = "-"
    if row.loss_difference is not None:
        difference = f"{row.loss_difference:+.2g}" if row.loss_difference else "0 (exact)"
    idle = f"{NO_EFFECT}: {', '.join(name.rpartition('/')[2] for name in row.idle)}" if row.idle else ""
    remark = row.reason or row.excluded or idle
    status = f"{row.status}: {remark}" if remark else row.status
    if row.status == MEASURED and (row.first_batch_s or 0.0) > SLOW_FIRST_BATCH_S:
        status += f"{';' if remark else ','} first batch {row.first_batch_s:.0f} s"
    return (row.technique, rate, ratios[0], peak, ratios[1], difference, status)


def comparison_page(comparison: Mapping[str, Any], rows: Sequence[ComparisonRow]) -> str:
    """Return the HTML page for the content of `compare.json` and the rows of its table."""
    speeds = {row.technique: row.speed_ratio for row in rows if row.speed_ratio}
    peaks = {row.technique: row.peak_ratio for row in rows if row.peak_ratio}
    both = {name: (peaks[name], speed) for name, speed in speeds.items() if name in peaks}
    caption = "each row by its peak memory and speed, as multiples of the baseline's: higher is faster, "
    caption += "further left is smaller"
    axes = ("peak memory, times the baseline's", "speed, times the baseline's")
    notes = (
        f"Optimizer steps per trial: {comparison['steps']}, rounds: {comparison['rounds']}. "
        "Each trial ran in its own process, with the same seed and global batch. The speed is the fastest "
        "round's; the number in brackets is how much slower the slowest round was. Peak memory is the "
        "allocator's on a GPU, live bytes on a CPU."
    )
    page = {
        "title": f"Comparison of {comparison['recipe']}",
        "verdict": comparison["verdict"],
        "charts": [charts.scatter("Speed against memory", caption, both, BASELINE, *axes)] if both else [],
        "tables": [("All figures", HEADER, [cells(row) for row in rows])],
        "notes": notes,
        "environment": comparison["environment"],
        "command": comparison["command"],
        "raw": comparison,
    }
    return render_page(page)
