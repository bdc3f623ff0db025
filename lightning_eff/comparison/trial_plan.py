"""Plan which runs are compared: no technique, each one alone, the recipe as it is, all that helped combined.

Every technique takes part, listed as in `ls`; `train`'s own rules reject those that cannot run alone. All
trials share the recipe's model, data, seed and global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_eff.config.overrides import parse_overrides
from lightning_eff.core import catalog

BASELINE, AS_IT_IS, COMBINED = "baseline", "the recipe as it is", "combined"
BARE = {"precision": "fp32", "strategy": "auto"}
"""The baseline's options of groups of which a run has exactly one."""
NOT_ALONE = ("callbacks/optimizer_choice",)
"""For a plain Trainer: every recipe has it already."""
BATCH_KEY = "batch_size"
"""Key in `data` of the loader's batch on one device."""


@dataclass(frozen=True)
class PlannedTrial:
    """One run of a comparison.

    Args:
        name: Name of its row.
        callbacks: Techniques that are on; None keeps the recipe's.
        choices: Group and option, for groups of which a run has exactly one.
        settings: Further overrides.
    """

    name: str
    callbacks: tuple[str, ...] | None = ()
    choices: tuple[tuple[str, str], ...] = ()
    settings: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        """Return the overrides that turn the recipe into this trial.

        Example:
            >>> PlannedTrial("x", ("a", "b"), (("precision", "fp32"),), ("seed=2",)).overrides()
            ['callbacks=[a,b]', 'precision=fp32', 'seed=2']
        """
        listed = [] if self.callbacks is None else [f"callbacks=[{','.join(self.callbacks)}]"]
        return [*listed, *(f"{group}={option}" for group, option in self.choices), *self.settings]


