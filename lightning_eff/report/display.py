"""Show the content of `efficiency.json` as a sentence, as text for a terminal, and as an HTML page.

files.py, `EfficiencyReport` and the verbs `report` and `compare` call this module. Jinja fills the template
`report.html.j2` with one dictionary of plain values, which include the charts. Jinja escapes each value. The
page has no scripts and loads no styles or pictures, so it opens without a network.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jinja2

from lightning_eff.core.text import UNITS, human_bytes, human_count, text_table
from lightning_eff.report import charts
from lightning_eff.report.charts import BASELINE_COLOR, Chart, Series
from lightning_eff.report.history import Point, thinned
from lightning_eff.report.module_tracker import BACKWARD, FORWARD, PHASES, STEP
from lightning_eff.report.recording import CATEGORIES
from lightning_eff.report.step_time import DATA, OPTIMIZER, OTHER

Report = Mapping[str, Any]
FIGURES = {
    "batch_time_s": ("time per batch (median)", lambda x: f"{x * 1e3:.1f} ms"),
    "batch_time_p90_s": ("time per batch (p90)", lambda x: f"{x * 1e3:.1f} ms"),
    "samples_per_s": ("samples/s", lambda x: f"{x:.1f}"),
    "tokens_per_s": ("tokens/s", human_count),
    "flops_per_s": ("FLOP/s per device", human_count),
    "mfu": ("MFU", lambda x: f"{x:.1%}"),
    "peak_bytes": ("peak memory", human_bytes),
    "optimizer_state_bytes": ("optimizer state", human_bytes),
    "data_wait_share": ("data wait", lambda x: f"{x:.1%}"),
}
"""Label and format of each measured number, in the order shown."""
MAX_ATTENTION_LINES = 4
"""Maximum number of attention lines in the terminal text; the page and the ledger list all calls."""
MAX_LINES = 6
"""Maximum number of lines in one chart."""
LEAST_SHARE = 0.005
"""Minimum fraction of a step that a part must take to be shown."""
MAX_MODULE_WORDS = 3
"""Maximum number of modules in the terminal text; the page and the ledger list `step_time.MAX_MODULES`."""
PART_NAMES = {
    FORWARD: "the forward pass", BACKWARD: "the backward pass", OPTIMIZER: "the optimizer",
    DATA: "the input (data wait, copy to the device)", OTHER: "the rest (callbacks, logging)",
}  # fmt: skip
LARGEST = 1e20
"""Larger values are not drawn, because a diverged loss would flatten the rest of the line."""
LINE_COLORS = [color for color in range(7) if color != BASELINE_COLOR]
ADVICE = ("would save", "try", "what it acts on", "read")
EMPTY_PAGE: Report = {
    "title": "", "verdict": "", "ended": "", "failure": None, "figures": (), "lead": (), "charts": (),
    "tables": (), "notes": "", "environment": {}, "command": "", "config": "", "raw": {},
}  # fmt: skip
SERIES_CHARTS = (
    ("Throughput", "samples_per_s", "samples/s", "timed batch"),
    ("Data wait", "data_wait_ms", "ms a batch", "timed batch"),
    ("Learning rate", "learning_rate", "learning rate", "optimizer step"),
    ("Gradient norm", "gradient_norm", "gradient norm", "optimizer step"),
)
"""Chart title, name of the series (or prefix of several names), y axis, and x axis."""
CHARTED = ("losses", "series", "validation", "baseline")
"""Keys of the report that the page shows as charts, and omits from its raw JSON."""


def key_figures(report: Report) -> list[tuple[str, str]]:
    """Return the label and the formatted value of each measured figure."""
    measured: Report = report["measured"]
    return [
        (label, show(measured[key]))
        for key, (label, show) in FIGURES.items()
        if measured.get(key) is not None
    ]


def run_verdict(report: Report) -> str:
    """Summarize the end of a run in one or two sentences."""
    count, measured = report["num_steps"], report["measured"]
    steps, first = f"{count} optimizer step{'' if count == 1 else 's'}", report.get("first_step", 0)
    resumed = f"{first + 1} to {first + count}" if first and count else ""
    idle = [row["technique"] for row in report["ledger"] if row["status"] == "no effect"]
    no_effect = f" No effect: {', '.join(idle)}." if idle else ""
    losses = [(step, float(loss)) for step, loss in report.get("losses") or ()]  # NaN is text in JSON
    if losses and not math.isfinite(losses[-1][1]):
        last = next((step for step, loss in reversed(losses) if math.isfinite(loss)), 0)
        no_effect += f" The loss is {losses[-1][1]} after step {last}."
    after = f"after {steps}{resumed and f' ({resumed})'}: {report['reason']}"
    if report["status"] == "stopped":
        return f"Stopped {after}.{no_effect}"
    if report["status"] != "finished":
        return f"Failed {after}"
    timed = f"{measured['num_batches']} batch{'' if measured['num_batches'] == 1 else 'es'} timed"
    ended = [resumed, report["reason"], timed if measured["num_batches"] else "too few to measure speed"]
    return f"Finished {steps} ({'; '.join(filter(None, ended))}).{no_effect}"


def baseline_verdict(report: Report) -> str:
    """Return one sentence that compares a run to its baseline; empty if no figure can be compared."""
    baseline: Report = report.get("baseline") or {}
    ratios: dict[str, float] = {}
    for key in ("samples_per_s", "peak_bytes"):
        ours, theirs = report["measured"].get(key), baseline.get("measured", {}).get(key)
        if all(isinstance(each, int | float) and each for each in (ours, theirs)):  # NaN is text
            ratios[key] = ours / theirs
    if not ratios:
        return ""
    name = f"the baseline ({baseline['title']})"
    here, there = (each.get("environment", {}).get("device", "") for each in (report, baseline))
    name += f", which ran on {there}" if there and here != there else ""
    name += ", which failed" if baseline.get("status") == "failed" else ""
    if "samples_per_s" not in ratios:
        return f"{ratios['peak_bytes']:.2f} of the peak memory of {name}."
    memory = f", with {ratios['peak_bytes']:.2f} of its peak memory" if "peak_bytes" in ratios else ""
    return f"{ratios['samples_per_s']:.2f} times as fast as {name}{memory}."


def verdict(report: Report) -> str:
    """Compare a run to its baseline in one sentence.

    Without a baseline, the sentence names the part of a step that takes the most time, and the category that
    takes the most memory.
    """
    measured: Report = report["measured"]
    if report["status"] == "failed":
        return run_verdict(report)
    if compared := baseline_verdict(report):
        return compared
    parts: list[str] = []
    if shares := (report.get("time") or {}).get("parts"):
        name, share = max(shares.items(), key=lambda item: item[1])
        parts.append(f"{PART_NAMES[name]} takes {share:.0%} of the time")
    memory: Report = report.get("memory") or {}
    held: Mapping[str, int] = memory.get("by_category", {})
    if total := sum(held.values()):
        name, size = max(held.items(), key=lambda item: item[1])
        parts.append(
            f"{name} take {size / total:.0%} of the peak memory ({human_bytes(total)}{_largest(memory)})"
        )
    elif measured.get("peak_bytes"):
        parts.append(f"the peak memory is {human_bytes(measured['peak_bytes'])}")
    text = ", and ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else run_verdict(report)


def _largest(memory: Report) -> str:
    """Return text about the group of tensors with the most bytes at the peak; empty if no group is known."""
    holders = memory.get("holders")
    if not holders:
        return ""
    tensors = f"{holders[0]['count']} tensors, " if holders[0]["count"] > 1 else ""
    return f"; largest: {holders[0]['name']}, {tensors}{human_bytes(holders[0]['num_bytes'])}"


def report_text(report: Report) -> str:
    """Return the report as text for a terminal."""
    lines = [f"Efficiency report of {report['title']}. {run_verdict(report)}"]
    shown = " | ".join(f"{label} {value}" for label, value in key_figures(report))
    lines += [f" {shown}"] if shown else []
    lines += _time_lines(report.get("time") or {})
    lines += [f" tags: {', '.join(report['tags'])}"] if report.get("tags") else []
    peak: Report = report.get("memory") or {}
    held = Counter({name: size for name, size in peak.get("by_category", {}).items() if size}).most_common()
    if held:
        sizes = ", ".join(f"{name} {human_bytes(size)}" for name, size in held)
        lines.append(f" at the peak ({peak['phase']}): {sizes}{_largest(peak)}")
    if report.get("advice"):
        lines.append(text_table(ADVICE[:3], [row[:3] for row in _advice_rows(report)]))
        lines.append(" more about each: lightning-eff ls NAME, docs/techniques/NAME.md")
    attention = report.get("attention", ())
    lines += [f" attention: {row['text']}" for row in attention[:MAX_ATTENTION_LINES]]
    rows = [[row["technique"], row["status"], row["did"]] for row in report["ledger"]]
    if rows:
        lines.append(text_table(["technique", "status", "what it did"], rows))
    if report["status"] != "failed" and (compared := baseline_verdict(report)):
        lines.append(f" {compared}")
    return "\n".join(lines)


def _time_lines(found: Report) -> list[str]:
    """Return text lines about the parts of a step, and about the slowest modules in its forward pass."""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in _parts(found))
    modules = ", ".join(
        f"{row['path']} ({row['class']}) {row['share']:.0%}".replace(" ()", "")
        for row in found.get("modules", ())[:MAX_MODULE_WORDS]
    )
    shown = {f"of a step ({1e3 * found.get('step_s', 0.0):.1f} ms)": parts, "of its forward pass": modules}
    return [f" {name}: {text}" for name, text in shown.items() if text]


def _parts(found: Report) -> list[tuple[str, float]]:
    """Return the name and the fraction of each part that takes at least `LEAST_SHARE` of a step."""
    shares: Mapping[str, float] = found.get("parts", {})
    return [(PART_NAMES[name], share) for name, share in shares.items() if share >= LEAST_SHARE]


def report_page(report: Report, config: str = "") -> str:
    """Return the HTML page of a report; `config` is the run's config as YAML."""
    theirs = dict(key_figures(report["baseline"])) if report.get("baseline") else {}
    memory: Report = report.get("memory") or {}
    raw = {key: value for key, value in report.items() if key not in CHARTED}
    if memory:
        raw["memory"] = {key: value for key, value in memory.items() if key != "timeline"}
    sentence, ended = verdict(report), run_verdict(report)
    page = {
        "title": report["title"],
        "verdict": sentence,
        "ended": ended if ended != sentence else "",
        "failure": _failure(report),
        "figures": [(label, value, theirs.get(label, "")) for label, value in key_figures(report)],
        "lead": [("What would help", ADVICE, _advice_rows(report))] if report.get("advice") else [],
        "charts": _charts(report),
        "tables": _tables(report),
        "notes": " ".join((report.get("time") or {}).get("notes", ())),
        "environment": report["environment"],
        "command": report["command"],
        "config": config,
        "raw": raw,
    }
    return render_page(page)


