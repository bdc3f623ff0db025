"""Find the fastest of the changes, and of their combinations, that the planner expects to fit.

Each change is measured alone for a few steps, then all combinations of those that helped most; of all of
these the faster half is measured again for twice as many steps, and the faster half of that. The recipe as it
is runs in each round, so that ratios are of one time. Memory is checked twice: before a trial by the
planner's prediction, and after it by its measured peak.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_eff.commands._tune.changes import combinations
from lightning_eff.commands._tune.measured import Measured
from lightning_eff.comparison.result_table import FAILED, MEASURED, NOT_RUN, TrialResult
from lightning_eff.core.errors import PRE_RUN_ERRORS, UsageError, root_cause_line
from lightning_eff.core.text import human_bytes
from lightning_eff.planner.advice import AdvisedRecipe, Options
from lightning_eff.planner.prediction import quietly

AS_IT_IS: Options = ()
HELPS = 1.03
"""Ratio of speeds from which a change is worth it, beyond a busy machine's noise."""
NUM_ROUNDS = 3
Train = Callable[[Options, int], TrialResult]
"""Measure a recipe with these overrides, for a number of steps."""


@dataclass
class Search:
    """The search for one recipe.

    Args:
        recipe: Predicts the memory of a step.
        measured: Results, of earlier calls too.
        train: Runs a trial.
        free_bytes: What a step may need.
        until: Time of the monotonic clock after which no trial starts.
        base: Changes without which the recipe does not fit, part of every trial.
    """

    recipe: AdvisedRecipe
    measured: Measured
    train: Train
    free_bytes: int
    until: float
    base: Options = AS_IT_IS
    refused: dict[Options, str] = field(default_factory=dict[Options, str])
    """Why a change is left out."""
    unfinished: bool = False
    """Whether time ran out."""

    def run(self, changes: Sequence[Options], steps: int) -> tuple[Options, int]:
        """Return the fastest that fits, the recipe as it is among them, and the steps of its last trial.

        Raises:
            UsageError: The recipe itself cannot be measured.
        """
        self._measure([AS_IT_IS], steps)
        if AS_IT_IS in self.refused:
            text = f"nothing can be compared, since the recipe itself fails: {self.refused[AS_IT_IS]}"
            raise UsageError(text)
        self._measure(changes, steps)
        alone = self._fastest(changes, steps)
        combined = combinations([each for each in alone if self._ratio(each, steps) > HELPS])
        self._measure(combined, steps)
        left = self._fastest([AS_IT_IS, *changes, *combined], steps)
        for _ in range(1, NUM_ROUNDS):
            left = [each for each in left if each != AS_IT_IS][: (len(left) + 1) // 2]
            if not left or self.unfinished:
                break
            self._measure([AS_IT_IS, *left], 2 * steps)
            if self.unfinished:
                break  # compared at the steps that all of them have
            steps *= 2
            left = self._fastest(left, steps)
        left = self._fastest(left, steps)
        is_better = left and self._ratio(left[0], steps) > HELPS
        return (left[0] if is_better else AS_IT_IS), steps

    def _ratio(self, change: Options, steps: int) -> float:
        """Return the speed over the recipe's; 0 if either was not measured."""
        base = self.measured.rate(AS_IT_IS, steps)
        return self.measured.rate(change, steps) / base if base else 0.0

    def _fastest(self, changes: Sequence[Options], steps: int) -> list[Options]:
        """Return those that were measured and fit, the fastest first."""
        rated = [each for each in changes if self.measured.rate(each, steps) and each not in self.refused]
        return sorted(rated, key=lambda each: -self.measured.rate(each, steps))

    def _measure(self, changes: Sequence[Options], steps: int) -> None:
        """Run what has no result yet, fits, and did not fail with fewer steps."""
        for change in changes:
            name = " ".join(change) or "the recipe as it is"
            if change in self.refused:
                continue
            if self.measured.get(change, steps) is None:
                if reason := self._why_not(change):
                    self._refuse(change, name, reason)
                    continue
                if time.monotonic() >= self.until:
                    self.unfinished = True
                    return
                self.measured.add(change, steps, self.train((*self.base, *change), steps))
            self._judge(change, name, steps)

    def _judge(self, change: Options, name: str, steps: int) -> None:
        result = self.measured.get(change, steps)
        if result is None or result.status != MEASURED:
            return self._refuse(change, name, result.reason if result else FAILED)
        peak = self.measured.peak_bytes(change, steps)
        if peak is None and self._needed_bytes(change) is None:  # as of a compiled model on a CPU
            return self._refuse(change, name, "its memory is neither predicted nor measured")
        if peak is not None and peak > self.free_bytes:
            text = f"measured peak {human_bytes(peak)}, more than {human_bytes(self.free_bytes)}"
            return self._refuse(change, name, text)
        rate = self.measured.rate(change, steps)
        shown = "" if peak is None else f", {human_bytes(peak)}"
        sys.stderr.write(f" {steps} steps, {name}: {rate:.1f} samples/s{shown}\n")
        return None

    def _refuse(self, change: Options, name: str, reason: str) -> None:
        self.refused[change] = reason
        sys.stderr.write(f" {name}: {NOT_RUN}: {reason}\n")

    def _why_not(self, change: Options) -> str:
        """Return why a change is not tried: the rules refuse it, or it is not expected to fit."""
        try:
            needed = self._needed_bytes(change)
        except PRE_RUN_ERRORS as error:
            return root_cause_line(error).splitlines()[0]
        if needed is None or needed <= self.free_bytes:
            return ""  # what cannot be predicted is measured
        return f"predicted peak {human_bytes(needed)}, more than {human_bytes(self.free_bytes)}"

    def _needed_bytes(self, change: Options) -> int | None:
        """Return the predicted peak; None if the step cannot be predicted. It raises what `train` would."""
        with quietly():  # what composing says, it has said of the recipe
            return self.recipe.forecast((*self.base, *change)).num_bytes
