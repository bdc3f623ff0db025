"""Trials in turn, results on the disk, and the table that they make."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.comparison import result_table
from lightning_eff.comparison.result_table import FAILED, MEASURED, NOT_RUN, TrialResult
from lightning_eff.comparison.rounds import TrialRounds
from lightning_eff.comparison.trial_plan import PlannedTrial


def report(
    rate: float, peak: int | None = 100, losses: Any = ((1, 4.0), (2, 3.0)), **more: Any
) -> TrialResult:
    measured = {"samples_per_s": rate, "peak_bytes": peak, "first_batch_s": 0.5} | more
    return TrialResult(MEASURED, report={"measured": measured, "losses": losses, "ledger": []})


class Turns:
    """Answers trials from a list, and notes who was asked."""

    def __init__(self, **answers: list[TrialResult]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, trial: PlannedTrial, folder: Path) -> TrialResult:
        self.asked.append(trial.name)
        return self.answers[trial.name].pop(0)


BASE, ONE, OTHER = PlannedTrial("baseline"), PlannedTrial("one", ("one",)), PlannedTrial("other", ("other",))


def run_rounds(tmp_path: Path, turns: Turns, *, rounds: int = 3) -> TrialRounds:
    comparison = TrialRounds(tmp_path, turns, lambda _: None)
    for number in range(1, rounds + 1):
        comparison.run_round(number, [BASE, ONE, OTHER])
    return comparison


def test_rounds_go_forwards_and_backwards_and_rows_are_of_the_fastest(tmp_path: Path) -> None:
    turns = Turns(
        baseline=[report(10.0), report(14.0), report(11.0)],
        one=[report(22.0, 50, ((1, 4.0), (2, 3.5))), report(20.0, 50), report(23.0, 52)],
        other=[report(11.0), report(11.0), report(11.0)],
    )
    found = run_rounds(tmp_path, turns).table_rows()
    assert turns.asked == ["baseline", "one", "other", "other", "one", "baseline", "baseline", "one", "other"]
    base, one, other = found
    assert (base.samples_per_s, base.samples_per_s_spread, base.speed_ratio) == (14.0, 4.0, 1.0)
    assert (one.samples_per_s, one.samples_per_s_spread, one.speed_ratio) == (23.0, 3.0, 23.0 / 14.0)
    assert (one.peak_bytes, one.peak_ratio) == (52, 0.52)
    assert (one.loss_difference, other.loss_difference, base.loss_difference) == (0.5, 0.0, None)
    assert result_table.format_rows(found).splitlines()[1:3] == [
        " baseline   14.0 (-4.0)  1.00    100 B  1.00    -          measured",
        " one        23.0 (-3.0)  1.64    52 B   0.52    +0.5       measured",
    ]


def test_a_slow_one_runs_once_and_losses_are_those_of_the_steps_that_both_have(tmp_path: Path) -> None:
    turns = Turns(
        baseline=[report(10.0, losses=((1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)))] * 3,
        one=[report(2.4, losses=((1, 4.0), (2, 3.5)))],
        other=[report(2.6)] * 3,
    )
    _, one, other = run_rounds(tmp_path, turns).table_rows()
    assert (one.num_rounds, other.num_rounds) == (1, 3)
    assert one.loss_difference == 0.5


def test_one_that_fails_says_why_and_has_no_second_try(tmp_path: Path) -> None:
    turns = Turns(
        baseline=[report(10.0)] * 3,
        one=[TrialResult(FAILED, "it is odd")],
        other=[report(9.0), TrialResult(FAILED, "no end after 3 s"), report(9.0)],
    )
    comparison = TrialRounds(tmp_path, turns, lambda _: None)
    comparison.add_refused(PlannedTrial("never"), "needs CUDA")
    for number in (1, 2, 3):
        comparison.run_round(number, [BASE, ONE, OTHER])
    found = {each.technique: each for each in comparison.table_rows()}
    assert list(found) == ["baseline", "other", "one", "never"]
    assert turns.asked.count("one") == 1
    assert turns.asked.count("other") == 2
    assert (found["one"].status, found["one"].reason) == (FAILED, "it is odd")
    assert found["other"].status == MEASURED
    assert found["other"].reason == "1 of 2 rounds failed: no end after 3 s"
    assert (found["never"].status, found["never"].reason) == (NOT_RUN, "needs CUDA")
    assert "not run: needs CUDA" in result_table.format_rows(list(found.values()))


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    first = Turns(baseline=[report(10.0)], one=[report(20.0)], other=[TrialResult(FAILED, "odd")])
    before = [asdict(each) for each in run_rounds(tmp_path, first, rounds=1).table_rows()]
    (tmp_path / "rounds" / "1-one.json").unlink()
    again = Turns(one=[report(20.0)], other=[TrialResult(FAILED, "odd")])
    assert [asdict(each) for each in run_rounds(tmp_path, again, rounds=1).table_rows()] == before
    assert again.asked == ["one", "other"], "what failed is tried again"
    changed = Turns(baseline=[report(12.0)])
    comparison = TrialRounds(tmp_path, changed, lambda _: None)
    comparison.run_round(1, [PlannedTrial("baseline", settings=("seed=2",))])
    assert changed.asked == ["baseline"], "a row of that name, and yet another one"


def test_an_interruption_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupt(trial: PlannedTrial, folder: Path) -> TrialResult:
        if trial.name == "one":
            raise KeyboardInterrupt
        return report(10.0)

    comparison = TrialRounds(tmp_path, interrupt, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        comparison.run_round(1, [BASE, ONE, OTHER])
    assert [path.name for path in (tmp_path / "rounds").iterdir()] == ["1-baseline.json"]
    assert json.loads((tmp_path / "rounds" / "1-baseline.json").read_text())["status"] == MEASURED
    assert comparison.table_rows()[0].status == MEASURED


def test_techniques_without_effect_are_named(tmp_path: Path) -> None:
    idle = {"technique": "callbacks/empty_cache", "status": "no effect"}
    saves = {"technique": "checkpoint_io/durable", "status": "no effect"}
    result = report(10.0, None)
    report_of = {**result.report, "ledger": [idle, saves]}
    found = result_table.summarize_rounds("x", [], [TrialResult(MEASURED, report=report_of)])
    assert found.reason == "no effect: empty_cache"
    assert (
        result_table.summarize_rounds("empty_cache", [], [TrialResult(MEASURED, report=report_of)]).reason
        == "no effect"
    )
    assert result_table.cells(found)[3] == "-"
    assert (
        result_table.cells(result_table.summarize_rounds("x", [], [report(1.0, first_batch_s=31.0)]))[-1]
        == "measured, first batch 31 s"
    )


@pytest.mark.parametrize("damaged", ['{"status": "meas', '{"status": "measured"}', "[]", ""])
def test_a_result_that_cannot_be_read_is_measured_again(tmp_path: Path, damaged: str) -> None:
    run_rounds(tmp_path, Turns(baseline=[report(10.0)], one=[report(20.0)], other=[report(9.0)]), rounds=1)
    (tmp_path / "rounds" / "1-one.json").write_text(damaged)
    again = Turns(one=[report(30.0)])
    found = {each.technique: each for each in run_rounds(tmp_path, again, rounds=1).table_rows()}
    assert again.asked == ["one"]
    assert found["one"].samples_per_s == 30.0
