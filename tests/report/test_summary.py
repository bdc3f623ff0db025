"""The report's text for runs that finished, failed, or were too short to time."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from lightning_eff.core import catalog
from lightning_eff.report import summary
from lightning_eff.report.throughput import Throughput

NOTHING = dict.fromkeys(("batch_time_s", "samples_per_s", "tokens_per_s", "mfu", "data_wait_share"))
MEASURED = {
    "batch_time_s": 0.0123,
    "samples_per_s": 1300.04,
    "tokens_per_s": 166_400.0,
    "flops_per_s": 2.5e12,
    "mfu": 0.4567,
    "peak_bytes": 3 * 2**29,
    "data_wait_share": 0.021,
    "num_batches": 96,
}


def make_report(**changes: Any) -> dict[str, Any]:
    ledger = [
        {"technique": "precision/auto", "asked": {}, "status": "applied", "did": "16 layers in bf16"},
        {"technique": "callbacks/empty_cache", "asked": {}, "status": "no effect", "did": "never"},
    ]
    outcome = {"status": "finished", "reason": "", "num_steps": 100, "measured": MEASURED, "ledger": ledger}
    return {"title": "Efficiency report", "environment": {}, "command": "train lm"} | outcome | changes


def test_the_text_of_a_finished_run() -> None:
    assert summary.report_text(make_report()).split("\n") == [
        "Efficiency report. Finished 100 optimizer steps (96 batches timed)."
        " No effect: callbacks/empty_cache.",
        " time per batch (median) 12.3 ms | samples/s 1300.0 | tokens/s 166.4k"
        " | FLOP/s per device 2.5T | MFU 45.7%"
        " | peak memory 1.5 GiB | data wait 2.1%",
        " technique              status     what it did",
        " precision/auto         applied    16 layers in bf16",
        " callbacks/empty_cache  no effect  never",
    ]


def test_a_failed_run_says_after_how_many_steps_and_why() -> None:
    failed = make_report(status="failed", reason="OSError: the disk is full", num_steps=6)
    expected = "Failed after 6 optimizer steps: OSError: the disk is full"
    assert summary.run_verdict(failed) == expected
    assert summary.report_text(failed).startswith(f"Efficiency report. {expected}\n")
    assert "precision/auto" in summary.report_text(failed), "the ledger is there all the same"


def test_a_run_too_short_to_time_says_so_and_shows_what_was_counted() -> None:
    short = make_report(num_steps=2, measured=NOTHING | {"peak_bytes": 2048, "num_batches": 0}, ledger=[])
    assert summary.report_text(short).split("\n") == [
        "Efficiency report. Finished 2 optimizer steps: too few to measure speed.",
        " peak memory 2.0 KiB",
    ]


def test_only_techniques_without_effect_are_listed_as_such() -> None:
    ledger = make_report()["ledger"]
    assert "No effect" not in summary.run_verdict(make_report(ledger=ledger[:1]))
    assert summary.run_verdict(make_report(ledger=[ledger[1], ledger[1] | {"technique": "other"}])).endswith(
        " No effect: callbacks/empty_cache, other."
    )


def test_figures_that_were_not_measured_are_left_out_and_zero_is_a_figure() -> None:
    assert summary.key_figures(make_report(measured=NOTHING)) == []
    assert summary.key_figures(make_report(measured=NOTHING | {"data_wait_share": 0.0, "peak_bytes": 0})) == [
        ("peak memory", "0 B"),
        ("data wait", "0.0%"),
    ]


def test_page_has_the_verdict_the_figures_and_the_ledger() -> None:
    shown = make_report()
    throughput = Throughput()
    throughput.batch_times_s.extend([0.5, 0.25])
    page = summary.report_page(shown, throughput)
    assert summary.run_verdict(shown) in page
    for name, value in summary.key_figures(shown):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    assert "16 layers in bf16" in page
    assert "verdict" not in shown, "what was given is left as it was"


def test_json_safe_is_strict_json() -> None:
    value = summary.json_safe({"a": [math.inf, (1, None)], 2: {"b": -math.inf, "c": True}})
    assert value == {"a": ["inf", [1, None]], "2": {"b": "-inf", "c": True}}
    json.dumps(value, allow_nan=False)


def test_the_categories_at_the_peak_and_the_techniques_that_lower_the_largest_are_listed() -> None:
    by_category = {"parameters": 2**20, "gradients": 0, "activations": 3 * 2**20}
    text = summary.report_text(make_report(memory={"phase": "backward", "by_category": by_category}))
    assert " at the peak (backward): activations 3.0 MiB, parameters 1.0 MiB\n" in text
    assert " to lower activations: callbacks/gradient_checkpointing, callbacks/micro_batch" in text


def test_every_technique_that_lowers_memory_is_one_that_can_be_listed() -> None:
    known = {entry.name for entry in catalog.options()}
    assert {name for names in summary.LOWERED_BY.values() for name in names.split(", ")} <= known


def test_a_resumed_run_says_which_steps_it_made() -> None:
    assert "Finished 4 optimizer steps (7 to 10) (96 batches" in summary.run_verdict(
        make_report(num_steps=4, first_step=6)
    )


@pytest.mark.parametrize("changes", [{"status": "stopped"}, {"measured": NOTHING | {"num_batches": 0}}])
def test_what_had_no_effect_is_listed_however_the_run_ended(changes: dict[str, Any]) -> None:
    assert summary.run_verdict(make_report(**changes)).endswith(" No effect: callbacks/empty_cache.")
