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
        self.results: dict[str, list[TrialResult]] = {}
        self.trials: dict[str, PlannedTrial] = {}
        self.predicted_bytes: dict[str, int | None] = {}
        self._folder = folder
        self._run = run
        self._log = log

    def add_refused(self, trial: PlannedTrial, reason: str) -> None:
        """Add a row for a trial that cannot run."""
        self.trials[trial.name] = trial
        self.results[trial.name] = [TrialResult(NOT_RUN, reason)]

    def run_round(self, number: int, trials: Iterable[PlannedTrial]) -> None:
        """Run each trial once, except those that failed or were very slow in an earlier round.

        Args:
            number: From 1; even rounds run in reverse order.
            trials: In the order of the table.
        """
        order = list(trials)
        for trial in order:
            self.trials.setdefault(trial.name, trial)
        for trial in reversed(order) if number % 2 == 0 else order:
            before, baseline = self.results.setdefault(trial.name, []), self.results.get(BASELINE)
            usual = (_samples_per_s(baseline[0]) if baseline else None) or 0.0
            is_slow = any((_samples_per_s(result) or usual) < SLOW * usual for result in before)
            if not is_slow and all(result.status == MEASURED for result in before):
                before.append(self._run_once(trial, number))

    def _run_once(self, trial: PlannedTrial, number: int) -> TrialResult:
        name = re.sub(r"\W+", "-", trial.name).strip("-")[:NAME_LENGTH]
        path = self._folder / "rounds" / f"{number}-{name}.json"
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            if content["status"] == MEASURED and content.pop("overrides") == trial.overrides():
                before = TrialResult(**content)
                self._log(f"round {number}, {trial.name}: measured before")
                return before
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no complete result of this trial: measured below
        result = self._run(trial, self._folder / "runs" / f"{number}-{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")  # replaced below: no reader finds half a file
        new.write_text(json.dumps({"overrides": trial.overrides(), **asdict(result)}), encoding="utf-8")
        new.replace(path)
        rate = _samples_per_s(result)
        outcome = f"{rate:.1f} samples/s" if rate else f"{result.status}: {result.reason}"
        self._log(f"round {number}, {trial.name}: {outcome}")
        return result

    def table_rows(self) -> list[ComparisonRow]:
        """Return the table so far: measured rows first, then failed, then not run; ratios to the baseline."""
        rows: list[ComparisonRow] = []
        for name, trial in self.trials.items():
            rows.append(summarize_rounds(name, trial.overrides(), self.results.get(name, [])))
            rows[-1].predicted_peak_bytes = self.predicted_bytes.get(name)
        baseline = next((row for row in rows if row.technique == BASELINE), None)
        if baseline is not None:
            compare_to_baseline(rows, baseline)
        order = {MEASURED: 0, FAILED: 1, NOT_RUN: 2}
        return sorted(rows, key=lambda row: order.get(row.status, 0))


def _samples_per_s(result: TrialResult) -> float | None:
    return result.report.get("measured", {}).get("samples_per_s")
