"""Measure a recipe's techniques: none, each alone, the recipe as it is, all that helped together."""

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
from pathlib import Path
from typing import Any, NoReturn

from lightning_eff.comparison import html_page, result_table, subprocess_trial, trial_plan
from lightning_eff.comparison.rounds import TrialRounds
from lightning_eff.comparison.trial_plan import PlannedTrial
from lightning_eff.config import composition
from lightning_eff.config.overrides import parse_overrides, recipe_and_overrides
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, PRE_RUN_ERRORS, UsageError, root_cause_line
from lightning_eff.report.summary import json_safe

USAGE = """lightning-eff compare RECIPE [overrides] [options]

  lightning-eff compare lm                               none, each technique alone, lm itself, all together
  lightning-eff compare lm data.batch_size=4       of lm with another batch, the same in every row
  lightning-eff compare lm --only torch_compile,micro_batch
  lightning-eff compare lm --row 'optimizer=muon +callbacks=micro_batch'
                                                         and a row of your own, on top of the baseline

Each trial trains a few steps in a process of its own, with the same seed, data and global batch; each round
runs all of them. A trial that hangs or fails says why, and the others go on. What is interrupted goes on when
the same command is typed again.

options:
  --steps N               optimizer steps of a trial (8)
  --rounds N              times that each trial runs (3); the fastest counts
  --limit-s N             seconds after which a trial is given up (180); after a third it takes no more steps
  --only NAME,...         these rows beside the baseline; * stands for anything
  --row 'OVERRIDES'       a row of your own; several are possible
  --optimizers            all optimizers, not only those that save memory by how they work
  --fresh                 measure everything anew; else what was measured before stays
  --config-dir DIR        a folder of your own with groups and recipes, or a package of options: pkg://NAME
  --json                  print the rows as JSON on the standard output
  --debug                 whole tracebacks"""

