"""Which runs are compared: nothing on, each technique alone, the recipe as it is, all that helped together.

Every technique that there is takes part, found as `ls` finds it; those that cannot be alone are told by the
same check as in `train`. All trials share the recipe's model, data, seed and global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_eff.config.overrides import parse_overrides
from lightning_eff.core import catalog

BASELINE, AS_IT_IS, COMBINED = "baseline", "the recipe as it is", "together"
BARE = {"precision": "fp32", "strategy": "auto"}
"""What the baseline has of groups of which a run has exactly one."""
NOT_ALONE = ("callbacks/optimizer_choice",)
"""For a plain Trainer: a recipe has it anyway."""
BATCH_KEY = "batch_size"
"""The data's batch on one device."""


@dataclass(frozen=True)
class PlannedTrial:
    """One run of a comparison.

    Args:
        name: What its row is called.
        callbacks: Techniques that are on; None leaves the recipe's own.
        choices: Options by their groups, of which a run has exactly one.
        settings: Overrides besides.
    """

    name: str
    callbacks: tuple[str, ...] | None = ()
    choices: tuple[tuple[str, str], ...] = ()
    settings: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        """Return what makes this trial of a recipe.

        Example:
            >>> Trial("x", ("a", "b"), (("precision", "fp32"),), ("seed=2",)).overrides()
            ['callbacks=[a,b]', 'precision=fp32', 'seed=2']
        """
        listed = [] if self.callbacks is None else [f"callbacks=[{','.join(self.callbacks)}]"]
        return [*listed, *(f"{group}={option}" for group, option in self.choices), *self.settings]


