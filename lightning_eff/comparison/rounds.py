"""Run trials in rounds: each round runs all of them, in alternating direction, so that thermal drift cancels.

Each result is written when its trial ends, one file per trial and round; an interrupted comparison continues
with what is missing. A trial that failed is tried again then: its cause may be gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_eff.comparison.result_table import (
    FAILED,
    MEASURED,
    NOT_RUN,
    ComparisonRow,
    TrialResult,
    compare_to_baseline,
    summarize_rounds,
)
from lightning_eff.comparison.trial_plan import BASELINE, PlannedTrial

SLOW = 0.25
"""Fraction of the baseline's speed below which a trial does not run again."""
NAME_LENGTH = 80
"""Characters of a trial's name in its files' names: a row of the user's own may be a long command line."""
RunTrial = Callable[[PlannedTrial, Path], TrialResult]
"""Runs a trial, with a folder for its files."""


class TrialRounds:
    """The results of all trials so far, also on disk.

    Args:
        folder: Their folder.
        run: Runs one trial once.
        log: Takes a line of progress.
    """

    def __init__(self, folder: Path, run: RunTrial, log: Callable[[str], object]) -> None:
        self.folder = folder
        self._run = run
        self._log = log
        self._results: dict[str, list[TrialResult]] = {}
        self._trials: dict[str, PlannedTrial] = {}
        self._predicted: dict[str, int | None] = {}

    def add_prediction(self, name: str, num_bytes: int | None) -> None:
        """Set the predicted peak of a trial."""
        self._predicted[name] = num_bytes

    def add_refused(self, trial: PlannedTrial, reason: str) -> None:
        """Add a row for a trial that cannot run."""
        self._trials[trial.name] = trial
        self._results[trial.name] = [TrialResult(NOT_RUN, reason)]

    def run_round(self, number: int, trials: Iterable[PlannedTrial]) -> None:
        """Run each trial once, except those that failed or were very slow in an earlier round.

        Args:
            number: From 1; even rounds run in reverse order.
            trials: In the order of the table.
        """
        order = list(trials)
        for trial in order:
            self._trials.setdefault(trial.name, trial)
        for trial in reversed(order) if number % 2 == 0 else order:
            before = self._results.setdefault(trial.name, [])
            if all(result.status == MEASURED and not self._is_slow(result) for result in before):
                before.append(self._run_once(trial, number))

    def _is_slow(self, result: TrialResult) -> bool:
        """Return whether one round is enough to know the trial's speed."""
        baseline = next(iter(self._results.get(BASELINE, [])), result)
        rate, usual = (each.report.get("measured", {}).get("samples_per_s") for each in (result, baseline))
        return bool(rate and usual and rate < SLOW * usual)

    def _run_once(self, trial: PlannedTrial, number: int) -> TrialResult:
        name = re.sub(r"\W+", "-", trial.name).strip("-")[:NAME_LENGTH]
        path = self.folder / "rounds" / f"{number}-{name}.json"
        before = _read_result(path, trial)
        if before is not None:
            self._log(f"round {number}, {trial.name}: measured before")
            return before
        result = self._run(trial, self.folder / "runs" / f"{number}-{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")  # replaced below: no reader finds half a file
        new.write_text(json.dumps({"overrides": trial.overrides(), **asdict(result)}), encoding="utf-8")
        new.replace(path)
        rate = result.report.get("measured", {}).get("samples_per_s")
        outcome = f"{rate:.1f} samples/s" if rate else f"{result.status}: {result.reason}"
        self._log(f"round {number}, {trial.name}: {outcome}")
        return result

    def table_rows(self) -> list[ComparisonRow]:
        """Return the table so far: measured rows first, then failed, then not run; ratios to the baseline."""
        rows = [
            summarize_rounds(name, trial.overrides(), self._results.get(name, []))
            for name, trial in self._trials.items()
        ]
        for row in rows:
            row.predicted_peak_bytes = self._predicted.get(row.technique)
        baseline = next((row for row in rows if row.technique == BASELINE), None)
        if baseline is not None:
            compare_to_baseline(rows, baseline)
        order = {MEASURED: 0, FAILED: 1, NOT_RUN: 2}
        return sorted(rows, key=lambda row: order.get(row.status, 0))

    def measured(self) -> list[tuple[PlannedTrial, ComparisonRow]]:
        """Return the measured trials with their rows."""
        return [(self._trials[row.technique], row) for row in self.table_rows() if row.status == MEASURED]

    def report_of(self, name: str) -> dict[str, Any]:
        """Return the first efficiency report of a trial, empty if it has none."""
        return next((dict(result.report) for result in self._results.get(name, []) if result.report), {})


def _read_result(path: Path, trial: PlannedTrial) -> TrialResult | None:
    """Return the measured result in a file; None without one, or if the trial had other overrides."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["status"] != MEASURED or content.pop("overrides") != trial.overrides():
            return None
        return TrialResult(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