def render_page(page: Mapping[str, Any]) -> str:
    """Return the HTML of a page.

    Args:
        page: Values by key; `EMPTY_PAGE` has the keys and their defaults. `failure` is a pair of the
            sentences and the overrides. An item of `figures` is a name, a value and the baseline's value.
            `lead` lists the tables above the charts, and `tables` lists the tables below the charts. A table
            is a title, a header and rows. A float in a row is a fraction, which is drawn as a bar. `raw` is
            shown as JSON at the end of the page.

    Example:
        >>> "a &lt; b" in render_page({"title": "a < b", "verdict": "fine"})
        True
    """
    folder = jinja2.PackageLoader("lightning_eff", "report")
    templates = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    content = {**EMPTY_PAGE, **page}
    raw = json.dumps(content["raw"], indent=1)
    return templates.get_template("report.html.j2").render({**content, "raw": raw})


def notebook_frame(report: Report) -> str:
    """Return the page inside an iframe, so that the page's style does not affect the notebook."""
    page = html.escape(report_page(report))
    return f'<iframe srcdoc="{page}" sandbox style="width: 100%; height: 45rem; border: 0"></iframe>'


def _failure(report: Report) -> tuple[Sequence[str], str] | None:
    """Return sentences that explain an OOM error, and overrides that would avoid the error."""
    found: Report = report.get("out_of_memory") or {}
    sentences = list(found.get("sentences", ()))
    if snapshot := report.get("memory_snapshot"):
        sentences.append(
            f"{snapshot} has every block of the CUDA allocator: open it on PyTorch's page memory_viz."
        )
    overrides = " ".join(found.get("overrides") or ())
    if overrides:
        size = human_bytes(found["peak_bytes"])
        sentences.append(f"With these overrides it fits; the predicted peak is {size}:")
    return (sentences, overrides) if sentences else None


