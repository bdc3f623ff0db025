"""Tables fit a width; words are broken only where they must be, and none is lost."""

from __future__ import annotations

import pytest

from lightning_eff.core.text import text_table

HEADER = ("technique", "options", "why")
ROWS = (
    ("callbacks/gradient_checkpointing", "blocks=auto preserve_rng_state=True", "the model draws no numbers"),
    ("callbacks/empty_cache", "", "it is\na \x1b[2J line"),
)
WORDS = [word for row in (HEADER, *ROWS) for cell in row for word in cell.replace("\x1b", "\\x1b").split()]


@pytest.mark.parametrize("width", [None, 200, 100])
def test_words_stay_whole_if_the_longest_words_fit(width: int | None) -> None:
    lines = text_table(HEADER, ROWS, width=width).split("\n")
    assert sorted(" ".join(lines).split()) == sorted(WORDS)
    assert max(map(len, lines)) <= (width or 200)
    assert (
        len({line.index(word) for line in lines for word in ("options", "blocks=auto") if word in line}) == 1
    )


def test_a_narrow_table_breaks_words_and_loses_none() -> None:
    lines = text_table(HEADER, ROWS, width=40).split("\n")
    assert max(map(len, lines)) <= 40
    assert sorted("".join("".join(lines).split())) == sorted("".join(WORDS))
