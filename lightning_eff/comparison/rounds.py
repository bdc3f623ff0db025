"""Trials in turn: each round runs all of them, forwards and backwards, so that slow changes cancel.

What has ended is written at once, one file a trial and round; a comparison that was interrupted goes on
with what is missing. A trial that failed is tried again then: its reason may be gone.
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
"""Share of the baseline's speed below which a trial does not run again."""
NAME_LENGTH = 80
"""Characters of a trial's name that its files have: a row of one's own may be as long as a command line."""
Runs = Callable[[PlannedTrial, Path], TrialResult]
"""Runs a trial, with a folder for what it leaves."""


class TrialRounds:
    """The results of trials so far, on the disk.

    Args:
        folder: Where they lie.
        run: Runs one trial once.
        tell: Takes a line on how it goes.
    """

    def __init__(self, folder: Path, run: Runs, tell: Callable[[str], object]) -> None:
        self.folder = folder
        self._run = run
        self._tell = tell
        self._results: dict[str, list[TrialResult]] = {}
        self._trials: dict[str, PlannedTrial] = {}
        self._predicted: dict[str, int | None] = {}

    def predict(self, name: str, num_bytes: int | None) -> None:
        """Take what a trial's peak is predicted to be."""
        self._predicted[name] = num_bytes

    def refuse(self, trial: PlannedTrial, reason: str) -> None:
        """Add a row that is known not to run."""
        self._trials[trial.name] = trial
        self._results[trial.name] = [TrialResult(NOT_RUN, reason)]

    def round(self, number: int, trials: Iterable[PlannedTrial]) -> None:
        """Run each trial once; one that did not work, or was very slow, in an earlier round is left out.

        Args:
            number: From 1; even rounds run backwards.
            trials: In the order of the table.
        """
        turn = list(trials)
        for trial in turn:
            self._trials.setdefault(trial.name, trial)
        for trial in reversed(turn) if number % 2 == 0 else turn:
            before = self._results.setdefault(trial.name, [])
            if all(each.status == MEASURED and not self._is_slow(each) for each in before):
                before.append(self._once(trial, number))

    def _is_slow(self, result: TrialResult) -> bool:
        """Say whether one round of a trial has told all there is to know of its speed."""
        base = next(iter(self._results.get(BASELINE, [])), result)
        rate, usual = (each.report.get("measured", {}).get("samples_per_s") for each in (result, base))
        return bool(rate and usual and rate < SLOW * usual)

    def _once(self, trial: PlannedTrial, number: int) -> TrialResult:
        name = re.sub(r"\W+", "-", trial.name).strip("-")[:NAME_LENGTH]
        path = self.folder / "rounds" / f"{number}-{name}.json"
        kept = _kept(path, trial)
        if kept is not None:
            self._tell(f"round {number}, {trial.name}: measured before")
            return kept
        result = self._run(trial, self.folder / "runs" / f"{number}-{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"overrides": trial.overrides(), **asdict(result)}), encoding="utf-8")
        new.replace(path)
        measured = result.report.get("measured", {}).get("samples_per_s")
        words = f"{measured:.1f} samples/s" if measured else f"{result.status}: {result.reason}"
        self._tell(f"round {number}, {trial.name}: {words}")
        return result

    def rows(self) -> list[ComparisonRow]:
        """Return the table so far, in the order in which trials were named; ratios are to the baseline."""
        rows = [
            summarize_rounds(name, trial.overrides(), self._results.get(name, []))
            for name, trial in self._trials.items()
        ]
        for each in rows:
            each.predicted_peak_bytes = self._predicted.get(each.technique)
        order = {MEASURED: 0, FAILED: 1, NOT_RUN: 2}
        baseline = next((each for each in rows if each.technique == BASELINE), None)
        if baseline is not None:
            compare_to_baseline(rows, baseline)
        return sorted(rows, key=lambda each: order.get(each.status, 0))

    def measured(self) -> list[tuple[PlannedTrial, ComparisonRow]]:
        """Return the trials that were measured, with their rows."""
        return [(self._trials[each.technique], each) for each in self.rows() if each.status == MEASURED]

    def report_of(self, name: str) -> dict[str, Any]:
        """Return the first efficiency report of a trial, empty where there is none."""
        return next((dict(r.report) for r in self._results.get(name, []) if r.report), {})


def _kept(path: Path, trial: PlannedTrial) -> TrialResult | None:
    """Return what was measured of a trial before; None where that is not there or cannot be read."""
    try:
        kept: Any = json.loads(path.read_text(encoding="utf-8"))
        if kept["status"] != MEASURED or kept.pop("overrides") != trial.overrides():
            return None
        return TrialResult(**kept)
    except (OSError, ValueError, KeyError, TypeError):
        return None
