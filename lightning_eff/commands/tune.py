"""Find the fastest combination of techniques that fits, with the same training and global batch.

Each change is measured alone for a few steps, then all combinations of those that helped most; of all of
these the faster half is measured again for twice as many steps, and the faster half of that. The unchanged
recipe runs in each round, so that ratios are of one time. Memory is checked twice: before a trial by the
planner's prediction, and after it by its measured peak.

Every result is written to a file as soon as it is known, so that the same command continues after an
interruption. The file is keyed by everything that a result depends on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lightning_eff.commands._recipe_file import words_of
from lightning_eff.commands.compare import check_local, train_recipe
from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.judgement import compare_to_baseline
from lightning_eff.comparison.result_table import (
    BASELINE,
    FAILED,
    MEASURED,
    NOT_RUN,
    TrialResult,
    summarize_rounds,
)
from lightning_eff.comparison.trial_plan import global_batch_size, trial_overrides
from lightning_eff.config.ckpt_path import portable_settings
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import (
    EXIT_FAILED,
    EXIT_OK,
    PRE_RUN_ERRORS,
    ConfigError,
    RunOutOfMemoryError,
    UsageError,
    root_cause_line,
)
from lightning_eff.core.rules import run_facts
from lightning_eff.core.text import human_bytes, print_json
from lightning_eff.kernels import devices
from lightning_eff.launch.job import num_ranks
from lightning_eff.planner.advice import AdvisedRecipe, Options, advise, mutually_exclusive
from lightning_eff.planner.forecast import DeviceMemory
from lightning_eff.planner.prediction import quietly
from lightning_eff.run import build_trainer, model_without_memory

SPEED = ("torch_compile", "tiled_loss", "tiled_mlp", "channels_last", "data_preload", "triton_gemm")
"""Callbacks that may make a step faster."""
MEMORY: tuple[Options, ...] = (
    ("+callbacks=gradient_checkpointing", "callbacks.gradient_checkpointing.policy=selective"),
    ("+callbacks=gradient_checkpointing",),
    ("+callbacks=tiled_conv",),
)
"""What makes it fit, at the price of speed."""
PARTS = (2, 4)
"""Into how many micro-batches a batch is cut."""
NUM_COMBINED = 4
"""Changes of which all combinations are tried: those that helped most alone."""
UNCHANGED: Options = ()
HELPS = 1.03
"""Ratio of speeds from which a change is worth it, beyond a busy machine's noise."""
NUM_ROUNDS = 3
FILE = "tune.json"
KEPT = ("measured", "losses", "ledger", "precision", "draws_random_numbers")
"""What is kept of a trial's report."""
Train = Callable[[Options, int], TrialResult]
"""Measure a recipe with these overrides, for a number of steps."""


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    path = RecipePath.of(options.config_dir)

    def compose(words: Sequence[str]) -> dict[str, Any]:
        return compose_recipe(options.recipe, [*options.overrides, *words], path).values

    values = compose(())
    check_local(values)
    until = time.monotonic() + 60 * options.minutes
    with redirect_stdout(sys.stderr):
        memory = DeviceMemory.of(devices.of(build_trainer(values).strategy.root_device))
        if options.memory is not None:
            name = f"{memory.name} (--memory)"
            memory = replace(memory, name=name, memory_bytes=options.memory, taken_bytes=0)
        recipe = AdvisedRecipe.of(compose, values, memory)
        base = _base(recipe, until)
    folder = Path(values["output_root"]).resolve() / "tune"
    folder /= f"{options.recipe}_{fingerprint(values, memory, base, options.limit_s)}"
    train = functools.partial(_train, options, path, folder / "runs")
    search = Search(recipe, Results(folder / FILE), train, until, base)
    try:
        best, steps = search.run(_changes(options, compose(base) if base else values), options.steps)
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    return _report(options, search, best, steps)


def _base(recipe: AdvisedRecipe, until: float) -> Options:
    """Return what makes the recipe fit; nothing if it does.

    Raises:
        RunOutOfMemoryError: Nothing does.
    """
    free_bytes = recipe.memory.free_bytes
    needed = recipe.forecast(()).num_bytes
    if needed is None or needed <= free_bytes:
        return UNCHANGED
    sys.stderr.write(" the recipe does not fit: searching what makes it fit\n")
    found = advise(recipe, budget_s=until - time.monotonic(), shows_alone=False)
    if not found.overrides:
        text = f"no combination fits in {human_bytes(free_bytes)} of {recipe.memory.name}: unchanged, a step "
        text += f"needs {human_bytes(needed)}"
        raise RunOutOfMemoryError(text)
    return found.overrides


