"""Plan the trials to compare; a trial is a list of overrides of the recipe.

`compare` plans these trials: the unmodified recipe, no technique, each technique alone, and all helpful
techniques combined. `tune` plans one change of the recipe at a time. Each technique states how to try it
(`Try` in core/technique.py). All trials have the recipe's model, data, seed and global batch size. The rules
of `train` reject trials that cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import yaml

from lightning_eff.comparison.result_table import BASELINE
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.core import catalog
from lightning_eff.core.technique import MEMORY, TIME, Try, ways_to_try
from lightning_eff.launch.job import num_ranks

AS_IT_IS, COMBINED = "the recipe as it is", "combined"
BARE = ("callbacks=[exact_resume]", "precision=fp32", "strategy=auto")
"""Overrides of the baseline, without its batch size. `exact_resume` stays on, since it costs too little to
measure."""
Change = tuple[str, ...]
"""Overrides that make one or several changes to a recipe."""
TIMER = "lightning_eff.comparison.trial_timer.TrialTimer"
"""Class of the monitor that ends a trial's training, in place of the Trainer's `max_time`."""
PARTS = (2, 4)
"""Numbers of micro-batches into which `tune` tries to split a device's batch."""


def single_technique_trials(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the trials of a composed recipe by name: the baseline, and each technique alone."""
    trials = {BASELINE: bare_trial(values)}
    ways = {
        way.option: way for _, way in reversed(ways_to_try())
    }  # reversed, so that the first way of an option wins
    left_out = catalog.techniques_with("try_as").keys() - ways.keys()
    for entry in catalog.options():
        group, _, option = entry.name.partition("/")
        choice = f"{group}={option}"
        # On one device a strategy changes nothing.
        is_technique = entry.kind == "technique" or (group == "strategy" and num_ranks(values["trainer"]) > 1)
        if entry.name in left_out:
            continue
        way = ways.get(entry.name, Try())
        if group == "callbacks":
            trials[option] = bare_trial(values, f"callbacks=[{option}]", way)
        elif choice not in BARE and (
            group == "precision" or (group in ("optimizer", "strategy") and is_technique)
        ):
            trials[choice] = bare_trial(values, choice, way)
    return trials


def bare_trial(values: Mapping[str, Any], override: str = "", way: Try | None = None) -> list[str]:
    """Return overrides that switch all techniques off, or all but one, at the same global batch size."""
    own = [override] if override else []
    size = global_batch_size(values)
    if size:
        on_device = max(1, size // num_ranks(values["trainer"]))
        own.append(f"data.batch_size={on_device}")
        # Micro-batch size: a quarter, a third or half of the samples, the first that is a whole number.
        part = on_device // next((n for n in (4, 3, 2) if on_device % n == 0), 1)
        # Every trial has the baseline's global batch size, since losses at other sizes are not comparable.
        own += [] if way is None else way.filled(part=part, global_batch=size)
    return merge_overrides(BARE, own)


def changes_of(values: Mapping[str, Any], facts: Collection[str]) -> list[Change]:
    """Return the changes to a recipe that leave its training the same; each change is a tuple of overrides.

    A technique that is off is added, once per `Try` that it states. A technique that is on is tried with its
    other settings. Such a technique is also removed, unless the training depends on the technique.

    Args:
        values: The composed recipe.
        facts: Names of known facts about the run and its peak.
    """
    callbacks: Mapping[str, Any] = values.get("callbacks") or {}
    on = {f"callbacks/{name}" for name, node in callbacks.items() if node}
    size = global_batch_size(values)
    on_device = size // num_ranks(values["trainer"])
    found: dict[Change, None] = {}
    for technique, way in ways_to_try():
        helps = not {TIME, *MEMORY}.isdisjoint(technique.lowers)
        if way.changes or not helps or not way.is_worth({*facts, *on}):
            continue
        is_on = way.option in on
        if is_on and way.option not in way.needs:
            # A technique that is on may cost more than it gains here, so a trial without it is added.
            found[f"~{way.option.replace('/', '.')}",] = None
        for parts in (1, *PARTS) if is_on else PARTS:
            if size and on_device % parts:
                continue
            words = [
                *([] if is_on else [catalog.use_of(way.option)]),
                *way.filled(part=on_device // parts, global_batch=size),
            ]
            new = tuple(word for word in words if not _is_set(values, word))
            found |= {new: None} if new else {}
    return list(found)


def _is_set(values: Mapping[str, Any], override: str) -> bool:
    """Return whether a composed recipe already has the value or option that an override sets."""
    key, _, value = override.partition("=")
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if "." in key:
        return str(found) == ("None" if value == "null" else value)
    file = catalog.CONF / key / f"{value}.yaml"
    option = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {None: None}
    return isinstance(found, Mapping) and all(found.get(name) == item for name, item in option.items())


def global_batch_size(values: Mapping[str, Any]) -> int:
    """Return the number of samples per optimizer step, over all devices; 0 without a `batch_size`."""
    batch_size = values["data"].get("batch_size")
    if not isinstance(batch_size, int):
        return 0
    accumulation: Any = (values.get("callbacks") or {}).get("gradient_accumulation") or {}
    size = accumulation.get("global_batch_size")
    num_batches = accumulation.get("num_batches") or values["trainer"].get("accumulate_grad_batches") or 1
    default = batch_size * num_ranks(values["trainer"]) * num_batches
    return size if isinstance(size, int) else default


def combine_trials(helped: Sequence[list[str]], is_allowed: Callable[[list[str]], bool]) -> list[str] | None:
    """Merge helpful trials into one trial, best first; skip a trial if the rules reject the merged trial.

    Args:
        helped: One trial per technique, the most helpful first.
        is_allowed: Function that returns whether the rules allow a trial.

    Returns:
        The overrides of the merged trial; None if `helped` already contains this trial.
    """
    best = next(iter(helped), [])
    for trial in helped[1:]:
        chosen = _choices(best)
        # Two trials that choose different options of one group exclude each other.
        has_conflict = any(chosen.get(group, option) != option for group, option in _choices(trial).items())
        candidate = merge_overrides(best, [line for line in trial if line not in BARE])
        if not has_conflict and is_allowed(candidate):
            best = candidate
    return best if best and best not in helped else None


def _choices(overrides: Sequence[str]) -> dict[str, str]:
    """Return the option chosen for each group; skip callbacks, and options that the baseline has too."""
    pairs = (line.partition("=") for line in overrides if line not in BARE)
    return {key: option for key, _, option in pairs if "." not in key and key.lstrip("+") != "callbacks"}


def merge_overrides(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Merge two lists of overrides: the last value of each key wins, and lists of callbacks are joined.

    Example:
        >>> merge_overrides(["callbacks=[a]", "seed=1"], ["+callbacks=b", "seed=2"])
        ['callbacks=[a,b]', 'seed=2']
    """
    merged: dict[str, str] = {}
    for line in (*overrides, *later):
        key, _, value = line.partition("=")
        key = key.lstrip("+~")
        if key == "callbacks" and key in merged:
            # `callbacks=[a]` and `callbacks=[b]` become `callbacks=[a,b]`.
            names = f"{merged[key].partition('=')[2].strip('[]')},{value.strip('[]')}".split(",")
            merged[key] = f"callbacks=[{','.join(filter(None, dict.fromkeys(names)))}]"
        else:
            merged[key] = line
    return list(merged.values())


def trial_overrides(
    user: Sequence[str], own: Sequence[str], *, steps: int, limit_s: float, without: Sequence[str] = ()
) -> list[str]:
    """Return all overrides of a trial: the user's overrides, then the trial's own.

    Args:
        user: Overrides from the command line.
        own: Overrides of the trial; they replace user overrides of the same keys.
        steps: Number of optimizer steps.
        limit_s: Seconds after which the trial is killed; the timer stops the training earlier.
        without: Groups whose user overrides are dropped, because the trial sets these groups itself.
    """
    timer = f"+monitors.trial_timer={{_target_: {TIMER}, limit_s: {float(limit_s)}}}"
    shared = [f"trainer.max_steps={steps}", timer]
    # Shared settings come last, because the last value of a key wins.
    later = merge_overrides(own, [*shared, "trainer.limit_val_batches=0", "logger=none"])
    replaced = {line.partition("=")[0].lstrip("+~") for line in later} - {"callbacks"}
    kept = [
        str(item.input_line)
        for item in parse_overrides(user)
        if item.key_or_group not in replaced
        and item.key_or_group.partition(".")[0] not in (*without, "logger")
    ]
    return [*kept, *later]