RESULT_FILE, PAGE_FILE = "compare.json", "compare.html"
FASTER, SMALLER = 1.1, 0.97
"""What helps: speed against the baseline beyond what a busy machine does to it, or memory, which is exact."""
SHARE_OF_LIMIT = 1 / 3
"""Of the time that a trial has, what it may train; compiling and the batch that was begun come on top."""
OWN_GROUPS = ("callbacks", "precision", "strategy")
"""Groups that a row sets itself; the user's settings of them hold for the recipe as it is."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    given = _parse(arguments)
    place = RecipePath.of(given.config_dir)
    values = composition.compose_recipe(given.recipe, given.overrides, place).values
    folder = _folder(given, Path(values["output_root"]))
    work = _Work(given, place)
    comparison = TrialRounds(folder, work.run, _tell)
    started = time.monotonic()
    try:
        _measure(given, values, work, comparison)
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        _write(given, ["lightning-eff", "compare", *arguments], folder, comparison)
    found = comparison.rows()
    if given.json:
        sys.stdout.write((folder / RESULT_FILE).read_text(encoding="utf-8") + "\n")
    else:
        rounds = f"{given.rounds} round{'s' if given.rounds > 1 else ''}"
        words = f"{given.steps} steps a trial, {rounds}, {time.monotonic() - started:.0f} s"
        lines = [
            result_table.format_rows(found),
            *result_table.format_noise(found),
            f" {words}; {folder / PAGE_FILE}",
        ]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_OK if any(each.status == result_table.MEASURED for each in found) else EXIT_FAILED


def _measure(given: argparse.Namespace, values: dict[str, Any], work: _Work, comparison: TrialRounds) -> None:
    """Run the rounds; what helped alone is put together after two."""
    alone = trial_plan.single_technique_trials(values, optimizers=given.optimizers)
    alone += [trial_plan.user_trial(line, values) for line in given.row]
    alone = _only(alone, given.only, [each.name for each in alone[len(alone) - len(given.row) :]])
    runnable = [each for each in alone if _reason_against(each, work, comparison) is None]
    runnable.insert(1, PlannedTrial(trial_plan.AS_IT_IS, None))
    before = range(1, min(2, given.rounds) + 1)
    for number in before:
        comparison.round(number, runnable)
    helped = [(trial, row) for trial, row in comparison.measured() if _helps(trial, row)]
    helped.sort(key=lambda pair: -result_table.gain(pair[1]))
    both = trial_plan.combine_trials(
        [trial for trial, _ in helped], lambda trial: work.refusal(trial) is None
    )
    if both is not None:
        runnable.append(both)
        for number in before:
            comparison.round(number, [both])
    for number in range(before[-1] + 1, given.rounds + 1):
        comparison.round(number, runnable)
    work.predict(runnable, comparison)


def _reason_against(trial: PlannedTrial, work: _Work, comparison: TrialRounds) -> str | None:
    reason = work.refusal(trial)
    if reason is not None:
        comparison.refuse(trial, reason)
    return reason


def _helps(trial: PlannedTrial, row: result_table.ComparisonRow) -> bool:
    """Say whether a technique alone is worth being combined: faster or smaller, and the same training."""
    if trial.name in (trial_plan.BASELINE, trial_plan.AS_IT_IS) or row.reason:
        return False
    same = row.loss is None or abs(row.loss_difference or 0.0) <= 0.02 * abs(row.loss)
    return same and ((row.speed_ratio or 1.0) > FASTER or (row.peak_ratio or 1.0) < SMALLER)


class _Work:
    """Runs trials of one recipe.

    Args:
        given: The command line.
        place: Where recipes lie.
    """

    def __init__(self, given: argparse.Namespace, place: RecipePath) -> None:
        self._given = given
        self._place = place

    def overrides(self, trial: PlannedTrial) -> list[str]:
        """Return all that makes a trial of the recipe: the user's words, its own, and what all share."""
        own = [] if trial.callbacks is None else trial.overrides()
        keys = {line.partition("=")[0].lstrip("+") for line in own}
        user = [str(each.input_line) for each in parse_overrides(self._given.overrides)]
        if own:
            user = [line for line in user if not _is_set_by(line, keys)]
        shared = [f"trainer.max_steps={self._given.steps}", f'trainer.max_time="{_clock(self._given)}"']
        shared += ["trainer.limit_val_batches=0", "logger=none"]
        named = {line.partition("=")[0].lstrip("+") for line in shared}
        return [*(line for line in user if line.partition("=")[0].lstrip("+") not in named), *own, *shared]

    def refusal(self, trial: PlannedTrial) -> str | None:
        """Return why a trial cannot run here, in a line; None where nothing speaks against it."""
        from lightning_eff.core import rules
        from lightning_eff.run import build_trainer

        try:
            values = composition.compose_recipe(self._given.recipe, self.overrides(trial), self._place).values
            with redirect_stdout(sys.stderr):
                trainer = build_trainer(values)
            rules.raise_rejected(
                rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer))
            )
        except PRE_RUN_ERRORS as error:
            return root_cause_line(error).removeprefix("error: ").splitlines()[0]
        return None

    def run(self, trial: PlannedTrial, folder: Path) -> result_table.TrialResult:
        """Train a trial in a process of its own."""
        here = [f'hydra.run.dir="{folder / "run"}"']
        words = [self._given.recipe, *self.overrides(trial), *here, *self._place.words(), "--json"]
        return subprocess_trial.run(
            functools.partial(train, words), folder=folder, limit_s=self._given.limit_s
        )

    def predict(self, tried: Sequence[PlannedTrial], comparison: TrialRounds) -> None:
        """Predict each trial's peak: beside what was measured, and where it could not be."""
        from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
        from lightning_eff.planner.dry_run import dry_run, example_batch_of, resolve_precision
        from lightning_eff.run import build_trainer

        for trial in tried:
            values = composition.compose_recipe(self._given.recipe, self.overrides(trial), self._place).values
            with redirect_stdout(sys.stderr):
                trainer = build_trainer(values)
            if trainer.world_size > 1:
                continue  # a share of it is what `plan` tells by arithmetic
            room = DeviceMemory.of("", trainer.strategy.root_device)
            found = dry_run(resolve_precision(values, room), example_batch_of(values))
            comparison.predict(trial.name, MemoryForecast(found, room).num_bytes)