def _changes(options: argparse.Namespace, values: dict[str, Any]) -> list[Options]:
    """Return the changes to try: none of a key that the user has set."""
    typed = {str(item.key_or_group) for item in parse_overrides(options.overrides)} - {"callbacks"}
    try:
        with redirect_stdout(sys.stderr):
            facts = run_facts(build_trainer(values), model_without_memory(values))
        has_batch_norm = "run/batch_norm" in facts
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        has_batch_norm = True
    changes = single_changes(values, has_batch_norm=has_batch_norm)
    return [each for each in changes if not typed & {word.partition("=")[0] for word in each}]


def single_changes(values: Mapping[str, Any], *, has_batch_norm: bool) -> list[Options]:
    """Return each change of a recipe as overrides: a missing technique is added, a present one removed.

    Args:
        values: The composed recipe.
        has_batch_norm: Whether the model's result depends on how many samples are computed at once.
    """
    present = values.get("callbacks") or {}
    changes: list[Options] = [
        (f"~callbacks.{name}",) if present.get(name) else (f"+callbacks={name}",) for name in SPEED
    ]
    changes += [each for each in MEMORY if each[0].removeprefix("+callbacks=") not in present]
    if (values.get("precision") or {}).get("precision") != "auto":
        changes.append(("precision=auto",))
    return changes if has_batch_norm else changes + _splits(values)


