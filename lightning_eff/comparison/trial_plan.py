"""Plan which runs are compared: no technique, each one alone, the recipe as it is, all that helped combined.

A plan is a trial's overrides by its name. Every technique takes part, listed as in `ls`; `train`'s own rules
reject those that cannot run alone. All trials share the recipe's model, data, seed and global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_eff.comparison.judgement import SMALLER, can_win
from lightning_eff.comparison.result_table import BASELINE, ComparisonRow
from lightning_eff.comparison.subprocess_trial import TRAINING_FRACTION
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.core import catalog
from lightning_eff.launch.job import num_ranks

AS_IT_IS, COMBINED = "the recipe as it is", "combined"
BARE = ("callbacks=[exact_resume]", "precision=fp32", "strategy=auto")
"""What the baseline sets besides the batch; every recipe resumes exactly, which costs no measurable time."""
NOT_ALONE = ("callbacks/optimizer_choice", "callbacks/exact_resume", "optimizer/module")
"""Every recipe has the first two already; the module's own optimizers are what it has, and no technique."""
EFFECTIVE = {
    "in_backward": ["trainer.gradient_clip_val=null"],
    "empty_cache": ["callbacks.empty_cache.every_n_steps=4"],
}
"""Settings with which a technique has an effect within a few steps."""
FASTER = 1.1
"""Ratio of speeds from which a technique is combined with others; the combination is judged like any row."""
SAME_LOSS = 0.02
"""Fraction of the loss by which a technique that helps may change it."""


def single_technique_trials(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the baseline, and each technique alone on top of it, for a composed recipe."""
    trials = {BASELINE: bare_trial(values)}
    for entry in catalog.options():
        group, _, option = entry.name.partition("/")
        choice = f"{group}={option}"
        is_technique = entry.kind == "technique" or (group == "strategy" and num_ranks(values["trainer"]) > 1)
        if entry.name in NOT_ALONE:
            continue
        if group == "callbacks":
            trials[option] = bare_trial(values, f"callbacks=[{option}]", option)
        elif choice not in BARE and (
            group == "precision" or (group in ("optimizer", "strategy") and is_technique)
        ):
            trials[choice] = bare_trial(values, choice, option)
    return trials


def bare_trial(values: Mapping[str, Any], override: str = "", technique: str = "") -> list[str]:
    """Return overrides of the recipe without techniques but one, in steps of the recipe's global batch."""
    own = [override] if override else []
    size = global_batch_size(values)
    if size:
        on_device = max(1, size // num_ranks(values["trainer"]))
        # A quarter of the batch, or a third, or a half, whichever divides it first.
        smaller = on_device // next((n for n in (4, 3, 2) if on_device % n == 0), 1)
        if technique == "gradient_accumulation":
            accumulation: Any = (values.get("callbacks") or {}).get(technique) or {}
            has_number = accumulation.get("num_batches") is not None  # the recipe's, in place of the size
            own += [f"callbacks.{technique}.num_batches=null"] * has_number
            own += [f"callbacks.{technique}.global_batch_size={size}", f"data.batch_size={smaller}"]
        else:
            own.append(f"data.batch_size={on_device}")
        if technique == "micro_batch":
            own.append(f"callbacks.micro_batch.micro_batch_size={smaller}")
    return merge_overrides(BARE, [*own, *EFFECTIVE.get(technique, ())])


def global_batch_size(values: Mapping[str, Any]) -> int:
    """Return the samples of an optimizer step on all devices, 0 if the data has no `batch_size`."""
    batch_size = values["data"].get("batch_size")
    if not isinstance(batch_size, int):
        return 0
    accumulation: Any = (values.get("callbacks") or {}).get("gradient_accumulation") or {}
    size = accumulation.get("global_batch_size")
    num_batches = accumulation.get("num_batches") or values["trainer"].get("accumulate_grad_batches") or 1
    default = batch_size * num_ranks(values["trainer"]) * num_batches
    return size if isinstance(size, int) else default


def helpful(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return which techniques are faster or smaller than the baseline at the same loss, the best first."""
    helped: dict[str, float] = {}
    for row in rows:
        speed, peak = row.speed_ratio or 1.0, row.peak_ratio or 1.0
        is_same = row.loss is None or abs(row.loss_difference or 0.0) <= SAME_LOSS * abs(row.loss)
        is_candidate = can_win(row) and not row.idle and row.technique != AS_IT_IS
        if is_candidate and is_same and (speed > FASTER or peak < SMALLER):
            helped[row.technique] = peak / speed
    return sorted(helped, key=helped.__getitem__)


def combine_trials(helped: Sequence[list[str]], is_allowed: Callable[[list[str]], bool]) -> list[str] | None:
    """Return one trial of all that helped alone, the best first, and each further one that the rules allow.

    None if it would repeat one of `helped`, which has a trial for each technique, the most helpful first.
    """
    best = next(iter(helped), [])
    for trial in helped[1:]:
        chosen = _choices(best)
        has_conflict = any(chosen.get(group, option) != option for group, option in _choices(trial).items())
        candidate = merge_overrides(best, [line for line in trial if line not in BARE])
        if not has_conflict and is_allowed(candidate):
            best = candidate
    return best if best and best not in helped else None


def _choices(overrides: Sequence[str]) -> dict[str, str]:
    """Return the option of each group that has one and is not as in the baseline; callbacks add up."""
    pairs = (line.partition("=") for line in overrides if line not in BARE)
    return {key: option for key, _, option in pairs if "." not in key and key.lstrip("+") != "callbacks"}


def merge_overrides(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return the overrides, with each key's last value; callbacks add up.

    Example:
        >>> merge_overrides(["callbacks=[a]", "seed=1"], ["+callbacks=b", "seed=2"])
        ['callbacks=[a,b]', 'seed=2']
    """
    merged: dict[str, str] = {}
    for line in (*overrides, *later):
        key, _, value = line.partition("=")
        key = key.lstrip("+~")
        if key == "callbacks" and key in merged:
            names = f"{merged[key].partition('=')[2].strip('[]')},{value.strip('[]')}".split(",")
            merged[key] = f"callbacks=[{','.join(filter(None, dict.fromkeys(names)))}]"
        else:
            merged[key] = line
    return list(merged.values())


def trial_overrides(
    user: Sequence[str], own: Sequence[str], *, steps: int, limit_s: float, without: Sequence[str] = ()
) -> list[str]:
    """Return a trial's overrides: the user's, except those of the groups `without`, then its own.

    Args:
        user: As on the command line.
        own: What makes it this trial; replaces the user's of the same keys.
        steps: Optimizer steps.
        limit_s: Seconds after which it is killed; it starts no more steps after a third of them.
        without: Groups that it sets itself.
    """
    seconds = int(limit_s * TRAINING_FRACTION)  # of a Trainer, whole ones
    shared = [f"trainer.max_steps={steps}", f"trainer.max_time={{seconds:{seconds}}}"]
    later = merge_overrides(own, [*shared, "trainer.limit_val_batches=0", "logger=none"])
    replaced = {line.partition("=")[0].lstrip("+~") for line in later} - {"callbacks"}
    kept = [
        str(item.input_line)
        for item in parse_overrides(user)
        if item.key_or_group not in replaced
        and item.key_or_group.partition(".")[0] not in (*without, "logger")
    ]
    return [*kept, *later]
