"""Run trials in rounds: each round runs all of them, in alternating direction against thermal drift."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.judgement import compare_to_baseline
from lightning_eff.comparison.result_table import (
    FAILED,
    MEASURED,
    NOT_RUN,
    ComparisonRow,
    TrialResult,
    summarize_rounds,
)


@dataclass(frozen=True)
class Trial:
    """A row's name, the overrides that make it this trial, and what trains it in another process."""

    name: str
    overrides: list[str]
    train: subprocess_trial.TrainTrial


class TrialRounds:
    """The results of all trials so far; they run in `folder`, and are killed after `limit_s` seconds."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.results: dict[str, list[TrialResult]] = {}
        self._overrides: dict[str, list[str]] = {}
        self._folder = folder
        self._limit_s = limit_s

    def add_refused(self, name: str, overrides: list[str], reason: str) -> None:
        """Add a row for a trial that cannot run."""
        self._overrides[name] = overrides
        self.results[name] = [TrialResult(NOT_RUN, reason)]

    def run_round(self, number: int, trials: Sequence[Trial]) -> None:
        """Run each trial once, except those that failed in an earlier round; even rounds in reverse order."""
        self._overrides |= {trial.name: trial.overrides for trial in trials}
        for trial in reversed(trials) if number % 2 == 0 else trials:
            before = self.results.setdefault(trial.name, [])
            if any(result.status != MEASURED for result in before):
                continue
            folder = self._folder / f"{number}-{list(self._overrides).index(trial.name)}"
            result = subprocess_trial.run(trial.train, folder=folder, limit_s=self._limit_s)
            before.append(result)
            rate = result.report.get("measured", {}).get("samples_per_s")
            outcome = f"{rate:.1f} samples/s" if rate else f"{result.status}: {result.reason}"
            sys.stderr.write(f" round {number}, {trial.name}: {outcome}\n")

    def table_rows(self) -> list[ComparisonRow]:
        """Return the table so far: measured rows first, then failed, then not run; ratios to the baseline."""
        rows = [
            summarize_rounds(name, overrides, self.results.get(name, []))
            for name, overrides in self._overrides.items()
        ]
        compare_to_baseline(rows)
        return sorted(rows, key=lambda row: (MEASURED, FAILED, NOT_RUN).index(row.status))