@dataclass(frozen=True)
class StepSize:
    """How many samples a step has.

    Args:
        whole: Of an optimizer step, on all devices.
        on_device: Of one batch without accumulation, on one device; None where the data has no such setting.
    """

    whole: int | None
    on_device: int | None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StepSize:
        """Read it from a composed recipe.

        Example:
            >>> accumulated = {"gradient_accumulation": {"global_batch_size": 64}}
            >>> Batch.of({"trainer": {}, "data": {"batch_size": 4}, "callbacks": accumulated})
            Batch(whole=64, on_device=64)
        """
        given = values.get("data", {}).get(BATCH_KEY)
        if not isinstance(given, int):
            return cls(None, None)
        trainer, ranks = values.get("trainer", {}), _num_ranks(values)
        windows: Any = (values.get("callbacks") or {}).get("gradient_accumulation") or {}
        whole = windows.get("global_batch_size")
        if not isinstance(whole, int):
            whole = given * ranks * (trainer.get("accumulate_grad_batches") or 1)
        return cls(whole, max(1, whole // ranks))


def _num_ranks(values: Mapping[str, Any]) -> int:
    """Return the devices that a recipe names, 1 where it leaves them to the machine."""
    trainer: Mapping[str, Any] = values.get("trainer", {})
    devices = trainer.get("devices", 1)
    return (devices if isinstance(devices, int) and devices > 0 else 1) * trainer.get("num_nodes", 1)


def single_technique_trials(values: Mapping[str, Any], *, optimizers: bool) -> list[PlannedTrial]:
    """Return the baseline, and each technique alone on it.

    Args:
        values: The recipe as it is, composed.
        optimizers: Take all optimizers, not only those that are techniques of ours.
    """
    batch = StepSize.of(values)
    trials = [PlannedTrial(BASELINE, (), tuple(BARE.items()), _one_batch(batch))]
    for entry in catalog.options():
        group, _, option = entry.name.partition("/")
        every = group in ("callbacks", "precision") or (group == "optimizer" and optimizers)
        every = every or (group == "strategy" and _num_ranks(values) > 1)
        wanted = every or (group in ("optimizer", "strategy") and entry.kind == "technique")
        if not wanted or entry.name in NOT_ALONE or BARE.get(group) == option:
            continue
        settings = REFINED.get(option, lambda _: ())(batch)
        if group == "callbacks":
            trials.append(
                PlannedTrial(option, (option,), tuple(BARE.items()), _merged(_one_batch(batch), settings))
            )
        else:
            choices = {**BARE, group: option}
            both = _merged(_one_batch(batch), settings)
            trials.append(PlannedTrial(f"{group}={option}", (), tuple(choices.items()), both))
    return trials


def user_trial(line: str, values: Mapping[str, Any]) -> PlannedTrial:
    """Return a row of the user's own: overrides on the baseline, separated by spaces.

    Raises:
        UsageError: They are not Hydra's grammar.
    """
    words = line.split()
    listed, choices, settings = [], dict(BARE), list(_one_batch(StepSize.of(values)))
    for item in parse_overrides(words):
        key, value = str(item.key_or_group), item.value()
        if key == "callbacks":
            listed += [str(each) for each in (value if isinstance(value, list) else [value])]
        elif "." not in key and isinstance(value, str):
            choices[key] = value
        else:
            settings = list(_merged(settings, [str(item.input_line)]))
    return PlannedTrial(line, tuple(listed), tuple(choices.items()), tuple(settings))


def combine_trials(
    helped: Sequence[PlannedTrial], fits: Callable[[PlannedTrial], bool]
) -> PlannedTrial | None:
    """Return what helped alone, in one trial: the best first, and whatever still fits to it.

    Args:
        helped: Trials of one technique each, the one that helps most first.
        fits: Whether a combination is not refused.

    Example:
        >>> one, other = Trial("a", ("a",)), Trial("b", (), (("precision", "b"),))
        >>> combined([one, other], lambda trial: True).overrides()
        ['callbacks=[a]', 'precision=b']
    """
    best: PlannedTrial | None = None
    for trial in helped:
        tried = trial if best is None else _joined(best, trial)
        if tried is not None and (best is None or fits(tried)):
            best = tried
    if best is None or best in helped:
        return None  # that is a row already
    return best


def _joined(one: PlannedTrial, other: PlannedTrial) -> PlannedTrial | None:
    """Put two trials together; None where both want another option of the same group."""
    mine, theirs = dict(one.choices), dict(other.choices)
    for group, option in theirs.items():
        if mine.get(group, option) not in (option, BARE.get(group)) and option != BARE.get(group):
            return None
    chosen = mine | {g: o for g, o in theirs.items() if o != BARE.get(g) or g not in mine}
    callbacks = (*(one.callbacks or ()), *(other.callbacks or ()))
    return PlannedTrial(COMBINED, callbacks, tuple(chosen.items()), _merged(one.settings, other.settings))


def _one_batch(batch: StepSize) -> tuple[str, ...]:
    return () if batch.on_device is None else (f"data.{BATCH_KEY}={batch.on_device}",)


def _merged(settings: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Return settings of which a later one replaces an earlier one of the same key."""
    by_key = {line.partition("=")[0].lstrip("+"): line for line in (*settings, *later)}
    return tuple(by_key.values())


def _quarter(size: int) -> int:
    """Return a fourth of a batch, or the most parts that divide it."""
    return size // next((parts for parts in (4, 3, 2) if size % parts == 0), 1)


def _accumulated(batch: StepSize) -> tuple[str, ...]:
    if batch.whole is None or batch.on_device is None:
        return ()
    step = f"callbacks.gradient_accumulation.global_batch_size={batch.whole}"
    return (step, f"data.{BATCH_KEY}={_quarter(batch.on_device)}")


def _in_parts(batch: StepSize) -> tuple[str, ...]:
    if batch.on_device is None:
        return ()
    return (f"callbacks.micro_batch.micro_batch_size={_quarter(batch.on_device)}",)


REFINED: dict[str, Callable[[StepSize], tuple[str, ...]]] = {
    "gradient_accumulation": _accumulated,
    "micro_batch": _in_parts,
    "in_backward": lambda _: ("trainer.gradient_clip_val=null",),
    "empty_cache": lambda _: ("callbacks.empty_cache.every_n_steps=4",),
}
"""Settings with which a technique does something in a few steps of the recipe's batch."""
