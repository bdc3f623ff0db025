"""Find the fastest combination of techniques that fits in memory, with the same training and global batch.

`tune` measures like `compare`, with the recipe as the baseline. The first round measures each change alone,
and the second round measures the faster half of the changes. Then all combinations of changes that were
faster beyond the noise are added. The third round measures the faster half of all trials. Memory is checked
twice: by the planner's prediction before a trial, and by the measured peak after the trial.

Each result is stored as soon as it is known. The name of the folder is a hash of everything that a result
depends on, so the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_eff.commands._recipe_file import words_of
from lightning_eff.commands.compare import IN_A_PROCESS, recipe_trial
from lightning_eff.comparison.judgement import can_win, faster, verdict
from lightning_eff.comparison.result_table import (
    BASELINE,
    MEASURED,
    NO_EFFECT,
    ComparisonRow,
    comparison_table,
)
from lightning_eff.comparison.rounds import Trial, TrialRounds
from lightning_eff.comparison.trial_plan import Change, changes_of
from lightning_eff.config.ckpt_path import portable_settings
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import (
    EXIT_FAILED,
    EXIT_OK,
    PRE_RUN_ERRORS,
    RunOutOfMemoryError,
    UsageError,
    root_cause_line,
)
from lightning_eff.core.rules import run_facts
from lightning_eff.core.text import human_bytes, print_json
from lightning_eff.kernels import devices
from lightning_eff.launch.job import check_local
from lightning_eff.planner.advice import AdvisedRecipe, advise, mutually_exclusive
from lightning_eff.planner.forecast import DeviceMemory
from lightning_eff.prediction.predict import quietly
from lightning_eff.run import build_trainer, model_without_memory

NUM_COMBINED = 4
"""Number of changes of which all combinations are tried; the most helpful changes are chosen."""
NUM_ROUNDS = 3
UNCHANGED: Change = ()


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    path = RecipePath.of(options.config_dir)

    def compose(words: Sequence[str]) -> dict[str, Any]:
        return compose_recipe(options.recipe, [*options.overrides, *words], path).values

    values = compose(())
    check_local(values, IN_A_PROCESS)
    until = time.monotonic() + 60 * options.minutes
    with redirect_stdout(sys.stderr):
        memory = DeviceMemory.of(devices.of(build_trainer(values).strategy.root_device))
        # `--memory` is the limit of a step, so memory that this process has allocated does not count.
        if options.memory is not None:
            name = f"{memory.name} (--memory)"
            memory = replace(memory, name=name, memory_bytes=options.memory, taken_bytes=0)
        recipe = AdvisedRecipe.of(compose, values, memory)
        base = _base(recipe, until)
        changes = _changes(options, recipe, base)
    folder = Path(values["output_root"]).resolve() / "tune"
    folder /= f"{options.recipe}_{fingerprint(values, memory, base, options.limit_s, options.steps)}"
    rounds = TrialRounds(folder / "runs", options.limit_s, until=until, kept=folder / "results")

    def trial(change: Change) -> Trial:
        return recipe_trial(options, name_of(change), (*base, *change))

    search = Search(recipe, rounds, trial, base)
    try:
        best = search.run(changes)
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    return _report(options, search, best)


def name_of(change: Change) -> str:
    """Return the name of a change's row."""
    return " ".join(change) or BASELINE


def _base(recipe: AdvisedRecipe, until: float) -> Change:
    """Return the changes that make the recipe fit; no changes if the unchanged recipe fits.

    Raises:
        RunOutOfMemoryError: No combination of changes makes the recipe fit.
    """
    free_bytes = recipe.memory.free_bytes
    needed = recipe.forecast(()).num_bytes
    # Without a prediction, the recipe is assumed to fit.
    if needed is None or needed <= free_bytes:
        return UNCHANGED
    sys.stderr.write(" the recipe does not fit: searching for changes that make it fit\n")
    found = advise(recipe, budget_s=until - time.monotonic(), shows_alone=False)
    if not found.overrides:
        text = f"no combination fits in {human_bytes(free_bytes)} of {recipe.memory.name}: a step of the "
        text += f"unchanged recipe needs {human_bytes(needed)}"
        raise RunOutOfMemoryError(text)
    return found.overrides


def _changes(options: argparse.Namespace, recipe: AdvisedRecipe, base: Change) -> list[Change]:
    """Return the changes to try, except changes of keys that the user has set."""
    values = recipe.compose(base) if base else recipe.values
    try:
        facts = set(run_facts(build_trainer(dict(values)), model_without_memory(values)))
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        facts = {"run/batch_norm"}  # assume batch norm, which depends on the micro-batch size
    peak = recipe.forecast(base).peak
    facts |= {f"peak/{holder.operation}" for holder in peak.holders} if peak is not None else set()
    typed: set[str] = set()
    for item in parse_overrides(options.overrides):
        key, value = str(item.key_or_group), item.value()
        names = value if isinstance(value, list) else [value]
        keys = [f"callbacks.{name}" for name in names] if key == "callbacks" else [key]
        # A callback that the user has listed or set is not removed either.
        typed |= {*keys, *(f"~{'.'.join(key.split('.')[:2])}" for key in keys)}
    return [
        change
        for change in changes_of(values, facts)
        if not typed & {word.partition("=")[0] for word in change}
    ]


def combinations(helped: Sequence[Change]) -> list[Change]:
    """Return all combinations of at least two changes, the largest first.

    Args:
        helped: Changes that helped alone, best first.

    Example:
        >>> combinations([("+callbacks=a",), ("data.batch_size=2",), ("data.batch_size=4",)])
        [('+callbacks=a', 'data.batch_size=2'), ('+callbacks=a', 'data.batch_size=4')]
    """
    best = helped[:NUM_COMBINED]
    found: list[Change] = []
    # The largest combinations come first, since time may run out.
    for number in range(len(best), 1, -1):
        for chosen in itertools.combinations(best, number):
            pairs = itertools.combinations(chosen, 2)
            if not any(mutually_exclusive(one[0], other[0]) for one, other in pairs):
                found.append(tuple(word for change in chosen for word in change))
    return found


