"""Show an efficiency report as one HTML page: a verdict, figures, charts with the baseline's, tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_eff.core.text import human_bytes
from lightning_eff.report.history import Point
from lightning_eff.report.html import (
    BASELINE_COLOR,
    NUM_COLORS,
    Chart,
    Series,
    byte_unit,
    histogram,
    line_chart,
    render_page,
    stacked_chart,
)
from lightning_eff.report.module_tracker import PHASES
from lightning_eff.report.recording import CATEGORIES
from lightning_eff.report.summary import advice_rows, baseline_verdict, key_figures, run_verdict

MAX_METRICS = 6
"""Metrics of validation that have a chart."""
SLOW = 3.0
"""Batches that take longer than so many medians are in the last column."""
LEAST_WAIT_MS = 1.0
LARGEST = 1e20
"""Values from here on are not drawn: leather computes ticks in decimals of 28 digits."""
DETAILS = ("losses", "series", "validation", "baseline")
"""Keys that only the file has: the page shows them as charts."""
Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]


def report_page(report: Mapping[str, Any], config: str = "") -> str:
    """Return the page of the content of `efficiency.json`, with the run's config (YAML)."""
    baseline: Mapping[str, Any] = report.get("baseline") or {}
    theirs = dict(key_figures(baseline)) if baseline else {}
    figures = [(label, value, theirs.get(label, "")) for label, value in key_figures(report)]
    memory: Mapping[str, Any] = report.get("memory") or {}
    raw = {key: value for key, value in report.items() if key not in DETAILS}
    if memory:
        raw["memory"] = {key: value for key, value in memory.items() if key != "timeline"}
    one_sentence, ended = verdict(report), run_verdict(report)
    return render_page(
        report,
        raw,
        title=report["title"],
        verdict=one_sentence,
        ended=ended if ended != one_sentence else "",
        failure=_failure(report),
        figures=figures,
        charts=_charts(report, baseline),
        tables=_tables(report, memory),
        config=config,
    )


def notebook_frame(report: Mapping[str, Any]) -> str:
    """Return the page as an element of a notebook, in a frame, so that its style stays there."""
    page = html.escape(report_page(report))
    return f'<iframe srcdoc="{page}" sandbox style="width: 100%; height: 45rem; border: 0"></iframe>'


def verdict(report: Mapping[str, Any]) -> str:
    """Return one sentence: how a run compares to its baseline or, without one, what dominates it."""
    measured: Mapping[str, Any] = report["measured"]
    if report["status"] == "failed":
        return run_verdict(report)
    if compared := baseline_verdict(report):
        return compared
    parts: list[str] = []
    if (waiting := measured.get("data_wait_share")) is not None:
        subject, share = ("waiting for data", waiting) if waiting > 0.5 else ("computing", 1 - waiting)
        parts.append(f"{subject} takes {share:.0%} of the time")
    held: Mapping[str, int] = (report.get("memory") or {}).get("by_category", {})
    if total := sum(held.values()):
        name, size = max(held.items(), key=lambda item: item[1])
        parts.append(f"{name} take {size / total:.0%} of the peak memory ({human_bytes(total)})")
    elif measured.get("peak_bytes"):
        parts.append(f"the peak memory is {human_bytes(measured['peak_bytes'])}")
    text = ", and ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else run_verdict(report)