def _advice_rows(report: Report) -> list[tuple[str, str, str, str]]:
    return [
        (
            "time" if row["saved_bytes"] is None else human_bytes(row["saved_bytes"]),
            row["try"],
            row["why"],
            f"lightning-eff ls {row['technique']}\ndocs/techniques/{row['technique'].rpartition('/')[2]}.md",
        )
        for row in report.get("advice", ())
    ]


def _tables(report: Report) -> list[tuple[str, Sequence[str], Sequence[Sequence[Any]]]]:
    """Return the title, the header and the rows of each table that has rows."""
    memory: Report = report.get("memory") or {}
    techniques = [
        (row["technique"], row["status"], row["did"], "\n".join(f"{k}={v}" for k, v in row["asked"].items()))
        for row in report["ledger"]
    ]
    phases: list[tuple[str, ...]] = []
    if len(memory.get("timeline", ())) > 1:
        sizes = {name: [memory["by_phase"][phase][name] for phase in PHASES] for name in CATEGORIES}
        sizes["total"] = [sum(memory["by_phase"][phase].values()) for phase in PHASES]
        phases = [(name, *map(human_bytes, row)) for name, row in sizes.items() if any(row)]
    attention = [
        (row["text"], "\n".join(dict.fromkeys(row["modules"])), row["remedy"])
        for row in report.get("attention", ())
    ]
    time: Report = report.get("time") or {}
    parts = [
        (share, f"{share:.1%}", f"{1e3 * share * time['step_s']:.1f}", name) for name, share in _parts(time)
    ]
    modules = [
        (row["share"], f"{1e3 * row['batch_s']:.2f}", f"{row['calls']:.3g}", row["path"], row["class"])
        for row in time.get("modules", ())
    ]
    holders = ("of the peak", "bytes", "what", "category")
    tables = [
        ("Techniques", ("technique", "status", "what it did", "requested"), techniques),
        ("Largest holders, predicted", holders, _holder_rows(report.get("out_of_memory") or {})),
        ("Largest holders at the peak", holders, _holder_rows(memory)),
        ("Time of a step", ("of the step", "share", "ms", "spent on"), parts),
        (
            "Modules of the forward pass",
            ("own time", "ms a batch", "calls a batch", "module", "class"),
            modules,
        ),
        ("Memory at the peak of each phase", ("category", *PHASES), phases),
        ("Attention of the first batch", ("what ran", "modules", "try"), attention),
    ]
    return [table for table in tables if table[2]]


