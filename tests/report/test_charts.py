"""Charts: areas are stacked, names do not overlap, and any finite values get an axis with ticks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_eff.report.charts import BOTTOM, LABEL_HEIGHT, Scale, draw, scatter, stacked
from lightning_eff.report.recording import CATEGORIES
from tests.support.reports import TIMELINE


def test_areas_are_stacked() -> None:
    values = {name: [moment[name] / 2**20 for moment in TIMELINE] for name in CATEGORIES}
    chart = draw("a", "b", stacked([moment["event"] for moment in TIMELINE], values), "moments", "MiB")
    assert chart["legend"] == [("activations", 5), ("parameters", 0)], "as they stand on each other"
    below, above = ([each.split(",") for each in line["points"].split()] for line in chart["lines"])
    assert above[:3:-1] == below[:4], "activations stand on parameters"
    zero, top = float(below[-1][1]), float(above[1][1])
    assert zero - top == pytest.approx(10 * (zero - float(below[0][1])), rel=0.01), "100 MiB are ten times 10"


def test_names_of_dots_do_not_overlap_and_are_next_to_the_chart() -> None:
    names = [f"technique {number} with a long name" for number in range(20)]
    chart = scatter("a", "b", dict.fromkeys(names, (1.0, 1.0)), names[0], "x", "y")
    heights = [dot["label_y"] for dot in chart["dots"]]
    assert heights == sorted(heights)
    assert min(b - a for a, b in pairwise(heights)) >= LABEL_HEIGHT
    assert heights[-1] <= chart["bottom"] > BOTTOM
    assert [dot["is_baseline"] for dot in chart["dots"]] == [True] + [False] * 19
    assert {len(dot["name"]) for dot in chart["dots"]} == {24}


@given(st.lists(st.floats(-1e20, 1e20), min_size=1), st.booleans())
def test_any_values_have_ticks_in_order_and_places_on_the_axis(
    values: list[float], is_extended: bool
) -> None:
    axis = Scale(values, 0, 100, is_extended=is_extended)
    places = [place for place, _ in axis.ticks()]
    assert 1 <= len(places) <= 8
    assert places == sorted(places)
    assert all(-0.1 <= place <= 100.1 for place in [*places, *map(axis.place, values)])
    assert len({text for _, text in axis.ticks()}) == len(places) or math.ulp(max(map(abs, values))) > 1e-9