def train(words: Sequence[str], folder: Path) -> int:
    """Train in this process, and keep what is printed.

    Args:
        words: What is typed after `lightning-eff train`.
        folder: Where the print goes.
    """
    from lightning_eff.commands.train import main

    with (
        (folder / subprocess_trial.REPORT_FILE).open("w", encoding="utf-8") as printed,
        redirect_stdout(printed),
    ):
        return main(words)


def _clock(given: argparse.Namespace) -> str:
    """Return the time after which a trial ends with the steps that it has, as Lightning writes it."""
    seconds = int(given.limit_s * SHARE_OF_LIMIT)
    return f"00:{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _is_set_by(line: str, keys: set[str]) -> bool:
    """Say whether a row sets what a user's override sets, or a group of it."""
    key = line.partition("=")[0].lstrip("+~")
    return key in keys or key.partition(".")[0] in OWN_GROUPS


def _only(alone: list[PlannedTrial], only: str | None, own: list[str]) -> list[PlannedTrial]:
    """Return the rows that were asked for, the baseline first.

    Raises:
        UsageError: A name fits no row.
    """
    if only is None:
        return alone
    from fnmatch import fnmatch

    from lightning_eff.core.errors import suggest_name

    patterns = [word.strip() for word in only.split(",") if word.strip()]
    names = [each.name for each in alone]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            text = f"compare: no row is called {pattern!r}; {suggest_name(pattern, set(names))}"
            raise UsageError(text)
    kept = {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}
    return [each for each in alone if each.name in {trial_plan.BASELINE, *kept, *own}]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lightning-eff compare", add_help=False, allow_abbrev=False)
    for flag, default in (("--steps", 8), ("--rounds", 3)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--only")
    for flag in ("--row", "--config-dir"):
        parser.add_argument(flag, action="append", default=[])
    for flag in ("--optimizers", "--fresh", "--json", "--debug"):
        parser.add_argument(flag, action="store_true")
    parser.error = _usage_error  # pyright: ignore[reportAttributeAccessIssue]
    given, rest = parser.parse_known_args(arguments)
    given.recipe, given.overrides = recipe_and_overrides("compare", rest)
    for flag, least in (("steps", 6), ("rounds", 1), ("limit_s", 1)):
        if getattr(given, flag) < least:
            _usage_error(f"--{flag.replace('_', '-')} {getattr(given, flag):g}: at least {least}")
    return given


def _usage_error(message: str) -> NoReturn:
    text = f"compare: {message}\n  try: lightning-eff compare --help"
    raise UsageError(text)


def _folder(given: argparse.Namespace, root: Path) -> Path:
    """Return the folder of this very comparison: the same words find it again."""
    asked = json.dumps([given.recipe, given.overrides, given.steps, [str(d) for d in given.config_dir]])
    folder = root / "compare" / f"{given.recipe}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
    if given.fresh:
        shutil.rmtree(folder / "rounds", ignore_errors=True)
    return folder.resolve()


def _write(given: argparse.Namespace, command: Sequence[str], folder: Path, comparison: TrialRounds) -> None:
    report = comparison.report_of(trial_plan.BASELINE)
    found = {
        "recipe": given.recipe,
        "command": shlex.join(command),
        "steps": given.steps,
        "rounds": given.rounds,
        "environment": report.get("environment", {}),
        "rows": [each.as_dict() for each in comparison.rows()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).write_text(json.dumps(json_safe(found), indent=1), encoding="utf-8")
    (folder / PAGE_FILE).write_text(html_page.render_page(found, comparison.rows()), encoding="utf-8")


def _tell(line: str) -> None:
    sys.stderr.write(f" {line}\n")
    sys.stderr.flush()
