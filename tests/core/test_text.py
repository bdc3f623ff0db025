"""Numbers as people read them, columns that line up."""

from __future__ import annotations

import pytest

from lightning_eff.core.text import human_bytes, human_count, text_table


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-2048, "-2.0 KiB"),
        (1023 * 2**10, "1023.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20, "1.0 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(num_bytes: float, shown: str) -> None:
    assert human_bytes(num_bytes) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (-1500, "-1.5k"),
        (1e6, "1.0M"),
        (2.5e9, "2.5G"),
        (999_960, "1.0M"),
        (999.7, "1.0k"),
        (989.4e12, "989.4T"),
        (1.2e16, "12.0P"),
    ],
)
def test_counts_are_shown_with_decimal_prefixes(count: float, shown: str) -> None:
    assert human_count(count) == shown


def test_columns_begin_below_each_other_and_lines_end_with_words() -> None:
    table = text_table(["name", "what it did"], [["a", ""], ["a long name", "x"], ["", "y z"]], indent=2)
    assert table.split("\n") == [
        "  name         what it did",
        "  a",
        "  a long name  x",
        "               y z",
    ]


def test_a_table_without_rows_is_its_header() -> None:
    assert text_table(["name", "n"], []) == " name  n"


def test_a_cell_is_one_line() -> None:
    assert text_table(["a", "b"], [["1\n2", "x"]]) == " a    b\n 1 2  x"
