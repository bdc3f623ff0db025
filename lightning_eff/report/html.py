"""HTML pages of one template, `report.html.j2`, and their charts: one file, which opens without a network.

Jinja escapes every value. leather draws the charts as SVG with axes: pure Python without dependencies, MIT
licence, 30 kB. Why not pygal: it writes a script and 10 kB of style into each chart. Why not matplotlib: it
is tens of megabytes, for every user of the efficiency report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import leather
from leather import svg
from typing_extensions import override

WIDTH, HEIGHT, BAR_HEIGHT = 900, 280, 26
"""Of a chart and of each of its bars, in pixels."""
MAX_POINTS = 500
"""Points of a line; a screen cannot resolve more."""
NAME_LENGTH = 40
"""Characters of a bar's name."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("lightning_eff", "report"), autoescape=True, undefined=jinja2.StrictUndefined
)


def render_page(report: Mapping[str, Any], **sections: Any) -> str:
    """Return an HTML page.

    Args:
        report: Shown as JSON at the end; its `environment` and `command` have sections of their own.
        sections: `title` and `verdict`; if there are any, `figures` (name, value), `charts` (title, caption,
            SVG), `tables` (title, header, rows), `notes` and `config`.

    Example:
        >>> "a &lt; b" in render_page({"environment": {}, "command": ""}, title="a < b", verdict="fine")
        True
    """
    page = _TEMPLATES.get_template("report.html.j2")
    return page.render(**sections, report=report, raw=json.dumps(report, indent=1))


def line_chart(
    points: Sequence[tuple[float, float]], x_name: str, y_name: str, *, lowest: float | None = None
) -> str:
    """Return a line through at least two finite points as SVG, with `lowest` at the bottom.

    Of more than `MAX_POINTS` points, the highest of each stretch is drawn.
    """
    stride = max(1, len(points) // MAX_POINTS)
    shown = [max(points[i : i + stride], key=lambda point: point[1]) for i in range(0, len(points), stride)]
    values = [y for _, y in shown]
    bottom, top = min(values) if lowest is None else lowest, max(values)
    chart = leather.Chart()
    chart.add_y_scale(bottom, top if top > bottom else bottom + (abs(bottom) or 1.0))
    chart.add_x_axis(name=x_name)
    chart.add_y_axis(name=y_name)
    chart.add_line(shown, stroke_color="var(--c0)", width=1.5)
    return _inline(chart, HEIGHT)


def bar_chart(values: Mapping[str, float], unit: str) -> str:
    """Return a bar for each name as SVG, the first one at the top; at least one, none negative."""
    shown = [  # names that are cut stay different
        (value, name if len(name) <= NAME_LENGTH else f"{name[:NAME_LENGTH]}... ({index})")
        for index, (name, value) in enumerate(values.items(), 1)
    ]
    chart = leather.Chart()
    chart.add_x_axis(name=unit)
    chart.add_bars(shown, fill_color="var(--c0)")
    return _inline(chart, 130 + BAR_HEIGHT * len(shown))


class _Area(leather.Line):
    """A line around an area, filled with its own colour."""

    @override
    def to_svg(self, *arguments: Any, **keywords: Any) -> Any:
        group = super().to_svg(*arguments, **keywords)
        for path in group:
            path.set("fill", path.attrib["stroke"])
        return group


def memory_chart(timeline: Sequence[Mapping[str, Any]], categories: Sequence[str]) -> str:
    """Return live bytes over at least two moments as SVG, stacked by category, the first at the bottom."""
    peak = max(sum(moment[name] for name in categories) for moment in timeline)
    power = min(int(math.log(max(peak, 1), 1024)), len(UNITS) - 1)
    chart = leather.Chart()
    chart.add_x_axis(name="moments of the first steps, in order")
    chart.add_y_axis(name=UNITS[power])
    below = [0.0] * len(timeline)
    for color, name in enumerate(categories):
        if any(moment[name] for moment in timeline):
            above = [bottom + at[name] / 1024**power for bottom, at in zip(below, timeline, strict=True)]
            edge = [*enumerate(above), *reversed(list(enumerate(below)))]
            chart.add_series(leather.Series(edge, name=name), _Area(f"var(--c{color})", 0.5))
            below = above
    return _inline(chart, HEIGHT)


def _inline(chart: leather.Chart, height: int) -> str:
    """Return a chart as an element of HTML, which scales with the page and needs no name space."""
    return f'<svg viewBox="0 0 {WIDTH} {height}">{svg.stringify(chart.to_svg_group(WIDTH, height))}</svg>'
