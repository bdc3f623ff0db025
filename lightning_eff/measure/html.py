"""The efficiency report as one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --line: #d9dee6; --paper: #fff; --mark: #2457c5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b2; --line: #333c4a; --paper: #12161d; --mark: #7fa8ff; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
pre { overflow-x: auto; font-size: .85rem; } svg { width: 100%; height: 8rem; } polyline { fill: none; stroke: var(--mark); }
</style>
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
{% if points %}<h2>Time per batch</h2>
<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{{ chart_label }}">
<polyline vector-effect="non-scaling-stroke" stroke-width="1.5" points="{{ points }}"/></svg>
<p class="soft">{{ chart_label }}</p>{% endif %}
<h2>Measured on</h2>
<p class="soft">{% for k, v in environment.items() %}{{ k }} {{ v }}{{ ", " if not loop.last }}{% endfor %}</p>
{% if command %}<h2>Reproduce</h2><pre>{{ command }}</pre>{% endif %}
<h2>Raw</h2>
<details><summary>JSON</summary><pre>{{ raw }}</pre></details>
</body>
</html>
"""


def page(
    report: Mapping[str, Any], *, figures: Sequence[tuple[str, str]], batch_times_s: Sequence[float]
) -> str:
    """Return the page.

    Args:
        report: What the JSON ledger holds.
        figures: Names and values, formatted, of the numbers at the top.
        batch_times_s: The chart's line; long runs are thinned to the slowest batch of each stretch.

    Example:
        >>> report = {"title": "a < b", "verdict": "fine", "ledger": [], "environment": {}, "command": ""}
        >>> "a &lt; b" in page(report, figures=[], batch_times_s=[])
        True
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    points, label = _chart(batch_times_s)
    return environment.from_string(_TEMPLATE).render(
        title=report["title"],
        verdict=report["verdict"],
        ledger=report["ledger"],
        environment=report["environment"],
        command=report["command"],
        figures=figures,
        points=points,
        chart_label=label,
        raw=json.dumps(report, indent=1),
    )


def _chart(times_s: Sequence[float]) -> tuple[str, str]:
    """Return the points of a line in a box of 1000 x 100, and its description."""
    if len(times_s) < 2:
        return "", ""
    stride = max(1, len(times_s) // 500)
    shown = [max(times_s[i : i + stride]) for i in range(0, len(times_s), stride)]
    top = max(shown)
    if top == 0.0:
        return "", ""
    points = " ".join(
        f"{1000 * i / max(1, len(shown) - 1):.1f},{100 - 95 * value / top:.1f}"
        for i, value in enumerate(shown)
    )
    thinned = f"; the slowest of every {stride} is drawn" if stride > 1 else ""
    return points, f"{len(times_s)} batches in order, from 0 to {top:.4f} s{thinned}"