def _charts(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Chart]:
    """Return memory, speed and training over the run; each line next to the baseline's."""
    series, theirs = (each.get("series", {}) for each in (report, baseline))
    validation, their_validation = (each.get("validation", {}) for each in (report, baseline))
    charts = _first_steps_chart(report.get("memory") or {})
    if held := series.get("held_bytes"):
        peak = series.get("peak_bytes", ())
        size, unit = byte_unit(max(num_bytes for _, num_bytes in [*held, *peak]))
        title = "Memory reserved by the allocator" if peak else "Resident memory of the process"
        lines = {"this run": _scaled(held, size), "peak allocated so far": _scaled(peak, size)}
        compared = _scaled(theirs.get("held_bytes", ()), size)
        charts += _lines(title, unit, lines, compared, lowest=0.0)
    rates = {"this run": series.get("samples_per_s", ())}
    compared = theirs.get("samples_per_s", ())
    charts += _lines("Throughput", "samples/s", rates, compared, x_name="timed batch", lowest=0.0)
    charts += _batch_times_chart(report, theirs.get("batch_times_ms", ()))
    waits = series.get("data_wait_ms", ())
    if max((wait for _, wait in waits), default=0.0) > LEAST_WAIT_MS:
        compared = theirs.get("data_wait_ms", ())
        lines = {"this run": waits}
        charts += _lines("Wait for data", "ms a batch", lines, compared, x_name="timed batch", lowest=0.0)

    val_losses = [name for name in validation if "loss" in name.lower()][: MAX_METRICS - 2]
    lines = {"training": report.get("losses", ())} | {name: validation[name] for name in val_losses}
    charts += _lines("Loss", "loss", lines, baseline.get("losses", ()))
    metrics = [name for name in validation if "loss" not in name.lower() or not report.get("losses")]
    for name in metrics[:MAX_METRICS]:
        lines, compared = {"this run": validation[name]}, their_validation.get(name, ())
        charts += _lines(f"Validation: {name}", name, lines, compared)
    for title, key in (("Learning rate", "learning_rate"), ("Gradient norm", "gradient_norm")):
        # Several optimizers have learning_rate, learning_rate_2, ...
        names = [name for name in series if name.startswith(key)][:MAX_METRICS]
        lines = {name.replace("_", " "): series[name] for name in names}
        charts += _lines(title, title.lower(), lines, theirs.get(key, ()), lowest=0.0)
    return charts


def _scaled(points: Iterable[Sequence[Any]], size: float) -> list[Point]:
    return [(step, value / size) for step, value in points]


def _lines(
    title: str,
    y_name: str,
    lines: Mapping[str, Iterable[Sequence[Any]]],
    baseline: Iterable[Sequence[Any]],
    *,
    x_name: str = "optimizer step",
    lowest: float | None = None,
) -> list[Chart]:
    """Return a chart of lines and the baseline's, whose caption says the first one in numbers.

    Values that are nan or infinity, which JSON has as text, or too large are left out, and so are lines of
    less than two points; without the first line there is no chart.
    """
    drawn: list[Series] = []
    colors = [color for color in range(NUM_COLORS) if color != BASELINE_COLOR]
    colored = [*zip(lines.items(), colors, strict=False), (("baseline", baseline), BASELINE_COLOR)]
    for (name, given), color in colored:
        points = [(float(x), float(y)) for x, y in given if abs(float(y)) < LARGEST]
        if len(points) > 1:
            drawn.append(Series(name, points, color))
    first = next(iter(lines), "")
    if not drawn or drawn[0].name != first:
        return []
    values = [y for _, y in drawn[0].points]
    caption = f"{y_name} from {values[0]:.4g} to {values[-1]:.4g}; "
    caption += f"lowest {min(values):.4g}, highest {max(values):.4g}"
    if lost := len(list(lines[first])) - len(values):
        caption += f"; {lost} point{'s' if lost > 1 else ''} not drawn"
    # In front are lines of few points, such as a loss of validation; the baseline is behind all others.
    drawn.sort(key=lambda each: (each.color == BASELINE_COLOR, len(each.points)))
    return [line_chart(title, caption, drawn, x_name, y_name, lowest=lowest)]


def _first_steps_chart(memory: Mapping[str, Any]) -> list[Chart]:
    """Return live bytes of the first steps by category."""
    timeline: Sequence[Mapping[str, Any]] = memory.get("timeline", ())
    if len(timeline) < 2:
        return []
    path = f" in {memory['path']}" if memory["path"] else ""
    at = f"{memory['phase']}: {memory['operation'] or 'before the first operation'}{path}"
    caption = f"live bytes by category; the peak, {human_bytes(memory['num_bytes'])}, is in the {at}"
    size, unit = byte_unit(max(sum(moment[name] for name in CATEGORIES) for moment in timeline))
    values = {name: [moment[name] / size for moment in timeline] for name in CATEGORIES}
    x_name = "moments of the first steps, in order"
    return [stacked_chart("Memory of the first steps", caption, values, x_name, unit)]


