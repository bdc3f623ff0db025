"""Run trials in rounds: each round runs all of them, in alternating direction, so that thermal drift cancels.

Each result is written when its trial ends, one file per trial and round; an interrupted comparison continues
with what is missing. A trial that failed is tried again then: its cause may be gone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import (
    FAILED,
    MEASURED,
    NOT_RUN,
    ComparisonRow,
    TrialResult,
    compare_to_baseline,
    summarize_rounds,
)

NAME_LENGTH = 80
"""Characters of a trial's name in its files' names: a row of the user's own may be a long command line."""


@dataclass(frozen=True)
class Trial:
    """A row's name, the overrides that make it this trial, and what trains it in another process."""

    name: str
    overrides: list[str]
    train: subprocess_trial.TrainTrial


class TrialRounds:
    """The results of all trials so far, also in `folder`; a trial is killed after `limit_s` seconds."""

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
            if all(result.status == MEASURED for result in before):
                before.append(self._run_once(trial, number))

    def _run_once(self, trial: Trial, number: int) -> TrialResult:
        name = re.sub(r"\W+", "-", trial.name).strip("-")[:NAME_LENGTH]
        path = self._folder / "rounds" / f"{number}-{name}.json"
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            if content["status"] == MEASURED and content.pop("overrides") == trial.overrides:
                result = TrialResult(**content)
                sys.stderr.write(f" round {number}, {trial.name}: measured before\n")
                return result
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no complete result of this trial: measured below
        folder = self._folder / "runs" / f"{number}-{name}"
        result = subprocess_trial.run(trial.train, folder=folder, limit_s=self._limit_s)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")  # replaced below: no reader finds half a file
        new.write_text(json.dumps({"overrides": trial.overrides, **asdict(result)}), encoding="utf-8")
        new.replace(path)
        rate = result.report.get("measured", {}).get("samples_per_s")
        outcome = f"{rate:.1f} samples/s" if rate else f"{result.status}: {result.reason}"
        sys.stderr.write(f" round {number}, {trial.name}: {outcome}\n")
        return result

    def table_rows(self) -> list[ComparisonRow]:
        """Return the table so far: measured rows first, then failed, then not run; ratios to the baseline."""
        rows = [
            summarize_rounds(name, overrides, self.results.get(name, []))
            for name, overrides in self._overrides.items()
        ]
        compare_to_baseline(rows)
        return sorted(rows, key=lambda row: (MEASURED, FAILED, NOT_RUN).index(row.status))
