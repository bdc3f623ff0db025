"""Make one command of the overrides that were collected, and compose it before it is shown."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from lightning_eff.commands._migration.collecting import OFF, Finding, Unit
from lightning_eff.config.composition import recipe_app
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.validate import RUN_KEYS
from lightning_eff.core.catalog import MULTI_CHOICE_GROUPS
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, UsageError

RECIPE = "recipe="
"""Begin of an override that chooses the recipe."""
PLACEHOLDERS = {
    "model.name=NAME": "NAME is a model on the hub, or its folder",
    "data.paths=PATH": "PATH is a file, a folder, or hf://datasets/OWNER/NAME",
}
PRECISIONS = (
    "fp32",
    "tf32",
    "auto",
    "fp16_mixed",
    "bf16_mixed",
    "bf16_true",
    "float8",
    "frozen_bf16",
    "quantized_base",
    "frozen_int8",
)
"""Of several that a file asks for, the last counts: a quantized base computes in 16 bits anyway."""
OF_ANY_MODEL = "images"
"""The recipe whose model and data give way to those of a LightningCLI config."""
FAULTS = (UsageError, ConfigError, EnvironmentLacksError)
"""What is raised for a config that cannot be composed."""
OF_ZERO = ("strategy.config.", "strategy.offload_")
"""Overrides that nothing reads without ZeRO."""


@dataclass
class Command:
    """A recipe with overrides that can be composed, and what had to be left out."""

    recipe: str
    overrides: list[str] = field(default_factory=list[str])
    refused: list[Finding] = field(default_factory=list[Finding])
    notes: list[str] = field(default_factory=list[str])

    def words(self) -> list[str]:
        """Return the command's words."""
        return ["lightning-eff", "train", self.recipe, *self.overrides]


def build(recipe: str, units: Sequence[Unit]) -> Command:
    """Return the command of some overrides: without those that the recipe has, and that it does not take."""
    chosen = [
        word.removeprefix(RECIPE) for unit in units for word in unit.overrides if word.startswith(RECIPE)
    ]
    command = Command(chosen[-1] if chosen else recipe)
    with _quietly():
        _fill(command, units)
    return command


def _fill(command: Command, units: Sequence[Unit]) -> None:
    stand_ins = list(PLACEHOLDERS) if command.recipe != OF_ANY_MODEL else []
    own, choices = _composed(command.recipe, stand_ins)
    given = [word for unit in units for word in unit.overrides]
    if "strategy=deepspeed_zero" not in given:
        units = [_without(unit, lambda word: word.startswith(OF_ZERO)) for unit in units]
    units = _merged(command, _with_one_precision(units, choices["precision"]))
    units = [_without(unit, lambda word: _is_chosen(word, own, choices)) for unit in units]
    choosing = [unit for unit in units if any(_chooses(word) for word in unit.overrides)]
    setting = [unit for unit in units if unit not in choosing]
    chosen = _accepted(command, stand_ins, choosing)
    values = _composed(command.recipe, [*stand_ins, *chosen])[0] if chosen else own
    setting = [_without(unit, lambda word: _is_set(word, values)) for unit in setting]
    missing = [word for word in stand_ins if all(_key(word) != _key(each) for each in given)]
    command.notes += [PLACEHOLDERS[word] for word in missing]
    # A placeholder stands before what the file has in its place, so that each half can be composed.
    overrides = [*missing, *chosen, *_accepted(command, [*stand_ins, *chosen], setting)]
    command.overrides = sorted(overrides, key=lambda word: not _key(word).startswith(("model", "data")))


def _accepted(command: Command, words: list[str], units: Sequence[Unit]) -> list[str]:
    """Return the overrides of those units that can be composed beside some words.

    Where all of them cannot, each half is tried: one at fault is found in few compositions.
    """
    units = [unit for unit in units if unit.overrides]
    if not units:
        return []
    together = [word for unit in units for word in unit.overrides]
    try:
        _composed(command.recipe, [*words, *together])
    except FAULTS as error:
        if len(units) == 1:
            command.refused += _refusal(units[0], error)
            return []
        half = len(units) // 2
        first = _accepted(command, words, units[:half])
        return [*first, *_accepted(command, [*words, *first], units[half:])]
    return together