def _splits(values: Mapping[str, Any]) -> list[Options]:
    """Return other sizes of what is computed at once."""
    size = values["data"].get("batch_size")
    callbacks = values.get("callbacks") or {}
    if not isinstance(size, int) or "micro_batch" in callbacks:
        return []
    accumulation = callbacks.get("gradient_accumulation") or {}
    if isinstance(accumulation.get("global_batch_size"), int):
        # The loader's batch is free: the step stays as large as the callback says.
        on_rank = global_batch_size(values) // num_ranks(values["trainer"])
        sizes = {on_rank // parts for parts in (1, *PARTS) if on_rank % parts == 0}
        return [(f"data.batch_size={each}",) for each in sorted(sizes - {size, 0})]
    key = "callbacks.micro_batch.micro_batch_size"
    return [("+callbacks=micro_batch", f"{key}={size // n}") for n in PARTS if size >= n and size % n == 0]


def combinations(helped: Sequence[Options]) -> list[Options]:
    """Return all combinations of at least two changes, the largest first.

    Args:
        helped: Changes that helped alone, the best first.

    Example:
        >>> combinations([("+callbacks=a",), ("data.batch_size=2",), ("data.batch_size=4",)])
        [('+callbacks=a', 'data.batch_size=2'), ('+callbacks=a', 'data.batch_size=4')]
    """
    best = helped[:NUM_COMBINED]
    found: list[Options] = []
    for number in range(len(best), 1, -1):
        for chosen in itertools.combinations(best, number):
            pairs = itertools.combinations(chosen, 2)
            if not any(mutually_exclusive(one[0], other[0]) for one, other in pairs):
                found.append(tuple(word for change in chosen for word in change))
    return found


def fingerprint(values: Mapping[str, Any], memory: DeviceMemory, base: Options, limit_s: float) -> str:
    """Return a name for what a result depends on: settings, device, what makes it fit, time limit, torch."""
    device = (memory.name, memory.memory_bytes)
    about = [portable_settings(values), device, base, limit_s, torch.__version__, torch.get_num_threads()]
    text = json.dumps(about, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Results:
    """Results by change and number of steps, in a file that is written whenever one is added.

    Raises:
        ConfigError: The file is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._kept: dict[str, dict[str, dict[str, Any]]] = {}
        if not file.is_file():
            return
        try:
            self._kept = json.loads(file.read_text(encoding="utf-8"))
            for kept in (kept for by_steps in self._kept.values() for kept in by_steps.values()):
                TrialResult(**kept)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            allowed = "what tune has measured; this file is damaged"
            raise ConfigError(key="", value=str(file), allowed=allowed, remedies=[f"rm {file}"]) from error
        # A failure of the unchanged recipe is forgotten: no setting shows whether its code has been fixed.
        own = self._kept.get("", {})
        self._kept[""] = {steps: kept for steps, kept in own.items() if kept["status"] == MEASURED}

    def get(self, change: Options, steps: int) -> TrialResult | None:
        """Return a trial's result; None if it has not run."""
        found = self._kept.get(" ".join(change), {}).get(str(steps))
        return None if found is None else TrialResult(**found)

    def add(self, change: Options, steps: int, result: TrialResult) -> None:
        """Keep a result, with the figures of its report."""
        kept = asdict(result) | {"report": {key: result.report[key] for key in KEPT if key in result.report}}
        self._kept.setdefault(" ".join(change), {})[str(steps)] = kept
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = self.file.with_suffix(".part")
        written.write_text(json.dumps(self._kept, indent=1), encoding="utf-8")
        written.replace(self.file)

    def rate(self, change: Options, steps: int) -> float:
        """Return a trial's samples per second, 0 if it was not measured."""
        found = self.get(change, steps)
        figures = found.report["measured"] if found and found.status == MEASURED else {}
        return figures.get("samples_per_s") or 0.0

    def peak_bytes(self, change: Options, steps: int) -> int | None:
        """Return a trial's measured peak; None if unknown."""
        found = self.get(change, steps)
        return found.report["measured"].get("peak_bytes") if found and found.report else None


@dataclass
class Search:
    """The search for one recipe.

    Args:
        recipe: Predicts the memory of a step.
        results: Those of earlier calls too.
        train: Runs a trial.
        until: Time of the monotonic clock after which no trial starts.
        base: Changes without which the recipe does not fit, part of every trial.
    """

    recipe: AdvisedRecipe
    results: Results
    train: Train
    until: float
    base: Options = UNCHANGED
    left_out: dict[Options, str] = field(default_factory=dict[Options, str])
    """Changes that are not tried or not proposed, with the reason."""
    unfinished: bool = False
    """Whether time ran out."""

    def run(self, changes: Sequence[Options], steps: int) -> tuple[Options, int]:
        """Return the fastest that fits, perhaps the unchanged recipe, and the steps of its last trial.

        Raises:
            UsageError: The recipe itself cannot be measured.
        """
        self._measure([UNCHANGED], steps)
        if UNCHANGED in self.left_out:
            text = f"nothing can be compared, since the recipe itself fails: {self.left_out[UNCHANGED]}"
            raise UsageError(text)
        self._measure(changes, steps)
        alone = self._fastest(changes, steps)
        combined = combinations([each for each in alone if self._ratio(each, steps) > HELPS])
        self._measure(combined, steps)
        left = self._fastest([*changes, *combined], steps)
        for _ in range(1, NUM_ROUNDS):
            left = left[: (len(left) + 1) // 2]
            if not left or self.unfinished:
                break
            self._measure([UNCHANGED, *left], 2 * steps)
            if self.unfinished:
                break  # compared at the steps that all of them have
            steps *= 2
            left = self._fastest(left, steps)
        left = self._fastest(left, steps)
        is_better = left and self._ratio(left[0], steps) > HELPS
        return (left[0] if is_better else UNCHANGED), steps

    def _ratio(self, change: Options, steps: int) -> float:
        """Return the speed over the recipe's; 0 if either was not measured."""
        base = self.results.rate(UNCHANGED, steps)
        return self.results.rate(change, steps) / base if base else 0.0

    def _fastest(self, changes: Sequence[Options], steps: int) -> list[Options]:
        """Return those that were measured and fit, the fastest first."""
        rated = [each for each in changes if self.results.rate(each, steps) and each not in self.left_out]
        return sorted(rated, key=lambda each: -self.results.rate(each, steps))

    def _measure(self, changes: Sequence[Options], steps: int) -> None:
        """Run what has no result yet, is expected to fit, and did not fail with fewer steps."""
        for change in changes:
            if change in self.left_out:
                continue
            name = " ".join(change) or "the recipe as it is"
            is_new = self.results.get(change, steps) is None
            reason = self._why_not(change) if is_new else ""
            if is_new and not reason:
                if time.monotonic() >= self.until:
                    self.unfinished = True
                    return
                self.results.add(change, steps, self.train((*self.base, *change), steps))
            reason = reason or self._why_rejected(change, steps)
            if reason:
                self.left_out[change] = reason
                sys.stderr.write(f" {name}: {NOT_RUN}: {reason}\n")
                continue
            peak = self.results.peak_bytes(change, steps)
            shown = "" if peak is None else f", {human_bytes(peak)}"
            rate = self.results.rate(change, steps)
            sys.stderr.write(f" {steps} steps, {name}: {rate:.1f} samples/s{shown}\n")

    def _why_not(self, change: Options) -> str:
        """Return why a change is not tried: the rules reject it, or it is not expected to fit."""
        try:
            needed = self._predicted_bytes(change)
        except PRE_RUN_ERRORS as error:
            return root_cause_line(error).splitlines()[0]
        free_bytes = self.recipe.memory.free_bytes
        if needed is None or needed <= free_bytes:
            return ""  # what cannot be predicted is measured
        return f"predicted peak {human_bytes(needed)}, more than {human_bytes(free_bytes)}"

    def _why_rejected(self, change: Options, steps: int) -> str:
        """Return why a change that has been tried is not proposed."""
        result = self.results.get(change, steps)
        if result is None or result.status != MEASURED:
            return result.reason if result else FAILED
        peak, free_bytes = self.results.peak_bytes(change, steps), self.recipe.memory.free_bytes
        if peak is None and self._predicted_bytes(change) is None:  # as of a compiled model on a CPU
            return "its memory is neither predicted nor measured"
        if peak is not None and peak > free_bytes:
            return f"measured peak {human_bytes(peak)}, more than {human_bytes(free_bytes)}"
        trials = {BASELINE: UNCHANGED, "change": change}
        rows = [
            summarize_rounds(name, list(each), [found] if (found := self.results.get(each, steps)) else [])
            for name, each in trials.items()
        ]
        compare_to_baseline(rows)
        added_idle = [name for name in rows[1].idle if name not in rows[0].techniques]
        return rows[1].excluded or (f"no effect: {', '.join(added_idle)}" if added_idle else "")

    def _predicted_bytes(self, change: Options) -> int | None:
        """Return the predicted peak; None if the step cannot be predicted. It raises what `train` would."""
        with quietly():  # warnings of the recipe have been shown
            return self.recipe.forecast((*self.base, *change)).num_bytes


def _train(
    options: argparse.Namespace, path: RecipePath, folder: Path, change: Options, steps: int
) -> TrialResult:
    """Measure the recipe with a change, in its own process."""
    own = trial_overrides(options.overrides, change, steps=steps, limit_s=options.limit_s)
    train = functools.partial(train_recipe, [options.recipe, *own, *path.options()])
    return subprocess_trial.run(train, folder=folder, limit_s=options.limit_s)


def _report(options: argparse.Namespace, search: Search, best: Options, steps: int) -> int:
    """Print the result, and the command that uses it in the last line."""
    results, free_bytes = search.results, search.recipe.memory.free_bytes
    rate, base_rate = results.rate(best, steps), results.rate(UNCHANGED, steps)
    peak = results.peak_bytes(best, steps)
    change = (*search.base, *best)
    if options.json:
        print_json({
            "overrides": list(change),
            "samples_per_s": rate or None,
            "speed_ratio": rate / base_rate if base_rate else None,
            "peak_bytes": peak,
            "free_bytes": free_bytes,
            "steps": steps,
            "unfinished": search.unfinished,
            "left_out": {" ".join(each): reason for each, reason in search.left_out.items()},
        })  # fmt: skip
        return EXIT_OK if rate else EXIT_FAILED
    if not rate:
        sys.stderr.write("error: nothing could be measured; the lines above say why\n")
        return EXIT_FAILED
    lines = ["", f"measured: {results.file}"]
    if search.unfinished:
        lines.append("time ran out before everything was tried; the same command continues")
    size = "" if peak is None else f", peak {human_bytes(peak)} of {human_bytes(free_bytes)}"
    if best == UNCHANGED:
        what = "with what makes it fit" if search.base else "as it is"
        lines.append(f"nothing is faster than the recipe {what}, beyond noise: {rate:.1f} samples/s{size}")
    else:
        lines.append(f"fastest: {rate:.1f} samples/s, {rate / base_rate:.2f} times the recipe{size}")
    words = ["lightning-eff", "train", *words_of(options.given, options.config_dir), *options.overrides]
    lines.append(shlex.join([*words, *change]))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return EXIT_OK
