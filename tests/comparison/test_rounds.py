"""Rounds of trials, results that are stored, and the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.comparison import result_table, subprocess_trial
from lightning_eff.comparison.result_table import FAILED, MEASURED, NOT_RUN, ComparisonRow, TrialResult
from lightning_eff.comparison.rounds import Trial, TrialRounds

NAMES = ("baseline", "one", "other")


def report(
    rate: float, peak: int | None = 100, losses: Any = ((1, 4.0), (2, 3.0)), **more: Any
) -> TrialResult:
    measured = {"samples_per_s": rate, "peak_bytes": peak, "first_batch_s": 0.5} | more
    return TrialResult(MEASURED, report={"measured": measured, "losses": losses, "ledger": []})


class Turns:
    """Trials that answer from lists in this process, in the order in which they are asked."""

    def __init__(self, **answers: list[TrialResult]) -> None:
        self.asked: list[str] = []
        self._answers = answers

    def trial(self, name: str, *overrides: str) -> Trial:
        def train(_: Path) -> Any:
            self.asked.append(name)
            return self._answers[name].pop(0)

        return Trial(name, list(overrides), train)

    def run(self, folder: Path, *, rounds: int = 3) -> list[ComparisonRow]:
        comparison = TrialRounds(folder, limit_s=60.0)
        for _ in range(rounds):
            comparison.run_round([self.trial(name) for name in NAMES])
        return comparison.table_rows()


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(train: Callable[[Path], TrialResult], *, folder: Path, limit_s: float) -> TrialResult:
        return train(folder)

    monkeypatch.setattr(subprocess_trial, "run", run)


def test_rounds_alternate_their_order_and_a_row_has_the_fastest_round(tmp_path: Path) -> None:
    turns = Turns(
        baseline=[report(10.0), report(14.0), report(11.0)],
        one=[report(22.0, 50, ((1, 4.0), (2, 3.5))), report(20.0, 50), report(23.0, 52)],
        other=[report(11.0)] * 3,
    )
    found = turns.run(tmp_path)
    assert turns.asked == [*NAMES, *reversed(NAMES), *NAMES]
    base, one, other = found
    assert (base.samples_per_s, base.samples_per_s_spread, base.speed_ratio) == (14.0, 4.0, 1.0)
    assert (one.samples_per_s, one.samples_per_s_spread, one.speed_ratio) == (23.0, 3.0, 23.0 / 14.0)
    assert (one.peak_bytes, one.peak_ratio, one.num_rounds) == (52, 0.52, 3)
    assert (one.loss_difference, other.loss_difference, base.loss_difference) == (0.5, 0.0, None)
    cells = ["one", "23.0 (-3.0)", "1.64", "52 B", "0.52", "+0.5", "measured"]
    assert result_table.cells(one) == tuple(cells)


def test_losses_are_compared_at_the_last_quarter_of_the_common_steps(tmp_path: Path) -> None:
    base = report(10.0, losses=[(step, 9.0 - step) for step in range(1, 9)])
    longer = report(10.0, losses=[(step, 9.5 - step / 2) for step in range(1, 17)])
    _, one, _ = Turns(baseline=[base], one=[longer], other=[base]).run(tmp_path, rounds=1)
    assert one.loss_difference == (4.0 + 4.5) / 2, "of steps 7 and 8"


def test_a_trial_that_fails_has_the_reason_and_no_second_try(tmp_path: Path) -> None:
    turns = Turns(
        baseline=[report(10.0)] * 3,
        one=[TrialResult(FAILED, "it is odd")],
        other=[report(9.0), TrialResult(FAILED, "no end after 3 s")],
    )
    comparison = TrialRounds(tmp_path, limit_s=60.0)
    comparison.add_rejected(turns.trial("never"), "needs CUDA")
    for _ in range(3):
        comparison.run_round([turns.trial(name) for name in NAMES])
    rows = comparison.table_rows()
    assert [(row.technique, row.status, row.reason) for row in rows] == [
        ("baseline", MEASURED, ""),
        ("other", MEASURED, "1 of 2 rounds failed: no end after 3 s"),
        ("one", FAILED, "it is odd"),
        ("never", NOT_RUN, "needs CUDA"),
    ]


def test_results_are_stored_except_a_failure_of_the_baseline(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = Turns(baseline=[TrialResult(FAILED, "a bug")], one=[report(20.0)])
    TrialRounds(tmp_path, 60.0, kept=kept).run_round([first.trial("baseline"), first.trial("one")])
    second = Turns(baseline=[report(10.0), report(12.0)], one=[report(24.0)])
    comparison = TrialRounds(tmp_path, 60.0, kept=kept)
    for _ in range(2):
        comparison.run_round([second.trial("baseline"), second.trial("one")])
    assert second.asked == ["baseline", "one", "baseline"]
    _, one = comparison.table_rows()
    assert (one.samples_per_s, one.samples_per_s_spread, one.speed_ratio) == (24.0, 4.0, 2.0)