def _batch_times_chart(report: Mapping[str, Any], baseline: Sequence[float]) -> list[Chart]:
    """Return a histogram of the times of batches."""
    times: Sequence[float] = report.get("series", {}).get("batch_times_ms", ())
    if len(times) < 2 or not max(times):
        return []
    shown = [each for each in (times, baseline) if each]
    top = max(min(max(each), SLOW * each[len(each) // 2]) for each in shown)
    median = report["measured"].get("batch_time_s")  # not of `times`, which may be thinned
    caption = "" if median is None else f"median {1e3 * median:.1f} ms, "
    caption += f"slowest {times[-1]:.1f} ms" + (" (in the last column)" if times[-1] > top else "")
    return [histogram("Time per batch", caption, shown, "ms", top)]


def _failure(report: Mapping[str, Any]) -> tuple[str, Sequence[str], str] | None:
    """Return heading, sentences and override of a run that was out of memory."""
    found: Mapping[str, Any] = report.get("out_of_memory") or {}
    sentences = list(found.get("sentences", ()))
    if snapshot := report.get("memory_snapshot"):
        sentences.append(
            f"{snapshot} has every block of the CUDA allocator: open it on PyTorch's page memory_viz."
        )
    if not sentences:
        return None
    if overrides := found.get("overrides"):
        size = human_bytes(found["peak_bytes"])
        sentences.append(f"With these overrides it fits; the predicted peak is {size}:")
    return "Memory", sentences, " ".join(overrides or ())


def _tables(report: Mapping[str, Any], memory: Mapping[str, Any]) -> list[Table]:
    """Return techniques, the memory of each phase, its largest holders, and attention."""
    tables: list[Table] = []
    failed: Mapping[str, Any] = report.get("out_of_memory") or {}
    for title, held in (("Largest holders, predicted", failed), ("Largest holders at the peak", memory)):
        if held.get("holders"):
            total = held["num_bytes"] or 1
            rows = [_holder_row(holder, total) for holder in held["holders"]]
            tables.append((title, ("of the peak", "bytes", "category", "where", "operation"), rows))
    techniques = [
        (row["technique"], "\n".join(f"{k}={v}" for k, v in row["asked"].items()), row["status"], row["did"])
        for row in report["ledger"]
    ]
    if techniques:
        tables.insert(0, ("Techniques", ("technique", "requested", "status", "what it did"), techniques))
    if advice := advice_rows(report):
        tables.append(("What would help", ("would save", "try", "what it acts on"), advice))
    if len(memory.get("timeline", ())) > 1:
        by_phase = memory["by_phase"]
        rows = [(name, *(by_phase[phase][name] for phase in PHASES)) for name in CATEGORIES]
        rows.append(("total", *(sum(by_phase[phase].values()) for phase in PHASES)))
        cells = [(name, *map(human_bytes, sizes)) for name, *sizes in rows if any(sizes)]
        tables.append(("Memory at the peak of each phase", ("category", *PHASES), cells))
    if report.get("attention"):
        rows = [
            (row["text"], "\n".join(dict.fromkeys(row["modules"])), row["remedy"])
            for row in report["attention"]
        ]
        tables.append(("Attention of the first batch", ("what ran", "modules", "try"), rows))
    return tables


def _holder_row(holder: Mapping[str, Any], total: int) -> tuple[float, str, str, str, str]:
    times = f" ({holder['count']} tensors)" if holder["count"] > 1 else ""
    size = f"{human_bytes(holder['num_bytes'])}{times}"
    return holder["num_bytes"] / total, size, holder["category"], holder["path"], holder["operation"]
