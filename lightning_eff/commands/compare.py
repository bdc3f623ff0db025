"""Measure a recipe unchanged, without techniques, with each technique, and with all helpful techniques."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lightning_eff.commands._parser import parse
from lightning_eff.comparison.judgement import helpful, verdict
from lightning_eff.comparison.result_table import BASELINE, MEASURED, comparison_page, comparison_table
from lightning_eff.comparison.rounds import Trial, TrialRounds
from lightning_eff.comparison.subprocess_trial import REPORT_FILE
from lightning_eff.comparison.trial_plan import (
    AS_IT_IS,
    COMBINED,
    bare_trial,
    combine_trials,
    merge_overrides,
    single_technique_trials,
    trial_overrides,
)
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import (
    EXIT_FAILED,
    EXIT_OK,
    PRE_RUN_ERRORS,
    UsageError,
    suggest_name,
)
from lightning_eff.core.text import json_safe, print_json
from lightning_eff.launch.job import check_local

RESULT_FILE, PAGE_FILE = "compare.json", "compare.html"
OWN_GROUPS = ("callbacks", "precision", "strategy")
"""Groups that rows set themselves; user overrides of these groups apply only to the unchanged recipe."""
IN_A_PROCESS = "a trial is a process of this machine"


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    values = compose_recipe(options.recipe, options.overrides, RecipePath.of(options.config_dir)).values
    check_local(values, IN_A_PROCESS)
    planned = _selected(options, values)
    now = datetime.now().astimezone()
    folder = (
        Path(values["output_root"]) / "compare" / f"{options.recipe}_{now:%Y-%m-%d_%H-%M-%S-%f}"
    ).resolve()
    comparison = TrialRounds(folder / "runs", options.limit_s)
    started = time.monotonic()
    try:
        _measure(options, planned, comparison)
    finally:  # after an interruption, too, show what was measured
        shutil.rmtree(folder / "runs", ignore_errors=True)
        rows = comparison.table_rows()
        reports = [result.report for result in comparison.results.get(BASELINE, []) if result.report]
        content = json_safe({
            "recipe": options.recipe,
            "command": shlex.join(["lightning-eff", "compare", *options.arguments]),
            "date": now.isoformat(timespec="seconds"),
            "steps": options.steps,
            "rounds": options.rounds,
            "environment": reports[0].get("environment", {}) if reports else {},
            "verdict": verdict(rows),
            "rows": [asdict(row) for row in rows],
        })  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
        (folder / PAGE_FILE).write_text(comparison_page(content, rows), encoding="utf-8")
        if options.json:
            print_json(content)
        else:
            rounds = f"{options.rounds} round{'s' if options.rounds > 1 else ''}"
            summary = f" {options.steps} steps per trial, {rounds}, {time.monotonic() - started:.0f} s"
            lines = [comparison_table(rows), f" {content['verdict']}", f"{summary}; {folder / PAGE_FILE}"]
            sys.stdout.writelines(f"{line}\n" for line in lines)
    return EXIT_OK if any(row.status == MEASURED for row in rows) else EXIT_FAILED


def _measure(options: argparse.Namespace, planned: dict[str, list[str]], comparison: TrialRounds) -> None:
    """Run all rounds, and add a trial that combines the techniques that helped on their own."""
    trials = [recipe_trial(options, name, own, without=OWN_GROUPS) for name, own in planned.items()]
    # The unchanged recipe runs right after the baseline, so that an early interruption leaves both rows.
    trials.insert(1, recipe_trial(options, AS_IT_IS, []))

    def combine() -> list[Trial]:
        helped = [planned[name] for name in helpful(comparison.table_rows()) if name in planned]
        own = combine_trials(helped, functools.partial(_is_allowed, options))
        return [] if own is None else [recipe_trial(options, COMBINED, own, without=OWN_GROUPS)]

    comparison.run_rounds(trials, options.rounds, combine=combine)


def _selected(options: argparse.Namespace, values: dict[str, Any]) -> dict[str, list[str]]:
    """Return the baseline, the trials that `--only` names (by default all), and the user's own rows."""
    trials = single_technique_trials(values)
    if options.only is not None:
        # Every row is compared with the baseline, so the baseline always runs.
        kept = {BASELINE}
        for pattern in [word.strip() for word in options.only.split(",") if word.strip()]:
            matching = [name for name in trials if fnmatch(name, pattern)]
            if not matching:
                raise UsageError(
                    f"compare: no row is called {pattern!r}; {suggest_name(pattern, set(trials))}"
                )
            kept.update(matching)
        trials = {name: own for name, own in trials.items() if name in kept}
    for row in options.row:
        lines = [str(item.input_line) for item in parse_overrides(row.split())]
        trials[row] = merge_overrides(bare_trial(values), lines)
    return trials


def _is_allowed(options: argparse.Namespace, own: Sequence[str]) -> bool:
    """Return whether the rules allow a combination; trials of one technique are checked when they run."""
    from lightning_eff.core import rules
    from lightning_eff.run import build_trainer

    overrides = _overrides(options, own, OWN_GROUPS)
    # All rules can be applied to a composed config and a Trainer, without model and data.
    try:
        with redirect_stdout(sys.stderr):
            path = RecipePath.of(options.config_dir)
            trainer = build_trainer(compose_recipe(options.recipe, overrides, path).values)
        rules.raise_rejected(rules.verdict_on(trainer))
    except PRE_RUN_ERRORS:
        return False
    return True


def recipe_trial(
    options: argparse.Namespace, name: str, own: Sequence[str], *, without: Sequence[str] = ()
) -> Trial:
    """Return a trial of the recipe: `own`, and the user's overrides except for groups in `without`."""
    path = RecipePath.of(options.config_dir)
    words = [options.recipe, *_overrides(options, own, without), *path.options()]
    return Trial(name, list(own), functools.partial(train_recipe, words))


def _overrides(options: argparse.Namespace, own: Sequence[str], without: Sequence[str]) -> list[str]:
    return trial_overrides(
        options.overrides, own, steps=options.steps, limit_s=options.limit_s, without=without
    )


def train_recipe(words: Sequence[str], folder: Path) -> int:
    """Run `lightning-eff train` in this process, and write its JSON to `REPORT_FILE` in `folder`."""
    from lightning_eff.commands.train import main

    # The run lies in the trial's folder, which is deleted after the comparison.
    with (folder / REPORT_FILE).open("w", encoding="utf-8") as report, redirect_stdout(report):
        return main(parse(["train", *words, f'hydra.run.dir="{folder / "run"}"', "--json"]))
