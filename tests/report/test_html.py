"""The page: everything given is escaped, nothing comes over the network, the chart shows every slow batch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from typing import Any

import jinja2
import pytest

from lightning_eff.report.html import memory_section, render_page
from lightning_eff.report.recording import CATEGORIES, PHASES

HOSTILE = """</pre></title><script src="http://evil">alert('&amp;')</script><link href=//evil>"""
WITHOUT_END = {"meta", "br", "polyline"}


class Reader(HTMLParser):
    """Collects tags and attributes, and checks that what is opened is closed."""

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
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in WITHOUT_END:
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
    report = {"title": word, "verdict": word, "ledger": [row], "environment": {word: word}, "command": word}
    return render_page(report | changes, figures=[(word, word)], times_s=times, waits_s=waits)


def points(text: str) -> list[tuple[float, float]]:
    drawn = re.search(r'points="([^"]*)"', text)
    assert drawn is not None
    return [(float(x), float(y)) for x, _, y in (pair.partition(",") for pair in drawn[1].split())]


def test_html_in_values_is_escaped_everywhere() -> None:
    harmless, hostile = Reader(make_page()), Reader(make_page(HOSTILE))
    assert hostile.tags == harmless.tags
    assert hostile.attributes == harmless.attributes
    assert HOSTILE not in make_page(HOSTILE)
    # Title, heading, verdict, figure, four cells (one with key and value), environment, command.
    assert "".join(hostile.text).count(HOSTILE) == 2 + 1 + 2 + 5 + 2 + 1


def test_the_page_needs_no_network() -> None:
    text = make_page()
    assert re.findall(r"https?:|//|url\(|@import", text) == []
    reader = Reader(text)
    assert {"script", "link", "iframe", "img", "object", "base"} & set(reader.tags) == set()
    assert {"src", "href", "xlink:href", "style"} & {name for name, _ in reader.attributes} == set()


def test_a_url_in_the_command_is_text() -> None:
    text = make_page(command="train data.url=https://example.org/a")
    assert "<pre>train data.url=https://example.org/a</pre>" in text
    assert "href" not in text


def test_raw_json_is_the_report() -> None:
    report = {"title": "a < b", "verdict": "'\"&", "ledger": [], "environment": {}, "command": "", "n": 1.5}
    text = render_page(report, figures=[], times_s=[], waits_s=[])
    raw = re.search(r"<summary>JSON</summary><pre>(.*?)</pre>", text, re.DOTALL)
    assert raw is not None
    assert json.loads(unescape(raw[1])) == report


def test_chart_spans_the_box_and_the_slowest_is_at_the_top() -> None:
    text = make_page(times=[0.1, 0.4, 0.2])
    assert points(text) == [(0.0, 74.0), (500.0, 2.0), (1000.0, 50.0)]
    assert "3 batches in order, from 0 to 0.4000 s" in text


def test_waits_are_drawn_if_there_were_any() -> None:
    text = make_page(times=[], waits=[0.0, 0.02, 0.01])
    assert points(text) == [(0.0, 98.0), (500.0, 2.0), (1000.0, 50.0)]
    assert "3 batches in order, from 0 to 0.0200 s; 0.03 s in total" in text
    assert "Wait for data" not in make_page(times=[], waits=[0.0, 1e-5, 2e-5])


def test_long_runs_are_thinned_and_no_slow_batch_is_lost() -> None:
    times = [0.1] * 10_007
    times[7_654] = 0.5
    drawn = points(make_page(times=times))
    assert 500 <= len(drawn) < 1000
    assert [index for index, (_, y) in enumerate(drawn) if y == 2.0] == [7_654 // 20]
    assert drawn[0] == (0.0, 78.8)
    assert drawn[-1] == (1000.0, 78.8)


@pytest.mark.parametrize("times", [[], [0.1], [0.0, 0.0]])
def test_too_few_batches_have_no_chart_and_no_command_no_section(times: list[float]) -> None:
    text = make_page(times=times, command="")
    assert "svg" not in Reader(text).tags
    assert "Reproduce" not in text
    assert "Reproduce" in make_page()


def test_a_row_that_lacks_a_cell_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="did"):
        make_page(ledger=[{"technique": "x", "asked": {}, "status": "applied"}])


def test_losses_are_drawn_without_those_that_are_not_finite() -> None:
    curve = [[1, 4.0], [2, "nan"], [3, 2.0], [4, 3.0]]
    text = make_page(times=[], losses=curve)
    assert points(text) == [(0.0, 2.0), (500.0, 98.0), (1000.0, 50.0)]
    assert "loss from 4 at step 1 to 3 at step 4; lowest 2, highest 4; 1 point not finite" in text


PARAMETERS_AND_ACTIVATIONS = [(10, 0), (10, 90), (10, 30)]
EMPTY = dict.fromkeys(CATEGORIES, 0)


def memory(**changes: Any) -> dict[str, Any]:
    timeline = [
        {"phase": "forward", **EMPTY, "parameters": p, "activations": a}
        for p, a in PARAMETERS_AND_ACTIVATIONS
    ]
    by_phase = {phase: EMPTY | {"parameters": 10} for phase in PHASES}
    by_phase["forward"] |= {"activations": 90}
    found = {"num_bytes": 100, "phase": "forward", "operation": "mm", "path": "a<b"}
    return found | {"timeline": timeline, "by_phase": by_phase} | changes


def test_memory_layers_are_stacked_up_to_the_peak() -> None:
    text = memory_section(memory())
    first, second = re.findall(r'<polygon class="c(\d)" points="([^"]+)"', text)
    assert (first[0], second[0]) == (
        str(CATEGORIES.index("parameters")),
        str(CATEGORIES.index("activations")),
    )
    assert first[1] == "0.0,88.4 500.0,88.4 1000.0,88.4 1000.0,98.0 500.0,98.0 0.0,98.0"
    assert second[1] == "0.0,88.4 500.0,2.0 1000.0,59.6 1000.0,88.4 500.0,88.4 0.0,88.4"


def test_memory_text_and_table_agree_with_the_chart() -> None:
    text = memory_section(memory())
    assert "The peak is in the forward: mm in a&lt;b." in text
    assert 'role="img" aria-label="live bytes by category over the first steps, from 0 to 100 B"' in text
    assert re.findall(r"<li>.*?</i>([^<]+)</li>", text) == ["parameters", "activations"]
    (total,) = re.findall(r'<th scope="row">total</th>(.+?)</tr>', text)
    assert re.findall(r">([^<]+)</td>", total) == ["100 B", "10 B", "10 B"]


def test_without_counted_memory_there_is_no_section() -> None:
    assert memory_section({}) == ""
    assert memory_section(memory(timeline=[])) == ""
