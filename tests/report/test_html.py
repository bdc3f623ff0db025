"""The pages: everything given is escaped, nothing comes over the network, the charts have axes and units."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from lightning_eff.comparison.result_table import FAILED, MEASURED, ComparisonRow, comparison_page
from lightning_eff.report.html import bar_chart, line_chart, memory_chart
from lightning_eff.report.module_tracker import PHASES
from lightning_eff.report.recording import CATEGORIES
from lightning_eff.report.summary import report_page
from lightning_eff.report.throughput import Throughput

HOSTILE = """</pre></title><script src="http://evil">alert('&amp;')</script><link href=//evil>"""
EMPTY = dict.fromkeys(CATEGORIES, 0)
TIMELINE = [EMPTY | {"parameters": 10 * 2**20, "activations": size * 2**20} for size in (0, 90, 30)]
MEMORY = {
    "num_bytes": 100 * 2**20, "phase": "forward", "operation": "mm", "path": "a<b", "timeline": TIMELINE,
    "by_phase": dict.fromkeys(PHASES, EMPTY | {"parameters": 10}) | {"forward": TIMELINE[1]},
}  # fmt: skip


class Reader(HTMLParser):
    """Collects tags, attributes and texts, and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def make_page(
    word: str = "word", *, times: Sequence[float] = (0.1, 0.2), waits: Sequence[float] = (), **changes: Any
) -> str:
    row = {"technique": word, "asked": {word: word, "n": 3}, "status": word, "did": word}
    report = {
        "title": word, "status": "failed", "reason": word, "num_steps": 3, "measured": {}, "ledger": [row],
        "environment": {word: word}, "command": word,
    }  # fmt: skip
    throughput = Throughput()
    throughput.batch_times_s.extend(times)
    throughput.waits_s.extend(waits)
    return report_page(report | changes, throughput, word)


def points(svg: str) -> list[tuple[float, float]]:
    """Return the corners of the first drawn line; y grows downwards."""
    drawn = re.search(r' d="([^"]*)"', svg)
    assert drawn is not None
    numbers = [float(number) for number in re.findall(r"-?\d[\d.]*", drawn[1])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_html_in_values_is_escaped_everywhere() -> None:
    harmless, hostile = Reader(make_page()), Reader(make_page(HOSTILE))
    assert hostile.tags == harmless.tags
    assert hostile.attributes == harmless.attributes
    assert HOSTILE not in make_page(HOSTILE)
    # Title, heading, verdict, four cells (one with key and value), environment, command, config.
    assert "".join(hostile.text).count(HOSTILE) == 2 + 1 + 5 + 2 + 1 + 1
    names = {HOSTILE: 1.0, "x" * 99: 2.0, "x" * 98: 3.0}
    assert {*Reader(bar_chart(names, HOSTILE)).tags} <= {"svg", "g", "rect", "text", "line"}


def test_a_page_needs_no_network() -> None:
    text = make_page(
        losses=[[1, 4.0], [2, 3.0]], memory=MEMORY, command="train data.url=https://example.org/a"
    )
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


def test_charts_have_axes_with_units_and_a_text_for_those_who_do_not_see_them() -> None:
    curve = [[1, 4.0], [2, "nan"], [3, 2.0], [4, 3.0]]
    reader = Reader(make_page(times=[0.1, 0.4], waits=[0.0, 0.02], losses=curve, memory=MEMORY))
    captions = [
        "live bytes by category; the peak, 100.0 MiB, is in the forward: mm in a<b",
        "loss from 4 at step 1 to 3 at step 4; lowest 2, highest 4; 1 point not finite",
        "2 batches, at most 0.4000 s, 0.50 s in total",
        "2 batches, at most 0.0200 s, 0.02 s in total",
    ]
    assert [value for name, value in reader.attributes if name == "aria-label"] == captions
    assert {*captions, "optimizer step", "loss", "timed batch", "ms", "MiB"} <= {*reader.text}
    table = reader.text[reader.text.index("category") :]
    cells = [text for text in table if text.strip()]
    assert cells[cells.index("total") :][:4] == ["total", "100.0 MiB", "10 B", "10 B"]
    assert "buffers" not in cells


@pytest.mark.parametrize("times", [[], [0.1], [0.0, 0.0]])
def test_without_anything_to_show_there_is_no_chart(times: list[float]) -> None:
    text = make_page(
        times=times, waits=[0.0, 1e-5], losses=[[1, 2.0], [2, "nan"]], memory=MEMORY | {"timeline": []}
    )
    assert "svg" not in Reader(text).tags
    assert "Memory at the peak" not in text


def test_long_runs_are_thinned_and_no_slow_batch_is_lost() -> None:
    times = [(index, 0.1) for index in range(10_007)]
    times[7_654] = (7_654, 0.5)
    drawn = points(line_chart(times, "batch", "ms", lowest=0.0))
    assert 500 <= len(drawn) < 1000
    heights = [y for _, y in drawn]
    assert [index for index, y in enumerate(heights) if y < min(heights) + 1] == [7_654 // 20]


def test_memory_is_stacked_and_bars_are_as_long_as_their_ratios() -> None:
    text = memory_chart(TIMELINE, CATEGORIES)
    reader = Reader(text)
    assert [name for name in CATEGORIES if name in reader.text] == ["parameters", "activations"]
    fills = [
        value for name, value in reader.attributes if name == "fill" and value and value.startswith("var")
    ]
    assert len(fills) == 4, "two areas, and their marks in the legend"
    first, second = (points(f" d={area}") for area in re.findall(r' d=("[^"]*")', text))
    assert first[:3] == second[:2:-1], "activations stand on parameters"
    zero, top = first[-1][1], second[1][1]
    assert zero - top == pytest.approx(10 * (zero - first[0][1])), "100 MiB are ten times 10 MiB"
    bars = re.findall(
        r'<rect [^>]*width="([\d.]+)" height="[\d.]+" fill="var', bar_chart({"a": 1.0, "b": 0.25}, "x")
    )
    assert float(bars[0]) * 4 == pytest.approx(float(bars[1])), "the first one at the top is drawn last"


def test_the_page_of_a_comparison_says_first_what_helps_and_shows_every_row() -> None:
    figures = {"samples_per_s": 10.0, "speed_ratio": 1.0, "peak_bytes": 2048, "peak_ratio": 1.0}
    half = {"samples_per_s": 5.0, "speed_ratio": 0.5, "peak_bytes": 512, "peak_ratio": 0.25}
    rows = [ComparisonRow("baseline", MEASURED, **figures), ComparisonRow("half", MEASURED, **half)]
    rows.append(ComparisonRow("<odd>", FAILED, "no end after 3 s"))
    content = {"recipe": "lm", "command": "a=<b>", "steps": 6, "rounds": 2, "environment": {}}
    reader = Reader(comparison_page(content, rows))
    verdict = "Fastest: baseline, 1.00 times the baseline. Least memory: half, 0.25 of the baseline."
    assert {verdict, "<odd>", "failed: no end after 3 s", "512 B", "a=<b>"} <= {*reader.text}
    assert reader.tags.count("svg") == 2
