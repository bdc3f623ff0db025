"""A comparison as one HTML file that needs no network: a sentence, bars, the table, how to repeat it."""

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
<p>{{ verdict }}</p>
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
<p class="soft">{{ steps }} optimizer steps a trial, {{ rounds }} rounds, each trial in a process of its own, with the same seed and
global batch. Speeds are those of the fastest round, in brackets what the slowest had less. {{ memory }}{% for line in noise %} In speed,{{ line }}.{% endfor %}</p>
<h2>Measured on</h2>
<p class="soft">{% for k, v in environment.items() %}{{ k }} {{ v }}{{ ", " if not loop.last }}{% endfor %}</p>
<h2>Reproduce</h2><pre>{{ command }}</pre>
<h2>Raw</h2>
<details><summary>JSON</summary><pre>{{ raw }}</pre></details>
</body>
</html>
"""


def render_page(found: Mapping[str, Any], rows: Sequence[ComparisonRow]) -> str:
    """Return the page.

    Args:
        found: What `compare.json` holds.
        rows: The table's.

    Example:
        >>> found = {"recipe": "lm", "command": "c", "steps": 6, "rounds": 1, "environment": {}}
        >>> "nothing was measured" in page(found, [])
        True
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    on_cpu = "cuda" not in str(found["environment"].get("device", "")).lower()
    return environment.from_string(_TEMPLATE).render(
        {key: found[key] for key in ("recipe", "command", "steps", "rounds", "environment")},
        style=STYLE,
        verdict=summary_sentence(rows),
        charts=[_bars("Speed", rows, "speed_ratio"), _bars("Peak memory", rows, "peak_ratio")],
        header=HEADER,
        table=[cells(each) for each in rows],
        memory=f"{'Peak memory is live bytes, counted storage by storage. ' if on_cpu else ''}In brackets: predicted.",
        noise=format_noise(rows),
        raw=json.dumps(dict(found), indent=1),
    )


def summary_sentence(rows: Sequence[ComparisonRow]) -> str:
    """Return what the table says in a sentence or two.

    Example:
        >>> verdict([Row("baseline", MEASURED), Row("x", MEASURED, speed_ratio=2.0, peak_ratio=0.5)])
        'Fastest: x, 2.00 times the baseline. Least memory: x, 0.50 of the baseline.'
    """
    others = [each for each in rows if each.status == MEASURED and each.technique != BASELINE]
    fast = max((each for each in others if each.speed_ratio), key=lambda e: e.speed_ratio or 0, default=None)
    small = min((each for each in others if each.peak_ratio), key=lambda e: e.peak_ratio or 0, default=None)
    if fast is None and small is None:
        return "Beside the baseline nothing was measured."
    said: list[str] = []
    if fast is not None:
        faster = (fast.speed_ratio or 0) > 1.0
        words = f"Fastest: {fast.technique}, {fast.speed_ratio:.2f} times the baseline."
        said.append(words if faster else "Nothing here is faster than the baseline.")
    if small is not None:
        smaller = (small.peak_ratio or 0) < 1.0
        words = f"Least memory: {small.technique}, {small.peak_ratio:.2f} of the baseline."
        said.append(words if smaller else "Nothing here takes less memory than the baseline.")
    return " ".join(said)


def _bars(title: str, rows: Sequence[ComparisonRow], key: str) -> dict[str, Any]:
    values = [(each.technique, getattr(each, key)) for each in rows if getattr(each, key)]
    longest = max((value for _, value in values), default=1.0)
    return {
        "title": title,
        "rows": [(name, value, round(100 * value / longest, 1)) for name, value in values],
    }
