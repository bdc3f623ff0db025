"""Memory on a page: layers on top of each other, their names, and the table of phases."""

from __future__ import annotations

import re
from typing import Any

from lightning_eff.report.html import memory_section
from lightning_eff.report.recording import CATEGORIES
from lightning_eff.report.module_tracker import PHASES

POINTS = [(10, 0), (10, 90), (10, 30)]
EMPTY = dict.fromkeys(CATEGORIES, 0)


def memory(**changes: Any) -> dict[str, Any]:
    timeline = [{"phase": "forward", **EMPTY, "parameters": p, "activations": a} for p, a in POINTS]
    by_phase = {phase: EMPTY | {"parameters": 10} for phase in PHASES}
    by_phase["forward"] |= {"activations": 90}
    found = {"num_bytes": 100, "phase": "forward", "operation": "mm", "path": "a<b"}
    return found | {"timeline": timeline, "by_phase": by_phase} | changes


def test_layers_lie_on_each_other_and_reach_the_top_at_the_peak() -> None:
    text = memory_section(memory())
    first, second = re.findall(r'<polygon class="c(\d)" points="([^"]+)"', text)
    assert (first[0], second[0]) == (
        str(CATEGORIES.index("parameters")),
        str(CATEGORIES.index("activations")),
    )
    assert first[1] == "0.0,88.4 500.0,88.4 1000.0,88.4 1000.0,98.0 500.0,98.0 0.0,98.0"
    assert second[1] == "0.0,88.4 500.0,2.0 1000.0,59.6 1000.0,88.4 500.0,88.4 0.0,88.4"


def test_words_and_table_say_what_the_picture_shows() -> None:
    text = memory_section(memory())
    assert "The peak is in the forward: mm in a&lt;b." in text
    assert 'role="img" aria-label="live bytes by category over the first steps, from 0 to 100 B"' in text
    assert re.findall(r"<li>.*?</i>([^<]+)</li>", text) == ["parameters", "activations"]
    (total,) = re.findall(r'<th scope="row">together</th>(.+?)</tr>', text)
    assert re.findall(r">([^<]+)</td>", total) == ["100 B", "10 B", "10 B"]


def test_nothing_is_drawn_of_nothing() -> None:
    assert memory_section({}) == ""
    assert memory_section(memory(timeline=[])) == ""
