"""The comparison's page: what it says first, its bars, and that nothing in it is taken for HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from lightning_eff.comparison import html_page
from lightning_eff.comparison.result_table import FAILED, MEASURED, ComparisonRow

FOUND = {
    "recipe": "lm", "command": "lightning-eff compare lm 'a=<b>'", "steps": 6, "rounds": 2,
    "environment": {"device": "CPU", "torch": "2.13"},
}  # fmt: skip
ROWS = [
    ComparisonRow("baseline", MEASURED, samples_per_s=10.0, speed_ratio=1.0, peak_bytes=2048, peak_ratio=1.0),
    ComparisonRow("half", MEASURED, samples_per_s=5.0, speed_ratio=0.5, peak_bytes=512, peak_ratio=0.25),
    ComparisonRow("<odd>", FAILED, "no end after 3 s"),
]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "br", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_is_whole_needs_no_network_and_takes_no_text_for_tags() -> None:
    text = html_page.render_page(FOUND, ROWS)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"script", "link", "img", "odd"} & tags.seen
    assert "http" not in text
    assert "&lt;odd&gt;" in text
    assert "no end after 3 s" in text
    assert "live bytes" in text


def test_bars_are_as_long_as_their_ratios() -> None:
    widths = re.findall(r"width:([\d.]+)%", html_page.render_page(FOUND, ROWS))
    assert widths == ["100.0", "50.0", "100.0", "25.0"]


def test_it_says_first_what_helps_and_what_does_not() -> None:
    assert html_page.summary_sentence(ROWS) == (
        "Nothing here is faster than the baseline. Least memory: half, 0.25 of the baseline."
    )
    assert html_page.summary_sentence(ROWS[:1]) == "Nothing was measured besides the baseline."
