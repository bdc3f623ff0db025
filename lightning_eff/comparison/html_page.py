"""Render a comparison as one HTML file without network access: summary, bars, table, command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from lightning_eff.comparison.result_table import HEADER, MEASURED, ComparisonRow, cells, format_noise
from lightning_eff.comparison.trial_plan import BASELINE
from lightning_eff.report.html import STYLE

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Comparison of {{ recipe }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>Comparison of {{ recipe }}</h1>
<p>{{ summary }}</p>
{% for bars in charts %}<h2>{{ bars.title }}</h2>
<div class="wide"><table>
<tr><th scope="col">technique</th><th scope="col" class="number">x baseline</th><th scope="col" aria-hidden="true"></th></tr>
{% for name, ratio, width in bars.rows %}<tr><td>{{ name }}</td><td class="number">{{ "%.2f"|format(ratio) }}</td>
<td class="bar" aria-hidden="true"><span style="width:{{ width }}%"></span></td></tr>
{% endfor %}</table></div>
{% endfor %}
<h2>All figures</h2>
<div class="wide"><table class="figures">
<tr>{% for name in header %}<th scope="col">{{ name }}</th>{% endfor %}</tr>
{% for row in table %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p class="soft">{{ steps }} optimizer steps per trial, {{ rounds }} round{{ "s" if rounds != 1 }}, each trial in a process of its own, with the same seed
and global batch. Speed is that of the fastest round; in brackets, how much slower the slowest was. {{ memory }}{{ noise|join }}</p>
<h2>Measured on</h2>
<p class="soft">{% for k, v in environment.items() %}{{ k }} {{ v }}{{ ", " if not loop.last }}{% endfor %}</p>
<h2>Reproduce</h2><pre>{{ command }}</pre>
<h2>Raw</h2>
<details><summary>JSON</summary><pre>{{ raw }}</pre></details>
</body>
</html>
"""


def render_page(comparison: Mapping[str, Any], rows: Sequence[ComparisonRow]) -> str:
    """Return the page for the content of `compare.json` and the rows of its table.

    Example:
        >>> content = {"recipe": "lm", "command": "c", "steps": 6, "rounds": 1, "environment": {}}
        >>> "Nothing was measured" in render_page(content, [])
        True
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    on_cpu = "cuda" not in str(comparison["environment"].get("device", "")).lower()
    memory = "Peak memory is live bytes, counted storage by storage. " if on_cpu else ""
    charts: list[dict[str, Any]] = []
    for title, key in (("Speed", "speed_ratio"), ("Peak memory", "peak_ratio")):
        values = [(row.technique, getattr(row, key)) for row in rows if getattr(row, key)]
        longest = max((value for _, value in values), default=1.0)
        bars = [(name, value, round(100 * value / longest, 1)) for name, value in values]
        charts.append({"title": title, "rows": bars})
    return environment.from_string(_TEMPLATE).render(
        {key: comparison[key] for key in ("recipe", "command", "steps", "rounds", "environment")},
        style=STYLE,
        summary=summary_sentence(rows),
        charts=charts,
        header=HEADER,
        table=[cells(row) for row in rows],
        memory=f"{memory}In brackets: predicted.",
        noise=format_noise(rows),
        raw=json.dumps(dict(comparison), indent=1),
    )


def summary_sentence(rows: Sequence[ComparisonRow]) -> str:
    """Return the fastest row and the one with the least memory, in a sentence each.

    Example:
        >>> baseline = ComparisonRow("baseline", MEASURED)
        >>> summary_sentence([baseline, ComparisonRow("x", MEASURED, speed_ratio=2.0, peak_ratio=0.5)])
        'Fastest: x, 2.00 times the baseline. Least memory: x, 0.50 of the baseline.'
    """
    compared = [row for row in rows if row.status == MEASURED and row.technique != BASELINE]
    speeds = [(row.speed_ratio, row.technique) for row in compared if row.speed_ratio]
    peaks = [(row.peak_ratio, row.technique) for row in compared if row.peak_ratio]
    sentences: list[str] = []
    if speeds:
        ratio, name = max(speeds, key=lambda pair: pair[0])
        fastest = f"Fastest: {name}, {ratio:.2f} times the baseline."
        sentences.append(fastest if ratio > 1.0 else "Nothing here is faster than the baseline.")
    if peaks:
        ratio, name = min(peaks, key=lambda pair: pair[0])
        least = f"Least memory: {name}, {ratio:.2f} of the baseline."
        sentences.append(least if ratio < 1.0 else "Nothing here takes less memory than the baseline.")
    return " ".join(sentences) or "Nothing was measured besides the baseline."
