"""The report's text for runs that finished, failed, or were too short to time."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.core import catalog
from lightning_eff.report import summary
from tests.support.reports import MEASURED, make_report

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


def test_half_of_a_state_is_advised_where_it_has_more_than_4_bytes_a_parameter() -> None:
    memory = {"phase": "step", "by_category": {"optimizer state": 2**20}}
    key = "state_bytes_per_parameter"
    for numbers, is_advised in (({key: 8.0}, True), ({key: 4.01}, True), ({key: 4.0}, False), ({}, True)):
        row = {"technique": "callbacks/optimizer_choice", "status": "applied", "did": "", "numbers": numbers}
        text = summary.report_text(make_report(memory=memory, ledger=[row]))
        assert ("optimizer state: optimizer/adamw_bf16, " in text) is is_advised
        assert "optimizer/cpu_offload" in text


def test_advice_is_what_can_be_applied() -> None:
    checkpointing = "callbacks/gradient_checkpointing"
    for category, measured, precision, names in (
        ("activations", {"first_batch_samples": 1}, "bf16-true", checkpointing),
        ("activations", {"first_batch_samples": 1}, "32-true", f"{checkpointing}, precision/bf16_mixed"),
        ("temporaries", {"first_batch_samples": 1}, "32-true", ""),
        ("parameters", {"world_size": 1}, "bf16-mixed", "precision/bf16_true, precision/quantized_base"),
        ("parameters", {"world_size": 2}, "bf16-true", "precision/quantized_base, strategy/fsdp2"),
    ):
        memory = {"phase": "backward", "by_category": {category: 2**20}}
        found = make_report(memory=memory, measured=MEASURED | measured, precision=precision)
        text = summary.report_text(found)
        assert [line for line in text.split("\n") if line.startswith(" to lower")] == (
            [f" to lower {category}: {names}"] if names else []
        )


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


def test_every_technique_that_lowers_memory_is_one_that_can_be_listed() -> None:
    known = {entry.name for entry in catalog.options()}
    assert {name for names in summary.LOWERED_BY.values() for name in names} <= known