def _refusal(unit: Unit, error: Exception) -> list[Finding]:
    """Return why a unit is left out; nothing where its value is a default, so that nothing is lost."""
    reason, _, remedy = str(error).partition("\n  try: ")
    added = " ".join(unit.overrides)
    if isinstance(error, EnvironmentLacksError):
        return [Finding(unit.key, unit.value, f"{reason}: {remedy}, then {added}")]
    first = reason.partition("\n")[0]
    return [] if unit.is_default else [Finding(unit.key, unit.value, f"{added} is refused: {first}")]


def _composed(recipe: str, words: Sequence[str]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the values of a composed recipe, and its options by group."""
    with recipe_app(recipe, words) as app:
        return app.check().values, OmegaConf.select(app.config(), "hydra.runtime.choices")


def _key(word: str) -> str:
    """Return what two overrides would both set: a key, or one option of a group of several."""
    key, _, value = word.partition("=")
    if key.lstrip("+") in MULTI_CHOICE_GROUPS and key.startswith("+"):
        return f"{key}={value}"
    return key.lstrip("+~") if not word.startswith("~") else f"+{key[1:].replace('.', '=', 1)}"


def _chooses(word: str) -> bool:
    """Return whether an override chooses an option of a group; what that brings can be set only then."""
    return "." not in _key(word) and _key(word) not in RUN_KEYS


def _merged(command: Command, units: Sequence[Unit]) -> list[Unit]:
    """Return units without overrides that a later one replaces, and what belongs to an option replaced."""
    last = {_key(word): (word, unit) for unit in units for word in unit.overrides}
    merged: list[Unit] = []
    for unit in units:
        replaced = [word for word in unit.overrides if _chooses(word) and last[_key(word)][0] != word]
        options = tuple(f"{_key(word)}." for word in replaced)
        for word in replaced if not unit.is_default and unit.value not in OFF else ():
            winner, other = last[_key(word)]
            reason = f"{other.key} sets {winner}"
            command.refused.append(Finding(unit.key, unit.value, reason))
        merged.append(
            _without(
                unit,
                lambda word, unit=unit, options=options: (
                    word.startswith((RECIPE, *options)) or last[_key(word)][1] is not unit
                ),
            )
        )
    return merged


def _with_one_precision(units: Sequence[Unit], own: str) -> list[Unit]:
    """Return units with the precision that counts, which may be that of a recipe with a frozen base."""
    asked = [word.partition("=")[2] for unit in units for word in unit.overrides if _key(word) == "precision"]
    candidates = [own, *asked] if own in PRECISIONS[-3:] else asked
    highest = max(candidates, key=PRECISIONS.index, default="")
    return [
        _without(unit, lambda word: _key(word) == "precision" and word != f"precision={highest}")
        for unit in units
    ]


def _without(unit: Unit, is_left_out: Any) -> Unit:
    return replace(unit, overrides=tuple(word for word in unit.overrides if not is_left_out(word)))


def _is_chosen(word: str, values: Mapping[str, Any], choices: Mapping[str, Any]) -> bool:
    """Return whether the recipe has an option already, or does not have one that is to be removed."""
    key = _key(word)
    group, _, option = key.lstrip("+").partition("=")
    if key.startswith("+"):
        return (option in (values.get(group) or {})) is not word.startswith("~")
    return _chooses(word) and choices.get(key) == word.partition("=")[2]


def _is_set(word: str, values: Mapping[str, Any]) -> bool:
    """Return whether a composed config has the value of an override already."""
    node: Any = values
    for name in _key(word).split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    try:
        (item,) = parse_overrides([word])
    except UsageError:  # no such value can be written; what composes it says so
        return False
    value = item.value()
    return node == (str(value) if isinstance(node, str) else value) and isinstance(node, bool) is isinstance(
        value, bool
    )


@contextmanager
def _quietly() -> Generator[None]:
    logging.disable(logging.WARNING)  # of settings that are left out
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
