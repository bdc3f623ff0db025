"""The efficiency report as one HTML file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from markupsafe import Markup

from lightning_eff.report import memory_page
from lightning_eff.report.html import STYLE, polyline_points

_TEMPLATE = """<!doctype html>
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
<tr><th scope="col">technique</th><th scope="col">asked</th><th scope="col">status</th><th scope="col">what it did</th></tr>
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
{% if config %}<h2>Config</h2><details><summary>as it was resolved</summary><pre>{{ config }}</pre></details>{% endif %}
<h2>Raw</h2>
<details><summary>JSON</summary><pre>{{ raw }}</pre></details>
</body>
</html>
"""


@dataclass(frozen=True)
class Chart:
    """A line over the run.

    Args:
        title: Its heading.
        points: Of the polyline.
        label: What it shows, in words, with its lowest and highest values.
    """

    title: str
    points: str
    label: str


def render_page(
    report: Mapping[str, Any],
    *,
    figures: Sequence[tuple[str, str]],
    times_s: Sequence[float],
    waits_s: Sequence[float],
    config: str = "",
) -> str:
    """Return the page.

    Args:
        report: What the JSON ledger holds.
        figures: Names and values, formatted, of the numbers at the top.
        times_s: Of every timed batch.
        waits_s: What of each was a wait for data.
        config: What the run was built from, as YAML.

    Example:
        >>> report = {"title": "a < b", "verdict": "fine", "ledger": [], "environment": {}, "command": ""}
        >>> "a &lt; b" in page(report, figures=[], times_s=[], waits_s=[])
        True
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    charts = [_losses(report.get("losses", ())), _times(times_s), _waits(waits_s)]
    return environment.from_string(_TEMPLATE).render(
        style=STYLE,
        title=report["title"],
        verdict=report["verdict"],
        ledger=report["ledger"],
        environment=report["environment"],
        command=report["command"],
        figures=figures,
        charts=[chart for chart in charts if chart.points],
        memory=Markup(memory_page.memory_section(report.get("memory") or {})),  # noqa: S704 - escaped there
        config=config,
        raw=json.dumps(report, indent=1),
    )


def _losses(curve: Sequence[Sequence[Any]]) -> Chart:
    """Draw the training loss of each step; values that are no numbers break off nothing."""
    values = [(int(step), float(value)) for step, value in curve]
    finite = [(step, value) for step, value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Chart("", "", "")
    numbers = [value for _, value in finite]
    label = (
        f"loss from {finite[0][1]:.4g} at step {finite[0][0]} to {finite[-1][1]:.4g} at step {finite[-1][0]}"
    )
    label += f"; lowest {min(numbers):.4g}, highest {max(numbers):.4g}"
    lost = len(values) - len(finite)
    return Chart("Training loss", polyline_points(numbers), label + (f"; {lost} points are no numbers" if lost else ""))


def _waits(waits_s: Sequence[float]) -> Chart:
    """Draw how long the loop waited for each batch; nothing where it never did for a thousandth of a second."""
    if len(waits_s) < 2 or max(waits_s) < 1e-3:
        return Chart("", "", "")
    label = f"{len(waits_s)} batches in order, from 0 to {max(waits_s):.4f} s; {sum(waits_s):.2f} s together"
    return Chart("Wait for data per batch", polyline_points(waits_s, lowest=0.0), label)


def _times(times_s: Sequence[float]) -> Chart:
    """Draw each batch's time, from 0; a long run's line is the slowest batch of each stretch."""
    if len(times_s) < 2 or not max(times_s):
        return Chart("", "", "")
    label = f"{len(times_s)} batches in order, from 0 to {max(times_s):.4f} s"
    return Chart("Time per batch", polyline_points(times_s, lowest=0.0), label)
