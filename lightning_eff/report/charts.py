"""Compute charts as plain data (coordinates, ticks, names), which `report.html.j2` draws as SVG.

display.py uses this module for reports, and comparison/result_table.py uses it for comparisons. Why no chart
library: pygal writes a script and 10 kB of CSS into each chart. matplotlib adds tens of megabytes to every
installation. Glue code for leather was longer than this module. The legend is HTML text below the chart, so
that it wraps on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_eff.report.history import Point

LEFT, TOP, RIGHT, BOTTOM = 72, 8, 472, 184
"""Edges of the plot in units of the SVG view box; text is 14 units high, which is readable on a phone."""
NUM_TICKS = 5
LABEL_HEIGHT, NAME_LENGTH = 17, 24
"""For a dot's name in a scatter chart: height in view box units, and maximum number of characters."""
BASELINE_COLOR = 1
"""Index of the baseline's colour in the template."""
Chart = dict[str, Any]


class Series(NamedTuple):
    """One line of a chart, with at least two finite points; `color` is an index of the template's colours."""

    name: str
    points: Sequence[Point]
    color: int = 0
    is_area: bool = False
    """Whether to fill the area that the line encloses."""


class Scale:
    """An axis, which maps values to coordinates in the view box.

    Args:
        values: Values that the axis covers.
        begin: Coordinate of the smallest value.
        end: Coordinate of the largest value.
        is_extended: Whether to extend the axis, so that each end is a tick.

    Example:
        >>> axis = Scale([0, 30, 35], 100, 200, is_extended=True)
        >>> axis.place(10), axis.ticks()
        (125.0, [(100.0, '0'), (125.0, '10'), (150.0, '20'), (175.0, '30'), (200.0, '40')])
    """

    def __init__(self, values: Iterable[float], begin: float, end: float, *, is_extended: bool) -> None:
        ordered = sorted(values)
        self._low, self._high, self._begin, self._end = ordered[0], ordered[-1], begin, end
        largest = max(abs(self._low), abs(self._high))
        if self._high - self._low <= max(1e-12 * largest, 1e-300):  # ticks would be indistinguishable
            self._high += largest if largest > 1e-300 else 1.0
        # The tick distance is 1, 2 or 5 times a power of ten, so that there are about NUM_TICKS ticks.
        least = (self._high - self._low) / NUM_TICKS
        power = 10.0 ** math.floor(math.log10(least))
        self._step = next(factor * power for factor in (1, 2, 5, 10) if factor * power > 0.999 * least)
        # The tolerance absorbs rounding errors, so that an end that is already on a tick stays there.
        if is_extended:
            self._low = self._step * math.floor(self._low / self._step + 1e-6)
            self._high = self._step * math.ceil(self._high / self._step - 1e-6)

    def place(self, value: float) -> float:
        """Return the coordinate of a value, rounded to a tenth of a unit to keep the page small."""
        fraction = (value - self._low) / (self._high - self._low)
        return round(self._begin + fraction * (self._end - self._begin), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the coordinate and the text of each tick."""
        first, last = math.ceil(self._low / self._step - 1e-6), math.floor(self._high / self._step + 1e-6)
        values = [number * self._step for number in range(first, last + 1)]
        return [(self.place(value), f"{value:.10g}") for value in values]


def draw(
    title: str,
    caption: str,
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    *,
    lowest: float | None = None,
    marks: Mapping[float, str] = MappingProxyType({}),
) -> Chart:
    """Return a chart of lines and areas; the first series is drawn in front.

    Args:
        title: Title of the chart.
        caption: Description in words, for readers who cannot see the chart.
        series: Lines and areas, at least one.
        x_name: Name and unit of the horizontal axis.
        y_name: Name and unit of the vertical axis.
        lowest: Start of the vertical axis, unless a value is lower.
        marks: Text of each vertical line, by the line's value on the horizontal axis.
    """
    points = [point for each in series for point in each.points]
    heights = [y for _, y in points] + ([] if lowest is None else [lowest])
    x_scale = Scale((x for x, _ in points), LEFT, RIGHT, is_extended=False)
    y_scale = Scale(heights, BOTTOM, TOP, is_extended=True)
    chart = _axes(title, caption, x_scale, y_scale, x_name, y_name)
    # SVG draws later elements in front of earlier elements.
    for each in reversed(series):
        places = " ".join(f"{x_scale.place(x):g},{y_scale.place(y):g}" for x, y in each.points)
        is_dashed = each.color == BASELINE_COLOR and not each.is_area
        line = {"name": each.name, "points": places, "color": each.color}
        chart["lines"].append(line | {"is_area": each.is_area, "is_dashed": is_dashed})
    chart["marks"] = [(x_scale.place(x), text) for x, text in marks.items()]
    chart["legend"] = [(each.name, each.color) for each in series] if len(series) > 1 else []
    return chart


def stacked(steps: Sequence[float], values: Mapping[str, Sequence[float]]) -> list[Series]:
    """Return stacked areas, with the last of `values` on top; an area is omitted if all its values are 0."""
    below, series = [0.0] * len(steps), list[Series]()
    for color, (name, heights) in enumerate(values.items()):
        if any(heights):
            above = [bottom + height for bottom, height in zip(below, heights, strict=True)]
            # The outline runs along the upper edge, and back along the lower edge.
            edge = [*zip(steps, above, strict=True), *reversed([*zip(steps, below, strict=True)])]
            series.append(Series(name, edge, color, is_area=True))
            below = above
    return series[::-1]


def scatter(
    title: str, caption: str, points: Mapping[str, Point], baseline: str, x_name: str, y_name: str
) -> Chart:
    """Return a scatter chart; a line connects each dot to its name on the right of the chart."""
    bottom = max(BOTTOM, LABEL_HEIGHT * len(points))
    x_scale = Scale([0.0, 1.0, *(x for x, _ in points.values())], LEFT, RIGHT, is_extended=True)
    y_scale = Scale([0.0, 1.0, *(y for _, y in points.values())], bottom, TOP, is_extended=True)
    chart = _axes(title, caption, x_scale, y_scale, x_name, y_name)
    chart["bottom"] = bottom
    label_y = -math.inf
    for number, (name, (x, y)) in enumerate(sorted(points.items(), key=lambda point: -point[1][1])):
        # Place a name at the height of its dot, unless it would overlap the previous name or leave no space
        # for later names.
        last = bottom - LABEL_HEIGHT * (len(points) - 1 - number)
        label_y = min(max(y_scale.place(y), label_y + LABEL_HEIGHT), last)
        short = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."
        dot = {"name": short, "title": name, "x": x_scale.place(x), "y": y_scale.place(y), "label_y": label_y}
        chart["dots"].append(dot | {"is_baseline": name == baseline})
    return chart


def _axes(title: str, caption: str, x_scale: Scale, y_scale: Scale, x_name: str, y_name: str) -> Chart:
    return {
        "title": title, "caption": caption, "x_name": x_name, "y_name": y_name,
        "x_ticks": x_scale.ticks(), "y_ticks": y_scale.ticks(),
        "left": LEFT, "top": TOP, "right": RIGHT, "bottom": BOTTOM,
        "lines": [], "marks": [], "legend": [], "dots": [],
    }  # fmt: skip
