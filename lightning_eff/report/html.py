"""The efficiency report as one self-contained HTML file, and the style that all HTML pages of the suite share.

Charts are inline SVG in a 1000 x 100 box, so a page opens without a network. Jinja escapes every value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from lightning_eff.core.text import human_bytes
from lightning_eff.report.recording import CATEGORIES, PHASES

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --line: #d9dee6; --paper: #fff; --mark: #2457c5;
  --pale: #dbe5fa; --c0: #2457c5; --c1: #8a93a3; --c2: #d9822b; --c3: #7b4fc9; --c4: #2a9d8f; --c5: #c8374b; --c6: #d4b106; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b2; --line: #333c4a; --paper: #12161d; --mark: #7fa8ff; --pale: #24324f;
    --c0: #6f9bff; --c1: #7d8796; --c2: #f0a45d; --c3: #a886f0; --c4: #57c7b9; --c5: #ef6f80; --c6: #e6cc4d; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-weight: 600; }
.wide { overflow-x: auto; } .figures td:not(:last-child), .figures th { white-space: nowrap; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-size: .85rem; color: var(--soft); } .number { text-align: right; white-space: nowrap; }
th.number { text-align: right; } .bar { min-width: 6rem; width: 55%; } .bar span { display: block; height: .6rem; margin-top: .45rem; background: var(--mark); }
pre { overflow-x: auto; font-size: .85rem; background: var(--pale); padding: .75rem; border-radius: .5rem; }
figure { margin: 0; } svg { display: block; width: 100%; height: 8rem; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); }
polyline { fill: none; stroke: var(--mark); } figcaption { color: var(--soft); font-size: .9rem; }
.stack polygon { stroke: none; } .key { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .4rem 0; font-size: .9rem; }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); } .c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); } .c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); } .c6 { fill: var(--c6); background: var(--c6); }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: .15rem; }
.key i, .bar span { print-color-adjust: exact; }
@media print { :root { --ink: #000; --paper: #fff; --soft: #444; } details { display: none; } }
"""
_PAGE_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ verdict }}</p>
<dl>{% for name, value in figures %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>{% endfor %}</dl>
<h2>Techniques</h2>
<div class="wide"><table>
<tr><th scope="col">technique</th><th scope="col">requested</th><th scope="col">status</th><th scope="col">what it did</th></tr>
{% for row in ledger %}<tr><td>{{ row.technique }}</td><td>{% for k, v in row.asked.items() %}{{ k }}={{ v }}<br>{% endfor %}</td>
<td>{{ row.status }}</td><td>{{ row.did }}</td></tr>
{% endfor %}</table></div>
{{ memory }}
{% for chart in charts %}<h2>{{ chart.title }}</h2>
<figure><svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{{ chart.label }}">
<polyline vector-effect="non-scaling-stroke" stroke-width="1.5" points="{{ chart.points }}"/></svg>
<figcaption>{{ chart.label }}</figcaption></figure>
{% endfor %}
<h2>Measured on</h2>
<p class="soft">{% for k, v in environment.items() %}{{ k }} {{ v }}{{ ", " if not loop.last }}{% endfor %}</p>
{% if command %}<h2>Reproduce</h2><pre>{{ command }}</pre>{% endif %}
{% if config %}<h2>Config</h2><details><summary>resolved</summary><pre>{{ config }}</pre></details>{% endif %}
<h2>Raw</h2>
<details><summary>JSON</summary><pre>{{ raw }}</pre></details>
</body>
</html>
"""
_MEMORY_TEMPLATE = """<h2>Memory</h2>
<p>{{ sentence }}</p>
<figure><svg class="stack" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{{ label }}">
{% for layer in layers %}<polygon class="c{{ layer.color }}" points="{{ layer.points }}"/>
{% endfor %}</svg><figcaption>{{ label }}</figcaption></figure>
<ul class="key">{% for layer in layers %}<li><i class="c{{ layer.color }}"></i>{{ layer.name }}</li>{% endfor %}</ul>
<div class="wide"><table class="figures"><tr><th scope="col">peak of phase</th>{% for phase in phases %}<th scope="col" class="number">{{ phase }}</th>{% endfor %}</tr>
{% for name, cells in table %}<tr><th scope="row">{{ name }}</th>{% for cell in cells %}<td class="number">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
"""
_TEMPLATES = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
MAX_POINTS = 500
"""Points of a chart; a screen cannot resolve more."""


def render_page(
    report: Mapping[str, Any],
    *,
    figures: Sequence[tuple[str, str]],
    times_s: Sequence[float],
    waits_s: Sequence[float],
    config: str = "",
) -> str:
    """Return the report as an HTML page.

    Args:
        report: Contents of the JSON ledger, with a `verdict`.
        figures: Names and formatted values of the numbers at the top.
        times_s: Duration of every timed batch.
        waits_s: Part of each duration that was a wait for data.
        config: Resolved config of the run, as YAML.

    Example:
        >>> report = {"title": "a < b", "verdict": "fine", "ledger": [], "environment": {}, "command": ""}
        >>> "a &lt; b" in render_page(report, figures=[], times_s=[], waits_s=[])
        True
    """
    return _TEMPLATES.from_string(_PAGE_TEMPLATE).render(
        **{key: report[key] for key in ("title", "verdict", "ledger", "environment", "command")},
        style=STYLE,
        figures=figures,
        charts=_charts(report.get("losses", ()), times_s, waits_s),
        memory=Markup(memory_section(report.get("memory") or {})),  # noqa: S704 - escaped there
        config=config,
        raw=json.dumps(report, indent=1),
    )


def memory_section(memory: Mapping[str, Any]) -> str:
    """Return the page's section on memory: live bytes stacked by category, and the table of phases.

    Args:
        memory: A `Peak` as a dictionary; empty if live bytes were not counted, which returns an empty section.

    Example:
        >>> memory_section({})
        ''
    """
    timeline: Sequence[Mapping[str, Any]] = memory.get("timeline", ())
    if len(timeline) < 2:
        return ""
    by_phase, peak = memory["by_phase"], human_bytes(memory["num_bytes"])
    kept = [name for name in CATEGORIES if any(point[name] for point in timeline)]
    table = [(name, [human_bytes(by_phase[phase][name]) for phase in PHASES]) for name in kept]
    table.append(("total", [human_bytes(sum(by_phase[phase].values())) for phase in PHASES]))
    # One polygon per category, stacked in order; the top of the box is the peak.
    below = [0.0] * len(timeline)
    width = 1000 / (len(timeline) - 1)
    layers: list[dict[str, Any]] = []
    for name in kept:
        above = [bottom + point[name] for bottom, point in zip(below, timeline, strict=True)]
        edge = [*enumerate(above), *reversed(list(enumerate(below)))]
        points = " ".join(f"{i * width:.1f},{98 - 96 * value / memory['num_bytes']:.1f}" for i, value in edge)
        layers.append({"name": name, "color": CATEGORIES.index(name), "points": points})
        below = above
    path = f" in {memory['path']}" if memory["path"] else ""
    operation = memory["operation"] or "before the first operation"
    return _TEMPLATES.from_string(_MEMORY_TEMPLATE).render(
        sentence=f"The peak is in the {memory['phase']}: {operation}{path}.",
        label=f"live bytes by category over the first steps, from 0 to {peak}",
        layers=layers,
        phases=PHASES,
        table=table,
    )


def polyline_points(values: Sequence[float], *, lowest: float | None = None) -> str:
    """Return SVG points of a line in a 1000 x 100 box; long series keep the maximum of each stretch.

    Args:
        values: In order, finite.
        lowest: Value at the bottom; None for the smallest one.

    Returns:
        Empty for fewer than two values.

    Example:
        >>> polyline_points([0.0, 1.0, 2.0], lowest=0.0)
        '0.0,98.0 500.0,50.0 1000.0,2.0'
        >>> polyline_points([1.0]), polyline_points([2.0, 2.0])
        ('', '0.0,50.0 1000.0,50.0')
    """
    if len(values) < 2:
        return ""
    stride = max(1, len(values) // MAX_POINTS)
    shown = [max(values[i : i + stride]) for i in range(0, len(values), stride)]
    bottom = min(shown) if lowest is None else lowest
    height = max(shown) - bottom
    # y points down in SVG: 98 is the bottom, 2 the top, 50 the middle for a constant.
    scale, base = (96.0 / height, 98.0) if height else (0.0, 50.0)
    return " ".join(
        f"{1000 * i / (len(shown) - 1):.1f},{base - scale * (value - bottom):.1f}"
        for i, value in enumerate(shown)
    )


def _charts(
    losses: Sequence[Sequence[Any]], times_s: Sequence[float], waits_s: Sequence[float]
) -> list[dict[str, str]]:
    """Return title, polyline points and label of the charts that have something to show."""
    found: list[tuple[str, str, str]] = []
    curve = [(int(step), float(value)) for step, value in losses]
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if len(finite) > 1:
        values = [value for _, value in finite]
        (first_step, first), (last_step, last) = finite[0], finite[-1]
        label = f"loss from {first:.4g} at step {first_step} to {last:.4g} at step {last_step}"
        label += f"; lowest {min(values):.4g}, highest {max(values):.4g}"
        if lost := len(curve) - len(finite):
            label += f"; {lost} point{'s' if lost > 1 else ''} not finite"
        found.append(("Training loss", polyline_points(values), label))
    span = "{} batches in order, from 0 to {:.4f} s"
    if len(times_s) > 1 and max(times_s) > 0:
        label = span.format(len(times_s), max(times_s))
        found.append(("Time per batch", polyline_points(times_s, lowest=0.0), label))
    if len(waits_s) > 1 and max(waits_s) >= 1e-3:
        label = f"{span.format(len(waits_s), max(waits_s))}; {sum(waits_s):.2f} s in total"
        found.append(("Wait for data per batch", polyline_points(waits_s, lowest=0.0), label))
    return [{"title": title, "points": points, "label": label} for title, points, label in found]
