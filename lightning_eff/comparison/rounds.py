"""Run trials in rounds: each round runs all of them, in alternating direction against thermal drift."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
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
from lightning_eff.core.errors import ConfigError

KEPT = ("measured", "losses", "ledger", "precision", "draws_random_numbers")
"""Parts of a trial's report that a row is made of."""


@dataclass(frozen=True)
class Trial:
    """A row's name, the overrides that make it this trial, and what trains it in another process."""

    name: str
    overrides: list[str]
    train: subprocess_trial.TrainTrial


class TrialRounds:
    """The results of all trials so far.

    Args:
        folder: Where they run.
        limit_s: Seconds after which a trial is killed.
        until: Time of the monotonic clock after which no trial starts.
        file: Where results are kept, each as soon as it is known, so that the same command continues after an
            interruption; None keeps nothing.

    Raises:
        ConfigError: The file is damaged.
    """

    def __init__(
        self, folder: Path, limit_s: float, *, until: float = math.inf, file: Path | None = None
    ) -> None:
        self.results: dict[str, list[TrialResult]] = {}
        self._overrides: dict[str, list[str]] = {}
        self._folder = folder
        self._limit_s = limit_s
        self._file = file
        self.until = until
        self._num_asked: Counter[str] = Counter()
        """Rounds that each trial took part in: results of an earlier process are taken for the first ones."""
        self._num_rounds = 0
        self._lines: list[str] = []
        """Of the file: a name and a result each."""
        try:
            self._lines += file.read_text(encoding="utf-8").splitlines() if file and file.is_file() else ()
            for line in self._lines:
                name, result = json.loads(line)
                self.results.setdefault(name, []).append(TrialResult(**result))
        except (OSError, ValueError, TypeError) as error:
            allowed = "results of earlier trials; this file is damaged"
            raise ConfigError(key="", value=str(file), allowed=allowed, remedies=[f"rm {file}"]) from error
        # A failure of the baseline is forgotten: no setting shows whether its code has been fixed.
        kept = [each for each in self.results.pop(BASELINE, []) if each.status == MEASURED]
        self.results |= {BASELINE: kept} if kept else {}

    def add_refused(self, trial: Trial, reason: str) -> None:
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
        """Run all rounds; the trials of what helped alone in the first two take part in the third one.

        Args:
            trials: Those of the first round.
            num_rounds: Number of rounds.
            combine: Returns those of what helped.
            keep: Returns which of a round's take part in the next one.
        """
        for number in range(1, num_rounds + 1):
            self.run_round(trials)
            trials = keep(trials)
            if number == min(2, num_rounds):
                combined = combine()
                for _ in range(number):
                    self.run_round(combined)
                trials = keep([*trials, *combined])

    def run_round(self, trials: Sequence[Trial]) -> None:
        """Run each trial once, except those that have failed; every other round in reverse order."""
        self._overrides |= {trial.name: trial.overrides for trial in trials}
        self._num_rounds += 1
        for trial in reversed(trials) if self._num_rounds % 2 == 0 else trials:
            before = self.results.setdefault(trial.name, [])
            self._num_asked[trial.name] += 1
            number = self._num_asked[trial.name]
            if len(before) >= number or any(result.status != MEASURED for result in before):
                continue
            if time.monotonic() >= self.until:
                return
            folder = self._folder / f"{number}-{list(self._overrides).index(trial.name)}"
            result = subprocess_trial.run(trial.train, folder=folder, limit_s=self._limit_s)
            before.append(result)
            self._keep(trial.name, result)
            rate = result.report.get("measured", {}).get("samples_per_s")
            outcome = f"{rate:.1f} samples/s" if rate else f"{result.status}: {result.reason}"
            sys.stderr.write(f" round {number}, {trial.name}: {outcome}\n")

    def _keep(self, name: str, result: TrialResult) -> None:
        if self._file is not None:
            report = {key: result.report[key] for key in KEPT if key in result.report}
            self._lines.append(json.dumps([name, asdict(replace(result, report=report))]))
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(".part")
            written.write_text("\n".join(self._lines), encoding="utf-8")
            written.replace(self._file)  # whole, whatever interrupts this

    def table_rows(self) -> list[ComparisonRow]:
        """Return the table so far: measured rows first, then failed, then not run; ratios to the baseline."""
        rows = [
            summarize_rounds(name, overrides, self.results.get(name, []))
            for name, overrides in self._overrides.items()
        ]
        compare_to_baseline(rows)
        return sorted(rows, key=lambda row: (MEASURED, FAILED, NOT_RUN).index(row.status))
