"""Numbers as people read them, tables that fit."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lightning_eff.core.text import human_bytes, human_count, text_table


@pytest.mark.parametrize(
    ("human", "shown"),
    [
        (human_bytes, {1023: "1023 B", 1024: "1.0 KiB", -2048: "-2.0 KiB", 2**20 - 1: "1.0 MiB"}),
        (human_bytes, {1.5 * 2**30: "1.5 GiB", 2**40: "1.0 TiB", 5000 * 2**40: "5000.0 TiB"}),
        (human_count, {0: "0", 999: "999", 1000: "1.0k", -1500: "-1.5k", 2.5e9: "2.5G", 999_960: "1.0M"}),
        (human_count, {999.7: "1.0k", 989.4e12: "989.4T", 1.2e16: "12.0P"}),
    ],
)
def test_bytes_have_binary_units_and_counts_decimal_prefixes(
    human: Callable[[float], str], shown: dict[float, str]
) -> None:
    assert {number: human(number) for number in shown} == shown


def test_columns_begin_below_each_other_and_lines_end_with_words() -> None:
    table = text_table(["name", "what it did"], [["a", ""], ["a long [name]", "x:smile:"], ["", "y\nz"]])
    assert table.split("\n") == [
        " name           what it did",
        " a",
        " a long [name]  x:smile:",
        "                y z",
    ]
    assert text_table(["name", "n"], []) == " name  n"


@pytest.mark.parametrize(("is_terminal", "longest"), [(True, 40), (False, 60)])
def test_a_table_fits_the_terminal_and_otherwise_its_width(
    monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, longest: int
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    rows = [["a", "every word " * 9], ["b", "short"]]
    lines = text_table(["name", "text"], rows, width=60).splitlines()
    assert longest - 12 < max(map(len, lines)) <= longest
    assert " ".join(" ".join(lines[1:-1]).split()) == "a " + "every word " * 8 + "every word"
    assert "\x1b" not in "".join(lines)
    assert len(text_table(["name", "text"], rows).splitlines()) == (3 if not is_terminal else len(lines))