@dataclass(frozen=True)
class StepSize:
    """The number of samples in an optimizer step.

    Args:
        num_samples: On all devices.
        on_device: Of one batch without accumulation, on one device; None if the data has no such setting.
    """

    num_samples: int | None
    on_device: int | None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StepSize:
        """Read it from a composed recipe.

        Example:
            >>> accumulated = {"gradient_accumulation": {"global_batch_size": 64}}
            >>> StepSize.of({"trainer": {}, "data": {"batch_size": 4}, "callbacks": accumulated})
            StepSize(num_samples=64, on_device=64)
        """
        batch_size = values.get("data", {}).get(BATCH_KEY)
        if not isinstance(batch_size, int):
            return cls(None, None)
        trainer, ranks = values.get("trainer", {}), _num_ranks(values)
        accumulation: Any = (values.get("callbacks") or {}).get("gradient_accumulation") or {}
        num_samples = accumulation.get("global_batch_size")
        if not isinstance(num_samples, int):
            num_samples = batch_size * ranks * (trainer.get("accumulate_grad_batches") or 1)
        return cls(num_samples, max(1, num_samples // ranks))

    def batch_setting(self) -> tuple[str, ...]:
        """Return the override for the whole step as one batch."""
        return () if self.on_device is None else (f"data.{BATCH_KEY}={self.on_device}",)

    def settings_for(self, option: str) -> tuple[str, ...]:
        """Return settings with which a technique has an effect within a few steps of this batch."""
        if option == "in_backward":
            return ("trainer.gradient_clip_val=null",)
        if option == "empty_cache":
            return ("callbacks.empty_cache.every_n_steps=4",)
        if self.on_device is None:
            return ()
        # A quarter of the batch, or a third, or a half, whichever divides it first.
        smaller = self.on_device // next((n for n in (4, 3, 2) if self.on_device % n == 0), 1)
        if option == "gradient_accumulation":
            step = f"callbacks.gradient_accumulation.global_batch_size={self.num_samples}"
            return (step, f"data.{BATCH_KEY}={smaller}")
        if option == "micro_batch":
            return (f"callbacks.micro_batch.micro_batch_size={smaller}",)
        return ()


def _num_ranks(values: Mapping[str, Any]) -> int:
    """Return the devices in a recipe, 1 where it leaves them to the machine."""
    trainer: Mapping[str, Any] = values.get("trainer", {})
    devices = trainer.get("devices", 1)
    return (devices if isinstance(devices, int) and devices > 0 else 1) * trainer.get("num_nodes", 1)


def single_technique_trials(values: Mapping[str, Any], *, optimizers: bool) -> list[PlannedTrial]:
    """Return the baseline, and each technique alone on top of it.

    Args:
        values: The composed recipe.
        optimizers: Include all optimizers, not only those that are techniques of this package.
    """
    step = StepSize.of(values)
    trials = [PlannedTrial(BASELINE, (), tuple(BARE.items()), step.batch_setting())]
    for entry in catalog.options():
        group, _, option = entry.name.partition("/")
        is_included = {
            "callbacks": True,
            "precision": True,
            "optimizer": optimizers or entry.kind == "technique",
            "strategy": _num_ranks(values) > 1 or entry.kind == "technique",
        }.get(group, False)
        if not is_included or entry.name in NOT_ALONE or BARE.get(group) == option:
            continue
        settings = merge_settings(step.batch_setting(), step.settings_for(option))
        if group == "callbacks":
            trials.append(PlannedTrial(option, (option,), tuple(BARE.items()), settings))
        else:
            choices = {**BARE, group: option}
            trials.append(PlannedTrial(f"{group}={option}", (), tuple(choices.items()), settings))
    return trials


def user_trial(line: str, values: Mapping[str, Any]) -> PlannedTrial:
    """Return a trial of the user's own: overrides on top of the baseline, separated by spaces.

    Raises:
        UsageError: They do not follow Hydra's grammar.
    """
    callbacks, choices, settings = list[str](), dict(BARE), StepSize.of(values).batch_setting()
    for item in parse_overrides(line.split()):
        key, value = str(item.key_or_group), item.value()
        if key == "callbacks":
            callbacks += [str(name) for name in (value if isinstance(value, list) else [value])]
        elif "." not in key and isinstance(value, str):
            choices[key] = value
        else:
            settings = merge_settings(settings, [str(item.input_line)])
    return PlannedTrial(line, tuple(callbacks), tuple(choices.items()), settings)


def combine_trials(
    helped: Sequence[PlannedTrial], is_allowed: Callable[[PlannedTrial], bool]
) -> PlannedTrial | None:
    """Return one trial of all that helped alone: the best first, and each further one that is allowed.

    Args:
        helped: Trials of one technique each, the most helpful first.
        is_allowed: Whether the rules accept a combination.

    Returns:
        The combination; None if it would repeat one of `helped`.

    Example:
        >>> trials = [PlannedTrial("a", ("a",)), PlannedTrial("b", (), (("precision", "b"),))]
        >>> combine_trials(trials, lambda trial: True).overrides()
        ['callbacks=[a]', 'precision=b']
    """
    best: PlannedTrial | None = None
    for trial in helped:
        if best is None:
            best = trial
            continue
        choices, has_conflict = dict(best.choices), False
        for group, option in trial.choices:
            current = choices.setdefault(group, option)
            if current == BARE.get(group):
                choices[group] = option
            elif option not in (current, BARE.get(group)):
                has_conflict = True  # the better trial has another option of this group
        callbacks = (*(best.callbacks or ()), *(trial.callbacks or ()))
        settings = merge_settings(best.settings, trial.settings)
        candidate = PlannedTrial(COMBINED, callbacks, tuple(choices.items()), settings)
        if not has_conflict and is_allowed(candidate):
            best = candidate
    return None if best in helped else best


def merge_settings(settings: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Return the settings, with each key's last value."""
    by_key = {line.partition("=")[0].lstrip("+"): line for line in (*settings, *later)}
    return tuple(by_key.values())
