"""Show an efficiency report as one HTML page: a verdict, figures, charts the baseline's beside, tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_eff.core.text import human_bytes
from lightning_eff.report.html import (
    BASELINE_COLOR,
    Chart,
    Point,
    Series,
    byte_unit,
    histogram,
    line_chart,
    render_page,
    stacked_chart,
)
from lightning_eff.report.module_tracker import PHASES
from lightning_eff.report.recording import CATEGORIES
from lightning_eff.report.summary import baseline_verdict, key_figures, run_verdict

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
    charts = [*_memory_charts(report, baseline), *_speed_charts(report, baseline)]
    charts += _training_charts(report, baseline)
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
        charts=charts,
        tables=_tables(report, memory),
        config=config,
    )


def notebook_frame(report: Mapping[str, Any]) -> str:
    """Return the page as an element of a notebook, in a frame of its own so that its style stays there."""
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


def _drawable(points: Iterable[Sequence[Any]]) -> list[Point]:
    """Return points without those whose value is nan or infinity, which JSON has as text, or too large."""
    return [(float(x), float(y)) for x, y in points if abs(float(y)) < LARGEST]


def _series(name: str, points: Iterable[Sequence[Any]], color: int = 0, scale: float = 1.0) -> list[Series]:
    """Return a series in a list, which is empty if less than two points can be drawn."""
    shown = [(x, y / scale) for x, y in _drawable(points)]
    return [Series(name, shown, color)] if len(shown) > 1 else []


def _memory_charts(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Chart]:
    """Return live bytes of the first steps by category, and memory over the run."""
    charts: list[Chart] = []
    memory: Mapping[str, Any] = report.get("memory") or {}
    timeline: Sequence[Mapping[str, Any]] = memory.get("timeline", ())
    if len(timeline) > 1:
        path = f" in {memory['path']}" if memory["path"] else ""
        at = f"{memory['phase']}: {memory['operation'] or 'before the first operation'}{path}"
        caption = f"live bytes by category; the peak, {human_bytes(memory['num_bytes'])}, is in the {at}"
        size, unit = byte_unit(max(sum(moment[name] for name in CATEGORIES) for moment in timeline))
        values = {name: [moment[name] / size for moment in timeline] for name in CATEGORIES}
        x_name = "moments of the first steps, in order"
        charts.append(stacked_chart("Memory of the first steps", caption, values, x_name, unit))
    held, peak = (report.get("series", {}).get(name, ()) for name in ("held_bytes", "peak_bytes"))
    if held:
        size, unit = byte_unit(max(num_bytes for _, num_bytes in [*held, *peak]))
        name = "reserved by the allocator" if peak else "resident memory of the process"
        drawn = _series(name, held, scale=size) + _series("peak allocated so far", peak, 5, size)
        drawn += _overlay(drawn, baseline, "held_bytes", size)
        if drawn:
            caption = f"{name}: {human_bytes(held[0][1])} at first, {human_bytes(held[-1][1])} at last"
            charts.append(
                line_chart("Memory over the run", caption, drawn, "optimizer step", unit, lowest=0.0)
            )
    return charts


def _overlay(
    drawn: Sequence[Series], baseline: Mapping[str, Any], name: str, scale: float = 1.0
) -> list[Series]:
    """Return the baseline's series, if the run has one to compare it to."""
    points = baseline.get("series", {}).get(name, ())
    return _series("baseline", points, BASELINE_COLOR, scale) if drawn else []


