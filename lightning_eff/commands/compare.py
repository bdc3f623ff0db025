"""Measure a recipe's techniques: none, each alone, the recipe as it is, all that helped combined."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lightning_eff.commands._shared import VerbParser
from lightning_eff.comparison import result_table, subprocess_trial
from lightning_eff.comparison.html_page import render_page
from lightning_eff.comparison.rounds import TrialRounds
from lightning_eff.comparison.trial_plan import (
    AS_IT_IS,
    BASELINE,
    PlannedTrial,
    combine_trials,
    single_technique_trials,
    user_trial,
)
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import (
    EXIT_FAILED,
    EXIT_OK,
    PRE_RUN_ERRORS,
    UsageError,
    root_cause_line,
    suggest_name,
)
from lightning_eff.report.summary import json_safe

USAGE = """lightning-eff compare RECIPE [overrides] [options]

  lightning-eff compare lm                               no technique, each one alone, lm itself, all combined
  lightning-eff compare lm data.batch_size=4       lm with another batch, the same in every row
  lightning-eff compare lm --only torch_compile,micro_batch
  lightning-eff compare lm --row 'optimizer=muon +callbacks=micro_batch'
                                                         with a row of your own, on top of the baseline

Each trial trains a few steps in a process of its own, with the same seed, data and global batch; each round
runs all of them. A trial that hangs or fails gets a row with the reason, and the others continue. After an
interruption, the same command continues.

options:
  --steps N               optimizer steps of a trial (8)
  --rounds N              number of times that each trial runs (3); the fastest counts
  --limit-s N             seconds after which a trial is killed (180); after a third it starts no more steps
  --only NAME,...         these rows besides the baseline; * matches anything
  --row 'OVERRIDES'       a row of your own; may be repeated
  --optimizers            all optimizers, not only those that save memory by design
  --fresh                 measure everything anew; otherwise earlier measurements are reused
  --config-dir DIR        a folder of your own with groups and recipes, or a package of options: pkg://NAME
  --json                  print the rows as JSON on the standard output
  --debug                 full tracebacks"""

RESULT_FILE, PAGE_FILE = "compare.json", "compare.html"
FASTER, SMALLER = 1.1, 0.97
"""Ratios from which a technique helps: speed beyond a busy machine's noise, or memory, which is exact."""
SAME_LOSS = 0.02
"""Fraction of the loss by which a technique that helps may change it."""
TRAINING_FRACTION = 1 / 3
"""Of a trial's time limit; compiling and the last batch come on top."""
OWN_GROUPS = ("callbacks", "precision", "strategy")
"""Groups that a row sets itself; the user's settings of them hold for the recipe as it is."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    options = _parse(arguments)
    work = _Work(options)
    values = compose_recipe(options.recipe, options.overrides, work.path).values
    # The folder is named by the settings: the same command finds its results again.
    settings = [options.recipe, options.overrides, options.steps, [str(d) for d in options.config_dir]]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    folder = (Path(values["output_root"]) / "compare" / f"{options.recipe}-{digest}").resolve()
    if options.fresh:
        shutil.rmtree(folder / "rounds", ignore_errors=True)
    comparison = TrialRounds(folder, work.run, lambda line: sys.stderr.write(f" {line}\n"))
    started = time.monotonic()
    try:
        _measure(options, values, work, comparison)
    finally:  # what was measured before an interruption is reported too
        shutil.rmtree(folder / "runs", ignore_errors=True)
        rows = comparison.table_rows()
        reports = [result.report for result in comparison.results.get(BASELINE, []) if result.report]
        content = {
            "recipe": options.recipe,
            "command": shlex.join(["lightning-eff", "compare", *arguments]),
            "steps": options.steps,
            "rounds": options.rounds,
            "environment": reports[0].get("environment", {}) if reports else {},
            "rows": [asdict(row) for row in rows],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).write_text(json.dumps(json_safe(content), indent=1), encoding="utf-8")
        (folder / PAGE_FILE).write_text(render_page(content, rows), encoding="utf-8")
    if options.json:
        sys.stdout.write((folder / RESULT_FILE).read_text(encoding="utf-8") + "\n")
    else:
        rounds = f"{options.rounds} round{'s' if options.rounds > 1 else ''}"
        summary = f" {options.steps} steps per trial, {rounds}, {time.monotonic() - started:.0f} s"
        lines = [result_table.format_rows(rows), *result_table.format_noise(rows)]
        sys.stdout.writelines(f"{line}\n" for line in [*lines, f"{summary}; {folder / PAGE_FILE}"])
    return EXIT_OK if any(row.status == result_table.MEASURED for row in rows) else EXIT_FAILED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = VerbParser("compare", "--optimizers", "--fresh")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--only")
    parser.add_argument("--row", action="append", default=[])
    options = parser.parse_recipe(arguments)
    limits = {"steps": (options.steps, 6), "rounds": (options.rounds, 1), "limit-s": (options.limit_s, 1)}
    for name, (value, least) in limits.items():
        if value < least:
            parser.error(f"--{name} {value:g}: at least {least}")
    return options


def _measure(options: argparse.Namespace, values: dict[str, Any], work: _Work, rounds: TrialRounds) -> None:
    """Run all rounds; the trials that helped alone are combined after the second one."""
    own = [user_trial(line, values) for line in options.row]
    trials = [*single_technique_trials(values, optimizers=options.optimizers), *own]
    runnable: list[PlannedTrial] = []
    for trial in _selected(trials, options.only, {trial.name for trial in own}):
        reason = work.refusal(trial)
        if reason is None:
            runnable.append(trial)
        else:
            rounds.add_refused(trial, reason)
    runnable.insert(1, PlannedTrial(AS_IT_IS, None))
    first_rounds = range(1, min(2, options.rounds) + 1)
    for number in first_rounds:
        rounds.run_round(number, runnable)
    rows, helped = rounds.table_rows(), list[PlannedTrial]()
    rows.sort(key=lambda row: (row.peak_ratio or 1.0) / (row.speed_ratio or 1.0))  # the most helpful first
    for row in rows:
        is_measured = row.status == result_table.MEASURED and not row.reason
        is_same = row.loss is None or abs(row.loss_difference or 0.0) <= SAME_LOSS * abs(row.loss)
        is_better = (row.speed_ratio or 1.0) > FASTER or (row.peak_ratio or 1.0) < SMALLER
        if is_measured and is_same and is_better and row.technique not in (BASELINE, AS_IT_IS):
            helped.append(rounds.trials[row.technique])
    combined = combine_trials(helped, lambda trial: work.refusal(trial) is None)
    if combined is not None:
        runnable.append(combined)
        for number in first_rounds:
            rounds.run_round(number, [combined])
    for number in range(len(first_rounds) + 1, options.rounds + 1):
        rounds.run_round(number, runnable)
    work.predict(runnable, rounds)


def _selected(trials: Sequence[PlannedTrial], only: str | None, own: set[str]) -> list[PlannedTrial]:
    """Return the trials that `--only` names, besides the baseline and the user's own."""
    if only is None:
        return list(trials)
    kept, names = {BASELINE, *own}, [trial.name for trial in trials]
    for pattern in [word.strip() for word in only.split(",") if word.strip()]:
        matching = {name for name in names if fnmatch(name, pattern)}
        if not matching:
            text = f"compare: no row is called {pattern!r}; {suggest_name(pattern, set(names))}"
            raise UsageError(text)
        kept |= matching
    return [trial for trial in trials if trial.name in kept]