def fingerprint(
    values: Mapping[str, Any], memory: DeviceMemory, base: Change, limit_s: float, steps: int
) -> str:
    """Return a hash of everything that the result of a trial depends on."""
    # Speed also depends on the version of torch and on the number of CPU threads.
    device = (memory.name, memory.memory_bytes)
    length = (limit_s, steps)
    about = [portable_settings(values), device, base, length, torch.__version__, torch.get_num_threads()]
    text = json.dumps(about, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass
class Search:
    """The search for the fastest combination of changes to a recipe.

    Args:
        recipe: Recipe that predicts the memory of a step with changes.
        rounds: The rounds of trials, which include results of earlier commands.
        trial: Function that returns the trial of a change.
        base: Changes that make the recipe fit; they are part of every trial.
    """

    recipe: AdvisedRecipe
    rounds: TrialRounds
    trial: Callable[[Change], Trial]
    base: Change = UNCHANGED

    def run(self, changes: Sequence[Change]) -> Change:
        """Return the fastest combination that fits, possibly the unchanged recipe.

        Raises:
            UsageError: The recipe itself cannot be measured.
        """
        first = self._tried([UNCHANGED])
        # Two rounds of the baseline give the noise, even if no time is left for a second round of changes.
        for _ in range(2):
            self.rounds.run_round(first)
        for row in self.rows():
            if row.reason or row.excluded:
                reason = row.reason or row.excluded
                raise UsageError(f"nothing can be compared, since the recipe itself fails: {reason}")
        self.rounds.run_rounds(
            [*first, *self._tried(changes)], NUM_ROUNDS, combine=self._combined, keep=self._faster_half
        )
        return next(map(self._change_of, faster(self.rows())), UNCHANGED)

    def _change_of(self, row: ComparisonRow) -> Change:
        # The overrides of every trial begin with the overrides of `base`.
        return tuple(row.overrides[len(self.base) :])

    def _tried(self, changes: Sequence[Change]) -> list[Trial]:
        """Return the trials of changes; if a trial is rejected or cannot fit, record the reason.

        Changes for which no time is left are skipped.
        """
        trials: list[Trial] = []
        for change in changes:
            trial = self.trial(change)
            # A stored result costs no time, so the time limit applies only to new trials.
            if trial.name not in self.rounds.results:
                if time.monotonic() >= self.rounds.until:
                    break
                try:
                    reason = self._why_too_large(self._predicted_bytes(change) or 0, "predicted")
                except PRE_RUN_ERRORS as error:
                    reason = root_cause_line(error).splitlines()[0]
                if reason:
                    self.rounds.add_rejected(trial, reason)
            trials.append(trial)
        return trials

    def _predicted_bytes(self, change: Change) -> int | None:
        with quietly():  # the recipe's warnings have been shown
            return self.recipe.forecast((*self.base, *change)).num_bytes

    def _why_too_large(self, num_bytes: int, how: str) -> str:
        size, free = human_bytes(num_bytes), self.recipe.memory.free_bytes
        return f"{how} peak {size}, more than {human_bytes(free)}" if num_bytes > free else ""

    def _combined(self) -> list[Trial]:
        """Return the trials of all combinations of the changes that were faster alone."""
        return self._tried(combinations([self._change_of(row) for row in faster(self.rows())]))

    def _faster_half(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the recipe's trial and, of the other trials that may be recommended, the faster half."""
        rates = {row.technique: row.samples_per_s or 0.0 for row in self.rows() if can_win(row)}
        able = sorted((each for each in trials if each.name in rates), key=lambda each: -rates[each.name])
        # The first trial is the recipe, which every round needs as the baseline.
        return [*trials[:1], *able[: (len(able) + 1) // 2]]

    def rows(self) -> list[ComparisonRow]:
        """Return the rows so far; mark a row as excluded if it does not fit or if a change has no effect."""
        rows = self.rounds.table_rows()
        for row in rows:
            change = self._change_of(row)
            if row.status != MEASURED or row.excluded:
                continue
            if row.peak_bytes is not None:
                row.excluded = self._why_too_large(row.peak_bytes, "measured")
            elif self._predicted_bytes(change) is None:  # for example a compiled model on a CPU
                row.excluded = "its memory is neither predicted nor measured"
            if row.idle and not row.excluded and change:
                row.excluded = f"{NO_EFFECT}: {', '.join(row.idle)}"
        return rows


def _report(options: argparse.Namespace, search: Search, best: Change) -> int:
    """Print the table, and as the last line the command that applies the best changes."""
    rows, change = search.rows(), (*search.base, *best)
    row = next((each for each in rows if each.technique == name_of(best)), None)
    is_measured = row is not None and row.samples_per_s is not None
    if options.json:
        print_json({"overrides": list(change), "rows": [asdict(each) for each in rows]})
        return EXIT_OK if is_measured else EXIT_FAILED
    if not is_measured:
        sys.stderr.write("error: nothing could be measured; the lines above say why\n")
        return EXIT_FAILED
    lines = [comparison_table(rows), f" {verdict(rows)}"]
    if time.monotonic() >= search.rounds.until:
        lines.append(" time ran out; the same command continues, longer with --minutes")
    if not best:
        lines.append(" no faster combination was found; the unchanged recipe:")
    words = ["lightning-eff", "train", *words_of(options.given, options.config_dir), *options.overrides]
    lines.append(shlex.join([*words, *change]))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return EXIT_OK