def _holder_rows(held: Report) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for each in held.get("holders", ()):
        times = f" ({each['count']} tensors)" if each["count"] > 1 else ""
        size = f"{human_bytes(each['num_bytes'])}{times}"
        share = each["num_bytes"] / (held["num_bytes"] or 1)
        rows.append((share, size, each["name"], each["category"]))
    return rows


def _charts(report: Report) -> list[Chart]:
    """Return charts of memory, speed and training over the run; each chart also draws the baseline's line."""
    baseline: Report = report.get("baseline") or {}
    series, theirs = (each.get("series", {}) for each in (report, baseline))
    validation, their_validation = (each.get("validation", {}) for each in (report, baseline))
    drawn = _first_steps_chart(report.get("memory") or {})
    if held := series.get("held_bytes"):
        peak = series.get("peak_bytes", ())
        size, unit = _byte_unit(max(num_bytes for _, num_bytes in [*held, *peak]))
        title = "Memory reserved by the allocator" if peak else "Resident memory of the process"
        lines, compared = {"this run": held, "peak allocated so far": peak}, theirs.get("held_bytes", ())
        drawn += _line_chart(title, unit, lines, compared, size=size, lowest=0.0)
    # One line is reserved for the training loss.
    val_losses = [name for name in validation if "loss" in name.lower()][: MAX_LINES - 1]
    lines = {"training": report.get("losses", ())} | {name: validation[name] for name in val_losses}
    drawn += _line_chart("Loss", "loss", lines, baseline.get("losses", ()))
    for name in validation:
        if name not in val_losses or not report.get("losses"):
            lines, compared = {"this run": validation[name]}, their_validation.get(name, ())
            drawn += _line_chart(f"Validation: {name}", name, lines, compared)
    for title, key, y_name, x_name in SERIES_CHARTS:
        # With several optimizers, the series are learning_rate, learning_rate_2, ...
        names = [name for name in series if name.startswith(key)][:MAX_LINES]
        lines = {"this run" if name == key else name.replace("_", " "): series[name] for name in names}
        drawn += _line_chart(title, y_name, lines, theirs.get(key, ()), x_name=x_name, lowest=0.0)
    return drawn


