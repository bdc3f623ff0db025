"""HTML pages of one template, `report.html.j2`, and their charts: one file, which opens without a network.

Jinja escapes every value. leather draws the charts as SVG with axes: pure Python without dependencies, MIT
licence, 30 kB. Why not pygal: it writes a script and 10 kB of style into each chart. Why not matplotlib: it
is tens of megabytes, for every user of the efficiency report. Legends are HTML, which wraps on a phone.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import leather
from leather import svg
from typing_extensions import override

from lightning_eff.report.history import Point, thinned

WIDTH, HEIGHT = 480, 240
"""Of a chart, in units of its view box: a column of the page, in which 14 units are a readable letter."""
LABEL_WIDTH, LABEL_HEIGHT, NAME_LENGTH = 200, 17, 24
"""Of the names next to a scatter's dots, in the same units, and the characters of a name."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
NUM_COLORS = 7
BASELINE_COLOR = 1
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("lightning_eff", "report"), autoescape=True, undefined=jinja2.StrictUndefined
)


class Series(NamedTuple):
    """One line of a chart: finite points, and the number of its colour in the template."""

    name: str
    points: Sequence[Point]
    color: int = 0
    is_area: bool = False
    """Fill what the line surrounds."""


class Chart(NamedTuple):
    """A chart for `render_page`; the caption says what it shows to whom does not see it."""

    title: str
    caption: str
    svg: str
    legend: Sequence[tuple[str, int]] = ()
    """Name and colour of each series, if there are several."""
    is_wide: bool = False
    """It takes the whole width of the page."""


def render_page(report: Mapping[str, Any], raw: Mapping[str, Any], **sections: Any) -> str:
    """Return an HTML page.

    Args:
        report: Its `environment` and `command` have sections of their own.
        raw: Shown as JSON at the end.
        sections: `title` and `verdict`; if there are any, `ended`, `figures` (name, value, baseline's value),
            `charts`, `tables` (title, header, rows, in which a float is a fraction drawn as a bar), `failure`
            (title, sentences, command), `notes` and `config`.

    Example:
        >>> "a &lt; b" in render_page({"environment": {}, "command": ""}, {}, title="a < b", verdict="fine")
        True
    """
    page = _TEMPLATES.get_template("report.html.j2")
    return page.render(**sections, report=report, raw=json.dumps(raw, indent=1), num_colors=NUM_COLORS)


def line_chart(
    title: str,
    caption: str,
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    *,
    lowest: float | None = None,
) -> Chart:
    """Return lines of at least two points each, the first one in front, from `lowest` on if none is below."""
    chart, drawn = leather.Chart(), [each._replace(points=thinned(each.points)) for each in series]
    values = [y for each in drawn for _, y in each.points]
    bottom, top = min(values if lowest is None else [lowest, *values]), max(values)
    chart.add_y_scale(bottom, top if top > bottom else bottom + (abs(bottom) or 1.0))
    return _finished(chart, title, caption, drawn, x_name, y_name)


def histogram(title: str, caption: str, values: Sequence[Sequence[float]], x_name: str, top: float) -> Chart:
    """Return what fraction of some values is in each of the same columns; those above `top` in the last one.

    Args:
        title: Of the chart.
        caption: Of the chart.
        values: Of this run and, if it has one, of its baseline.
        x_name: Name and unit of the values.
        top: End of the last column.
    """
    low = min(min(each) for each in values)
    num_columns = 30
    width = (top - low) / num_columns or 1.0
    series: list[Series] = []
    for number, each in enumerate(values):
        counts = [0] * num_columns
        for value in each:
            counts[min(int((value - low) / width), num_columns - 1)] += 1
        points: list[Point] = [(low, 0.0)]
        for column, count in enumerate(counts):
            height = 100 * count / len(each)
            points += [(low + column * width, height), (low + (column + 1) * width, height)]
        points.append((low + num_columns * width, 0.0))
        series.append(Series(("this run", "baseline")[number], points, number, is_area=not number))
    return _finished(leather.Chart(), title, caption, series, x_name, "% of the batches")


def stacked_chart(
    title: str, caption: str, values: Mapping[str, Sequence[float]], x_name: str, y_name: str
) -> Chart:
    """Return areas over the same moments, the first at the bottom; areas of zeros are left out."""
    below, series = [0.0] * max(map(len, values.values())), list[Series]()
    for color, (name, heights) in enumerate(values.items()):
        if any(heights):
            above = [bottom + height for bottom, height in zip(below, heights, strict=True)]
            edge = [*enumerate(above), *reversed(list(enumerate(below)))]
            series.append(Series(name, edge, color, is_area=True))
            below = above
    return _finished(leather.Chart(), title, caption, series[::-1], x_name, y_name)


