"""The pages: everything given is escaped, nothing comes over the network, the charts have axes and units."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lightning_eff.comparison import judgement
from lightning_eff.comparison.result_table import FAILED, MEASURED, ComparisonRow, comparison_page
from lightning_eff.report.html import scatter_chart, stacked_chart
from lightning_eff.report.recording import CATEGORIES
from tests.support.reports import MEMORY, TIMELINE, Reader, make_page

HOSTILE = """</pre></title><script src="http://evil">alert('&amp;')</script><link href=//evil>"""


def points(svg: str) -> list[tuple[float, float]]:
    """Return the corners of the first drawn line; y grows downwards."""
    drawn = re.search(r' d="([^"]*)"', svg)
    assert drawn is not None
    numbers = [float(number) for number in re.findall(r"-?\d[\d.]*", drawn[1])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def everything(word: str) -> dict[str, Any]:
    """Return the keys of a report that make charts, tables and sections, with a word for each text."""
    line = [[1, 4.0], [2, 3.0]]
    holder = {"category": word, "path": word, "operation": word, "num_bytes": 512, "count": 2}
    out_of_memory = {"sentences": [word], "overrides": [word], "holders": [holder]}
    out_of_memory |= {"num_bytes": 1024, "peak_bytes": 512}
    series = {"samples_per_s": line, "data_wait_ms": line, "batch_times_ms": [1.0, 2.0], "held_bytes": line}
    series |= {"learning_rate": line, "learning_rate_2": line, "gradient_norm": line}
    return {
        "losses": line, "series": series, "validation": {f"loss {word}": line, word: line},
        "memory": MEMORY | {"path": word, "operation": word, "holders": [holder]},
        "out_of_memory": out_of_memory, "memory_snapshot": word,
        "baseline": {"title": word, "measured": {}, "environment": {"device": word}, "losses": line},
        "attention": [{"text": word, "modules": [word], "remedy": word}],
    }  # fmt: skip


def test_hostile_names_are_escaped_in_every_chart_table_and_section() -> None:
    pages = [make_page(word, **everything(word)) for word in ("word", HOSTILE)]
    harmless, hostile = map(Reader, pages)
    assert hostile.tags == harmless.tags
    assert {name for name, _ in hostile.attributes} == {name for name, _ in harmless.attributes}
    assert HOSTILE not in pages[1]
    assert "".join(hostile.text).count(HOSTILE) > 20, "it is there, as text"
    assert harmless.tags.count("figure") == 9
    dots = scatter_chart("a", "b", {HOSTILE: (1.0, 1.0), "x": (2.0, 0.5)}, "x", HOSTILE, HOSTILE).svg
    assert {*Reader(dots).tags} == {"svg", "g", "rect", "text", "line", "circle"}


def test_a_page_needs_no_network() -> None:
    text = make_page(**everything("word"), command="train data.url=https://example.org/a")
    outside = re.findall(r"(?:https?:)?//[^\s\"<&]*|url\(|@import", text)
    assert {*outside} == {"https://example.org/a"}, "in the command and in the raw report, as text"
    reader = Reader(text)
    assert not {"script", "link", "iframe", "img", "object", "base", "a"} & {*reader.tags}
    assert not {"src", "href", "xlink:href", "style"} & {name for name, _ in reader.attributes}


def test_the_report_is_at_the_end() -> None:
    reader = Reader(make_page("<x>", n=1.5))
    raw = json.loads(next(text for text in reader.text if text.startswith('{\n "title"')))
    assert (raw["title"], raw["n"], raw["environment"]) == ("<x>", 1.5, {"<x>": "<x>"})
    assert "<x>=<x>\nn=3" in reader.text
    assert "Reproduce" in reader.text
    assert "Reproduce" not in make_page(command="")


def test_without_anything_to_show_there_is_no_chart() -> None:
    series = {"samples_per_s": [], "batch_times_ms": [0.1], "data_wait_ms": [[1, 0.0], [2, 0.1]]}
    losses = [[1, 2.0], [2, "nan"]]
    text = make_page(
        series=series, losses=losses, validation={"a": [[1, 2.0]]}, memory=MEMORY | {"timeline": []}
    )
    assert "svg" not in Reader(text).tags
    assert "Memory at the peak" not in text


def test_areas_are_stacked() -> None:
    values = {name: [moment[name] / 2**20 for moment in TIMELINE] for name in CATEGORIES}
    chart = stacked_chart("a", "b", values, "moments", "MiB")
    assert chart.legend == [("activations", 5), ("parameters", 0)], "as they stand on each other"
    reader = Reader(chart.svg)
    assert {"moments", "MiB"} <= {*reader.text}
    first, second = (points(f" d={area}") for area in re.findall(r' d=("[^"]*")', chart.svg))
    assert first[:3] == second[:2:-1], "activations stand on parameters"
    zero, top = first[-1][1], second[1][1]
    assert zero - top == pytest.approx(10 * (zero - first[0][1]), rel=0.01), "100 MiB are ten times 10 MiB"


def test_the_page_of_a_comparison_says_first_what_helps_and_shows_every_row() -> None:
    figures = {"samples_per_s": 10.0, "speed_ratio": 1.0, "peak_bytes": 2048, "peak_ratio": 1.0}
    half = {"samples_per_s": 5.0, "speed_ratio": 0.5, "peak_bytes": 512, "peak_ratio": 0.25}
    rows = [ComparisonRow("baseline", MEASURED, **figures), ComparisonRow("half", MEASURED, **half)]
    rows.append(ComparisonRow("<odd>", FAILED, "no end after 3 s"))
    verdict = judgement.verdict(rows)
    content = {"recipe": "lm", "command": "a=<b>", "steps": 6, "rounds": 2, "environment": {}}
    reader = Reader(comparison_page(content | {"verdict": verdict}, rows))
    assert {verdict, "<odd>", "failed: no end after 3 s", "512 B", "a=<b>"} <= {*reader.text}
    assert (reader.tags.count("svg"), reader.tags.count("circle")) == (1, 2)
