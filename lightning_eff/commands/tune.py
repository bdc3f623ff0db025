"""Find the fastest combination of techniques that fits, with the same training and global batch."""

from __future__ import annotations

import argparse
import functools
import shlex
import shutil
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_eff.commands._recipe_file import words_of
from lightning_eff.commands._tune.changes import single_changes
from lightning_eff.commands._tune.measured import Measured, fingerprint
from lightning_eff.commands._tune.search import AS_IT_IS, Search
from lightning_eff.commands.compare import train_recipe
from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import NOT_RUN, TrialResult, without_effect
from lightning_eff.comparison.trial_plan import trial_overrides
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, ConfigError, RunOutOfMemoryError
from lightning_eff.core.rules import run_facts
from lightning_eff.core.text import human_bytes, print_json
from lightning_eff.planner.advice import AdvisedRecipe, Options, savings_until_it_fits
from lightning_eff.planner.device_memory import DeviceMemory
from lightning_eff.run import build_trainer, model_without_memory


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    path = RecipePath.of(options.config_dir)

    def compose(words: Any) -> dict[str, Any]:
        return compose_recipe(options.recipe, [*options.overrides, *words], path).values

    values = compose(())
    if values.get("launch"):
        allowed = "none: a trial is a process of this machine"
        raise ConfigError(key="launch", value="ray", allowed=allowed, remedies=["launch=none"])
    with redirect_stdout(sys.stderr):
        memory = _memory(values, options.memory)
        recipe = AdvisedRecipe.of(compose, memory)
    folder = Path(values["output_root"]).resolve() / "tune"
    folder /= f"{options.recipe}_{fingerprint(values, memory.name)}"
    until = time.monotonic() + 60 * options.minutes
    search = Search(
        recipe,
        Measured(folder),
        functools.partial(_train, options, path, folder / "runs"),
        memory.free_bytes,
        until,
        base=_base(recipe, until),
    )
    try:
        best, steps = search.run(_changes(options, compose(search.base)), options.steps)
    finally:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    return _report(options, search, best, steps)


def _changes(options: argparse.Namespace, values: dict[str, Any]) -> list[Options]:
    """Return the changes to try: none of a key that the user has set."""
    typed = {str(item.key_or_group) for item in parse_overrides(options.overrides)} - {"callbacks"}
    changes = single_changes(values, has_batch_norm=_has_batch_norm(values))
    return [each for each in changes if not typed & {word.partition("=")[0] for word in each}]


def _has_batch_norm(values: dict[str, Any]) -> bool:
    """Return whether the model has batch norms, or cannot be built without its values."""
    try:
        with redirect_stdout(sys.stderr):
            facts = run_facts(build_trainer(values), model_without_memory(values))
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return True
    return "run/batch_norm" in facts


def _memory(values: dict[str, Any], limit_bytes: int | None) -> DeviceMemory:
    """Return the memory of the run's device, or the user's limit in its place."""
    memory = DeviceMemory.of("", build_trainer(values).strategy.root_device)
    if limit_bytes is None:
        return memory
    return replace(memory, name=f"{memory.name} (--memory)", memory_bytes=limit_bytes, taken_bytes=0)


def _base(recipe: AdvisedRecipe, until: float) -> Options:
    """Return what makes the recipe fit; nothing if it does.

    Raises:
        RunOutOfMemoryError: Nothing does.
    """
    free_bytes = recipe.memory.free_bytes
    needed = recipe.forecast(()).num_bytes
    if needed is None or needed <= free_bytes:
        return AS_IT_IS
    sys.stderr.write(" the recipe does not fit: searching what makes it fit\n")
    with redirect_stdout(sys.stderr):
        chosen = savings_until_it_fits(recipe, free_bytes, until)
    if not chosen or (chosen[-1].peak_bytes or 0) > free_bytes:
        text = f"no combination fits in {human_bytes(free_bytes)} of {recipe.memory.name}: as it is, a step "
        text += f"needs {human_bytes(needed)}"
        raise RunOutOfMemoryError(text)
    return tuple(word for saving in chosen for word in saving.words)


def _train(
    options: argparse.Namespace, path: RecipePath, folder: Path, change: Options, steps: int
) -> TrialResult:
    """Measure the recipe with a change, in a process of its own."""
    own = trial_overrides(options.overrides, change, steps=steps, limit_s=options.limit_s)
    train = functools.partial(train_recipe, [options.recipe, *own, *path.options()])
    result = subprocess_trial.run(train, folder=folder, limit_s=options.limit_s)
    added = {word.removeprefix("+callbacks=") for word in change if word.startswith("+callbacks=")}
    idle = [name for name in without_effect(result.report.get("ledger", ())) if name in added]
    return TrialResult(NOT_RUN, f"no effect: {', '.join(idle)}") if idle else result


def _report(options: argparse.Namespace, search: Search, best: Options, steps: int) -> int:
    """Print what was found, and the command that uses it in the last line."""
    measured = search.measured
    rate, base_rate = measured.rate(best, steps), measured.rate(AS_IT_IS, steps)
    change = (*search.base, *best)
    words = [
        "lightning-eff",
        "train",
        *words_of(options.given, options.config_dir),
        *options.overrides,
        *change,
    ]
    if options.json:
        print_json({
            "overrides": list(change),
            "samples_per_s": rate or None,
            "speed_ratio": rate / base_rate if base_rate else None,
            "peak_bytes": measured.peak_bytes(best, steps),
            "free_bytes": search.free_bytes,
            "steps": steps,
            "unfinished": search.unfinished,
            "left_out": {" ".join(each): reason for each, reason in search.refused.items()},
        })  # fmt: skip
        return EXIT_OK if rate else EXIT_FAILED
    if not rate:
        sys.stderr.write("error: nothing could be measured; the lines above say why\n")
        return EXIT_FAILED
    lines = ["", f"measured: {measured.file}"]
    if search.unfinished:
        lines.append("time ran out before everything was tried; the same command goes on")
    peak = measured.peak_bytes(best, steps)
    size = "" if peak is None else f", peak {human_bytes(peak)} of {human_bytes(search.free_bytes)}"
    if best == AS_IT_IS:
        what = "with what makes it fit" if search.base else "as it is"
        lines.append(
            f"nothing is faster by more than noise than the recipe {what}: {rate:.1f} samples/s{size}"
        )
    else:
        lines.append(f"fastest: {rate:.1f} samples/s, {rate / base_rate:.2f} times the recipe{size}")
    sys.stdout.writelines(f"{line}\n" for line in [*lines, shlex.join(words)])
    return EXIT_OK