class _Work:
    """Checks, runs and predicts trials of one recipe; each trial is composed once in this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = RecipePath.of(options.config_dir)
        self._options = options
        self._values: dict[PlannedTrial, dict[str, Any]] = {}

    def _compose(self, trial: PlannedTrial) -> dict[str, Any]:
        if trial not in self._values:
            composed = compose_recipe(self._options.recipe, self.overrides(trial), self.path)
            self._values[trial] = composed.values
        return self._values[trial]

    def overrides(self, trial: PlannedTrial) -> list[str]:
        """Return the overrides of a trial: the user's, its own, and those that all trials share."""
        seconds = int(self._options.limit_s * TRAINING_FRACTION)
        clock = f"00:{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"  # as Lightning writes it
        shared = [f"trainer.max_steps={self._options.steps}", f'trainer.max_time="{clock}"']
        shared += ["trainer.limit_val_batches=0", "logger=none"]
        own = [] if trial.callbacks is None else trial.overrides()
        replaced = {line.partition("=")[0].lstrip("+~") for line in (*own, *shared)}
        groups = OWN_GROUPS if own else ()
        user = [
            str(item.input_line)
            for item in parse_overrides(self._options.overrides)
            if item.key_or_group not in replaced and item.key_or_group.partition(".")[0] not in groups
        ]
        return [*user, *own, *shared]

    def refusal(self, trial: PlannedTrial) -> str | None:
        """Return why a trial cannot run here, in one line; None if it can."""
        from lightning_eff.core import rules
        from lightning_eff.run import build_trainer

        try:
            with redirect_stdout(sys.stderr):
                trainer = build_trainer(self._compose(trial))
            findings = rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer))
            rules.raise_rejected(findings)
        except PRE_RUN_ERRORS as error:
            return root_cause_line(error).splitlines()[0]
        return None

    def run(self, trial: PlannedTrial, folder: Path) -> result_table.TrialResult:
        """Train a trial in a process of its own, which composes it there once more."""
        words = [self._options.recipe, *self.overrides(trial), f'hydra.run.dir="{folder / "run"}"']
        words += [*self.path.options(), "--json"]
        work = functools.partial(train, words)
        return subprocess_trial.run(work, folder=folder, limit_s=self._options.limit_s)

    def predict(self, trials: Sequence[PlannedTrial], comparison: TrialRounds) -> None:
        """Add each trial's predicted peak, for runs on one device."""
        from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
        from lightning_eff.planner.dry_run import dry_run, example_batch_of, resolve_precision
        from lightning_eff.run import build_trainer

        for trial in trials:
            values = self._compose(trial)
            with redirect_stdout(sys.stderr):
                trainer = build_trainer(values)
            if trainer.world_size == 1:
                room = DeviceMemory.of("", trainer.strategy.root_device)
                prediction = dry_run(resolve_precision(values, room), example_batch_of(values))
                comparison.predicted_bytes[trial.name] = MemoryForecast(prediction, room).num_bytes


def train(words: Sequence[str], folder: Path) -> int:
    """Run `lightning-eff train` in this process, with the standard output in `REPORT_FILE` of `folder`."""
    from lightning_eff.commands.train import main

    path = folder / subprocess_trial.REPORT_FILE
    with path.open("w", encoding="utf-8") as report, redirect_stdout(report):
        return main(words)