def scatter_chart(
    title: str, caption: str, points: Mapping[str, Point], baseline: str, x_name: str, y_name: str
) -> Chart:
    """Return a dot for each name, with the names next to the chart and a line from each to its dot."""
    chart = leather.Chart()
    for add_scale, values in zip(
        (chart.add_x_scale, chart.add_y_scale), zip(*points.values(), strict=True), strict=True
    ):
        add_scale(min(0.0, *values), max(1.0, *values))
    chart.add_x_axis(name=x_name)
    chart.add_y_axis(name=y_name)
    chart.add_series(leather.Series([*points.values()]), _NamedDots(list(points), baseline))
    height = max(HEIGHT, 90 + LABEL_HEIGHT * len(points))
    return Chart(title, caption, _inline(chart, height, right=LABEL_WIDTH), is_wide=True)


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the bytes of the unit in which `largest` bytes are shown, and its name.

    Example:
        >>> byte_unit(3 * 2**30)
        (1073741824, 'GiB')
    """
    power = min(int(math.log(max(largest, 1), 1024)), len(UNITS) - 1)
    return 1024**power, UNITS[power]


class _Path(leather.Line):
    """A line or the area that it surrounds, with coordinates of one digit and no legend in the SVG."""

    def __init__(self, series: Series) -> None:
        is_baseline = not series.is_area and series.color == BASELINE_COLOR
        super().__init__(f"var(--c{series.color})", 1.5, "4 3" if is_baseline else None)
        self._is_area = series.is_area

    @override
    def to_svg(self, *arguments: Any, **keywords: Any) -> Any:
        group = super().to_svg(*arguments, **keywords)
        for path in group:
            words = path.attrib["d"].split()
            path.set("d", " ".join(each if each in "ML" else f"{float(each):.1f}" for each in words))
            if self._is_area:
                path.set("fill", path.attrib["stroke"])
        return group

    @override
    def legend_to_svg(self, *_: Any, **__: Any) -> list[Any]:
        return []


class _NamedDots(leather.Dots):
    """Dots whose names stand next to the chart, one below the other."""

    def __init__(self, names: Sequence[str], baseline: str) -> None:
        # The baseline's is larger: others are often in front of it.
        super().__init__(
            lambda dot: f"var(--c{int(names[dot.i] == baseline)})",
            lambda dot: 9 if names[dot.i] == baseline else 5,
        )
        self._names = names

    @override
    def to_svg(self, width: float, height: float, *others: Any, **keywords: Any) -> Any:
        group = super().to_svg(width, height, *others, **keywords)
        dots = sorted(zip(list(group), self._names, strict=True), key=lambda dot: float(dot[0].attrib["cy"]))
        y = -math.inf
        for number, (dot, name) in enumerate(dots):
            # As high as its dot; below the name before, and with place for those that follow.
            last = height - LABEL_HEIGHT * (len(dots) - 1 - number)
            y = min(max(float(dot.attrib["cy"]), y + LABEL_HEIGHT), last)
            ends = {"x1": dot.attrib["cx"], "y1": dot.attrib["cy"], "x2": str(width + 12), "y2": f"{y:.1f}"}
            group.insert(0, ET.Element("line", ends | {"stroke": "var(--line)"}))
            label = ET.SubElement(
                group, "text", {"x": str(width + 16), "y": f"{y:.1f}", "dy": "0.32em", "font-size": "14"}
            )
            label.text = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."
        return group


def _finished(
    chart: leather.Chart, title: str, caption: str, series: Sequence[Series], x_name: str, y_name: str
) -> Chart:
    """Add axes and series, the last of them behind, and return the chart."""
    chart.add_x_axis(name=x_name)
    chart.add_y_axis(name=y_name)
    for each in reversed(series):
        chart.add_series(leather.Series(each.points), _Path(each))
    legend = [(each.name, each.color) for each in series] if len(series) > 1 else ()
    # leather leaves a line for a legend of several series.
    return Chart(title, caption, _inline(chart, HEIGHT, top=32 if legend else 14), legend)


def _inline(chart: leather.Chart, height: int, *, top: int = 14, right: int = 0) -> str:
    """Return a chart as an element of HTML, which scales with the page and needs no name space.

    Args:
        chart: With axes and series.
        height: Of the chart with its margins, which are mostly cut off.
        top: Where the view begins.
        right: Width of what stands next to the chart.
    """
    drawn = svg.stringify(chart.to_svg_group(WIDTH, height))
    return f'<svg viewBox="16 {top} {WIDTH + right - 12} {height - 16 - top}">{drawn}</svg>'
