"""The report's text for runs that finished, failed, or were too short to time."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.report import summary
from tests.support.reports import make_report

NOTHING = dict.fromkeys(("batch_time_s", "samples_per_s", "tokens_per_s", "mfu", "data_wait_share"))


def test_the_text_of_a_finished_run() -> None:
    by_category = {"parameters": 2**20, "gradients": 0, "activations": 3 * 2**20}
    memory = {"phase": "backward", "by_category": by_category}
    _, figures, peak, *_, applied, idle = summary.report_text(make_report(memory=memory)).split("\n")
    values = [each.split()[-1] for each in figures.split(" | ")]
    assert values == ["ms", "1300.0", "166.4k", "2.5T", "45.7%", "GiB", "2.1%"]
    assert peak == " at the peak (backward): activations 3.0 MiB, parameters 1.0 MiB"
    assert applied.split() == ["precision/auto", "applied", "bf16-mixed", "on", "cpu"]
    assert idle.split() == ["callbacks/empty_cache", "no", "effect", "never"]


def test_advice_is_a_table_of_the_text() -> None:
    row = {"try": "+callbacks=tiled_loss", "saved_bytes": 2**20, "why": "logits"}
    text = summary.report_text(make_report(advice=[row, row | {"saved_bytes": None}]))
    assert [line.split()[0] for line in text.split("\n") if "tiled_loss" in line] == ["1.0", "time"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"status": "failed", "reason": "OSError: full", "num_steps": 6},
            ["Failed after 6", "OSError: full"],
        ),
        ({"status": "stopped"}, ["Stopped after 100", "No effect: callbacks/empty_cache"]),
        ({"num_steps": 2, "measured": NOTHING | {"num_batches": 0}}, ["Finished 2", "too few"]),
        ({"num_steps": 4, "first_step": 6, "ledger": []}, ["Finished 4", "(7 to 10)", "96 batches"]),
    ],
)
def test_a_verdict_says_how_the_run_ended(changes: dict[str, Any], words: list[str]) -> None:
    report = make_report(**changes)
    verdict = summary.run_verdict(report)
    assert all(word in verdict for word in words), verdict
    text = summary.report_text(report)
    assert verdict in text
    assert all(row["did"] in text for row in report["ledger"])


def test_figures_that_were_not_measured_are_left_out_and_zero_is_a_figure() -> None:
    assert summary.key_figures(make_report(measured=NOTHING)) == []
    assert summary.key_figures(make_report(measured=NOTHING | {"data_wait_share": 0.0, "peak_bytes": 0})) == [
        ("peak memory", "0 B"),
        ("data wait", "0.0%"),
    ]
