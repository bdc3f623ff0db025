"""Run trials in rounds; each round runs all of them, in alternating order against thermal drift."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.judgement import compare_to_baseline
from lightning_eff.comparison.result_table import (
    BASELINE,
    FAILED,
    MEASURED,
    NOT_RUN,
    ComparisonRow,
    TrialResult,
    summarize_rounds,
)

KEPT = ("measured", "losses", "ledger", "precision", "draws_random_numbers")
"""Entries of a trial's report that a row is built from."""


@dataclass(frozen=True)
class Trial:
    """The name of a row, its overrides, and the function that trains it in another process."""

    name: str
    overrides: list[str]
    train: subprocess_trial.TrainTrial


class TrialRounds:
    """The results of all trials so far.

    Args:
        folder: Where they run.
        limit_s: Seconds after which a trial is killed.
        until: Time of the monotonic clock after which no trial starts.
        kept: Folder in which each result is stored as soon as it is known; a trial with a result there is not
            run again. None stores nothing.
    """

    def __init__(
        self, folder: Path, limit_s: float, *, until: float = math.inf, kept: Path | None = None
    ) -> None:
        self.results: dict[str, list[TrialResult]] = {}
        self.until = until
        self._overrides: dict[str, list[str]] = {}
        self._folder = folder
        self._limit_s = limit_s
        self._kept = kept
        self._num_rounds = 0

    def add_rejected(self, trial: Trial, reason: str) -> None:
        """Add a row for a trial that is not run."""
        self._overrides[trial.name] = trial.overrides
        self.results[trial.name] = [TrialResult(NOT_RUN, reason)]
        sys.stderr.write(f" {trial.name}: {NOT_RUN}: {reason}\n")

    def run_rounds(
        self,
        trials: Sequence[Trial],
        num_rounds: int,
        *,
        combine: Callable[[], list[Trial]],
        keep: Callable[[Sequence[Trial]], Sequence[Trial]] = lambda trials: trials,
    ) -> None:
        """Run all rounds; trials that combine the best of the first two rounds join in the third one.

        Args:
            trials: Trials of the first round.
            num_rounds: Number of rounds.
            combine: Returns trials that combine what helped alone.
            keep: Returns the trials of a round that take part in the next one.
        """
        for number in range(1, num_rounds + 1):
            self.run_round(trials)
            trials = keep(trials)
            if number == min(2, num_rounds):
                combined = combine()
                # The combined trials missed these rounds: run them as often as the others.
                for _ in range(number):
                    self.run_round(combined)
                trials = keep([*trials, *combined])

    def run_round(self, trials: Sequence[Trial]) -> None:
        """Run each trial once, except trials that have failed; every second round in reverse order."""
        self._overrides |= {trial.name: trial.overrides for trial in trials}
        self._num_rounds += 1
        for trial in reversed(trials) if self._num_rounds % 2 == 0 else trials:
            before = self.results.setdefault(trial.name, [])
            # A trial that failed once would most likely fail again.
            if any(result.status != MEASURED for result in before):
                continue
            number = len(before) + 1
            result = self._kept_result(trial, number)
            if result is None:
                return
            before.append(result)
            rate = result.report.get("measured", {}).get("samples_per_s")
            outcome = f"{rate:.1f} samples/s" if rate else f"{result.status}: {result.reason}"
            sys.stderr.write(f" round {number}, {trial.name}: {outcome}\n")

    def _kept_result(self, trial: Trial, number: int) -> TrialResult | None:
        """Return a trial's kept result, else run it and keep the result; None if there is no time left."""
        named = f"{hashlib.sha256(trial.name.encode()).hexdigest()[:12]}-{number}"
        file = None if self._kept is None else self._kept / f"{named}.json"
        if file is not None and file.is_file():
            return TrialResult(**json.loads(file.read_text(encoding="utf-8")))
        if time.monotonic() >= self.until:
            return None
        result = subprocess_trial.run(trial.train, folder=self._folder / named, limit_s=self._limit_s)
        # Do not keep a failure of the baseline: no setting would show that its code has been fixed.
        if file is not None and (result.status == MEASURED or trial.name != BASELINE):
            report = {key: result.report[key] for key in KEPT if key in result.report}
            file.parent.mkdir(parents=True, exist_ok=True)
            # The file appears complete or not at all: a sweep may be stopped at any time.
            written = file.with_suffix(".part")
            written.write_text(json.dumps(asdict(replace(result, report=report))), encoding="utf-8")
            written.replace(file)
        return result

    def table_rows(self) -> list[ComparisonRow]:
        """Return the table so far, with ratios to the baseline: measured rows, then failed, then not run."""
        rows = [
            summarize_rounds(name, overrides, self.results.get(name, []))
            for name, overrides in self._overrides.items()
        ]
        compare_to_baseline(rows)
        return sorted(rows, key=lambda row: (MEASURED, FAILED, NOT_RUN).index(row.status))