def _speed_charts(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Chart]:
    """Return samples/s, the times of batches as a histogram, and waits for data."""
    series: Mapping[str, Any] = report.get("series", {})
    measured: Mapping[str, Any] = report["measured"]
    charts: list[Chart] = []
    if rates := _series("this run", series.get("samples_per_s", ())):
        values = [rate for _, rate in rates[0].points]
        caption = f"from {min(values):.1f} to {max(values):.1f} samples/s on each device"
        drawn = rates + _overlay(rates, baseline, "samples_per_s")
        charts.append(line_chart("Throughput", caption, drawn, "timed batch", "samples/s", lowest=0.0))
    times: Sequence[float] = series.get("batch_times_ms", ())
    if len(times) > 1 and max(times) > 0.0:
        others: Sequence[float] = baseline.get("series", {}).get("batch_times_ms", ())
        shown = [each for each in (times, others) if each]
        top = max(min(max(each), SLOW * each[len(each) // 2]) for each in shown)
        median, slowest = measured.get("batch_time_s"), times[-1]  # not of `times`, which may be thinned
        caption = f"{measured.get('num_batches', len(times))} batches: "
        caption += "" if median is None else f"median {1e3 * median:.1f} ms, "
        caption += f"slowest {slowest:.1f} ms" + (" (in the last column)" if slowest > top else "")
        charts.append(histogram("Time per batch", caption, shown, "ms", top))
    waits = _series("this run", series.get("data_wait_ms", ()))
    if waits and (longest := max(wait for _, wait in waits[0].points)) > LEAST_WAIT_MS:
        caption = (
            f"at most {longest:.1f} ms a batch, {measured.get('data_wait_share') or 0.0:.1%} of the time"
        )
        drawn = waits + _overlay(waits, baseline, "data_wait_ms")
        charts.append(line_chart("Wait for data", caption, drawn, "timed batch", "ms a batch", lowest=0.0))
    return charts


def _training_charts(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Chart]:
    """Return the losses, the other metrics of validation, learning rates and the gradient's norm."""
    validation: Mapping[str, Any] = report.get("validation", {})
    series: Mapping[str, Any] = report.get("series", {})
    charts = _loss_chart(report, baseline, {k: v for k, v in validation.items() if "loss" in k.lower()})
    others = [name for name in validation if "loss" not in name.lower() or not charts][:MAX_METRICS]
    for name in others:
        if drawn := _series("this run", validation[name]):
            caption = f"{name}: {drawn[0].points[-1][1]:.4g} at the last validation"
            drawn += _series("baseline", baseline.get("validation", {}).get(name, ()), BASELINE_COLOR)
            charts.append(line_chart(f"Validation: {name}", caption, drawn, "optimizer step", name))
    for title, key in (("Learning rate", "learning_rate"), ("Gradient norm", "gradient_norm")):
        names = [name for name in series if name.startswith(key)][:MAX_METRICS]
        drawn: list[Series] = []
        for number, name in enumerate(names):
            label = f"optimizer {number + 1}" if len(names) > 1 else "this run"
            drawn += _series(label, series[name], number + (number >= BASELINE_COLOR))
        if drawn:
            last = ", ".join(f"{each.points[-1][1]:.4g}" for each in drawn)
            caption = f"{title.lower()} of the last step that was recorded: {last}"
            drawn += _overlay(drawn, baseline, key)
            charts.append(line_chart(title, caption, drawn, "optimizer step", title.lower(), lowest=0.0))
    return charts


def _loss_chart(
    report: Mapping[str, Any], baseline: Mapping[str, Any], validation: Mapping[str, Any]
) -> list[Chart]:
    losses: Sequence[Any] = report.get("losses", ())
    drawn = _series("training", losses)
    if not drawn:
        return []
    values = [loss for _, loss in drawn[0].points]
    caption = f"training loss from {values[0]:.4g} to {float(losses[-1][1]):.4g}; lowest {min(values):.4g}"
    if lost := len(losses) - len(values):
        caption += f"; {lost} point{'s' if lost > 1 else ''} not drawn"
    for color, (name, points) in enumerate([*validation.items()][: MAX_METRICS - 2], 2):
        drawn = [*_series(name, points, color), *drawn]  # in front: it has fewer points
        caption += f"; {name} {float(points[-1][1]):.4g} at the last validation"
    drawn += _series("baseline", baseline.get("losses", ()), BASELINE_COLOR)
    return [line_chart("Loss", caption, drawn, "optimizer step", "loss")]


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
