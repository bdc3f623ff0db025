"""Run every trial once per round; reverse the order in every second round, to cancel thermal drift."""

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
"""Entries of a trial's report from which its row is built."""


@dataclass(frozen=True)
class Trial:
    """A trial: the name of its row, its overrides, and the function that trains in another process."""

    name: str
    overrides: list[str]
    train: subprocess_trial.TrainTrial


class TrialRounds:
    """The results of all trials so far.

    Args:
        folder: Folder in which the trials run.
        limit_s: Seconds after which a trial is killed.
        until: Time of the monotonic clock after which no trial starts.
        kept: Folder in which each result is stored as soon as it is known. A trial is not run again for a
            round whose result this folder contains. If None, no result is stored.
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
        """Add a row for a rejected trial, which is not run."""
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
        """Run all rounds; after the second round, add trials that combine the changes that helped.

        Args:
            trials: Trials of the first round.
            num_rounds: Number of rounds.
            combine: Function that returns trials, each of which combines several helpful changes.
            keep: Function that selects the trials of a round that also run in the next round.
        """
        for number in range(1, num_rounds + 1):
            self.run_round(trials)
            trials = keep(trials)
            # The noise is unknown after one round, so combinations wait for a second round if there is one.
            if number == min(2, num_rounds):
                combined = combine()
                # The combined trials missed the earlier rounds, so those rounds are run here.
                for _ in range(number):
                    self.run_round(combined)
                trials = keep([*trials, *combined])

    def run_round(self, trials: Sequence[Trial]) -> None:
        """Run once each trial that has not failed; reverse the order in every second round."""
        self._overrides |= {trial.name: trial.overrides for trial in trials}
        self._num_rounds += 1
        # A machine that heats up slows the later trials of a round, so the order alternates.
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
        """Return a trial's stored result, or run the trial and store the result; None if no time is left."""
        # A row's name may contain characters that a file's name must not contain.
        named = f"{hashlib.sha256(trial.name.encode()).hexdigest()[:12]}-{number}"
        file = None if self._kept is None else self._kept / f"{named}.json"
        if file is not None and file.is_file():
            return TrialResult(**json.loads(file.read_text(encoding="utf-8")))
        if time.monotonic() >= self.until:
            return None
        result = subprocess_trial.run(trial.train, folder=self._folder / named, limit_s=self._limit_s)
        # A failure of the baseline is not stored, since the user may fix the code and then resume.
        if file is not None and (result.status == MEASURED or trial.name != BASELINE):
            report = {key: result.report[key] for key in KEPT if key in result.report}
            file.parent.mkdir(parents=True, exist_ok=True)
            # The file is renamed when it is complete, so that a stopped sweep leaves no half-written result.
            written = file.with_suffix(".part")
            written.write_text(json.dumps(asdict(replace(result, report=report))), encoding="utf-8")
            written.replace(file)
        return result

    def table_rows(self) -> list[ComparisonRow]:
        """Return the rows so far, compared with the baseline: first measured, then failed, then not run."""
        rows = [
            summarize_rounds(name, overrides, self.results.get(name, []))
            for name, overrides in self._overrides.items()
        ]
        compare_to_baseline(rows)
        return sorted(rows, key=lambda row: (MEASURED, FAILED, NOT_RUN).index(row.status))