def _line_chart(
    title: str,
    y_name: str,
    lines: Mapping[str, Iterable[Sequence[Any]]],
    baseline: Iterable[Sequence[Any]],
    *,
    x_name: str = "optimizer step",
    size: float = 1.0,
    lowest: float | None = None,
) -> list[Chart]:
    """Return a chart of lines and the baseline's line; the caption states the range of the first line.

    Values are divided by `size`, the number of bytes in the chart's unit. NaN, infinity and values above
    `LARGEST` are omitted. A line with fewer than two remaining points is omitted too. The list is empty if
    the first line is omitted, or if all points have the same value.
    """
    drawn: list[Series] = []
    colored = [*zip(lines.items(), LINE_COLORS, strict=False), (("baseline", baseline), BASELINE_COLOR)]
    for (name, given), color in colored:
        # Comparing with LARGEST also drops NaN and infinity, which JSON stores as text.
        points: list[Point] = [(float(x), float(y) / size) for x, y in given if abs(float(y)) < LARGEST]
        if len(points) > 1:
            drawn.append(Series(name, points, color))
    first = next(iter(lines), "")
    if not drawn or drawn[0].name != first or len({y for each in drawn for _, y in each.points}) == 1:
        return []
    values = [y for _, y in drawn[0].points]
    caption = f"{y_name} from {values[0]:.4g} to {values[-1]:.4g}; "
    caption += f"lowest {min(values):.4g}, highest {max(values):.4g}"
    if lost := len(list(lines[first])) - len(values):
        caption += f"; {lost} point{'s' if lost > 1 else ''} not drawn"
    # A line with few points, such as a validation loss, is drawn in front of longer lines. The baseline is
    # drawn behind all lines.
    drawn.sort(key=lambda each: (each.color == BASELINE_COLOR, len(each.points)))
    shown = [each._replace(points=thinned(each.points)) for each in drawn]
    return [charts.draw(title, caption, shown, x_name, y_name, lowest=lowest)]


def _first_steps_chart(memory: Report) -> list[Chart]:
    """Return a chart of the live bytes of the first steps, by category."""
    timeline: Sequence[Mapping[str, Any]] = memory.get("timeline", ())
    if len(timeline) < 2:
        return []
    peak = f"peak: {human_bytes(memory['num_bytes'])}"
    caption = f"live bytes by category; {peak}, in the {memory['phase']}{_largest(memory)}"
    size, unit = _byte_unit(max(sum(moment[name] for name in CATEGORIES) for moment in timeline))
    values = {name: [moment[name] / size for moment in timeline] for name in CATEGORIES}
    areas = charts.stacked([moment["event"] for moment in timeline], values)
    # A step ends with its optimizer phase.
    ends = {
        one["event"]: "end of the step"
        for one, following in pairwise(timeline)
        if one["phase"] == STEP != following["phase"]
    }
    top = max(timeline, key=lambda moment: sum(moment[name] for name in CATEGORIES))
    marks = ends | {top["event"]: peak}
    return [charts.draw("Memory of the first steps", caption, areas, "allocation events", unit, marks=marks)]


def _byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit that `human_bytes` uses for a size: the bytes in this unit, and the unit's name."""
    unit = human_bytes(largest).split()[1]
    return UNITS.get(unit, 1), unit
