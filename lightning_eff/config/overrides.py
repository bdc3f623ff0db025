"""Overrides in Hydra's grammar: parsed, loosened so that a group's class decides what it takes, and swept."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import MULTI_CHOICE_GROUPS
from lightning_eff.core.errors import UsageError

NO_OVERRIDE = "not an override; expected key=value, group=option, +key=value or ~key"
REASONS: dict[type[Exception], str] = {
    RecursionError: "nested too deep",
    ValueError: "a number of too many digits",
}
"""What Hydra's parser raises besides, of Python's own."""
MAX_SHOWN = 100
"""Characters of an override in a message."""


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides of Hydra's grammar.

    Raises:
        UsageError: One of them is not of that grammar.
    """
    parser, parsed = OverridesParser.create(), list[Override]()
    for line in overrides:
        try:
            parsed += parser.parse_overrides([line])
        except (OverrideParseException, RecursionError, ValueError) as error:
            shown = line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
            text = f"{shown}: {REASONS.get(type(error), NO_OVERRIDE)}"
            raise UsageError(text) from error
    return parsed


def recipe_and_overrides(verb: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Split what stands behind a verb and its options.

    Raises:
        UsageError: There is an unknown option, no recipe, or more than one.

    Example:
        >>> recipe_and_overrides("train", ["seed=2", "lm", "~callbacks"])
        ('lm', ['seed=2', '~callbacks'])
    """
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        text = f"{verb}: unknown option {unknown[0]!r}; lightning-eff {verb} --help shows what there is"
        raise UsageError(text)
    recipes = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(recipes) != 1:
        what = f"one recipe, not {len(recipes)}: {' '.join(recipes)}" if recipes else "a recipe"
        text = f"{verb}: expected {what}; lightning-eff ls shows what there is"
        raise UsageError(text)
    return recipes[0], [word for word in words if word != recipes[0]]


def allow_new_keys(
    overrides: Sequence[Override], *, listed: Collection[str] = MULTI_CHOICE_GROUPS
) -> list[str]:
    """Let overrides set keys that a group's YAML does not list, and choose options where a recipe has none.

    Which keys there are is asked of the group's class later.

    Args:
        overrides: Parsed.
        listed: Groups of many options that the recipe lists; the others must be appended to nothing.

    Example:
        >>> loosened(parse_overrides(["trainer.max_time=00:01:00:00", "seed=3", "~callbacks"]))
        ['++trainer.max_time=00:01:00:00', 'seed=3', '~callbacks']
        >>> loosened(parse_overrides(["callbacks=[a]"]), listed=[])
        ['+callbacks=[a]']
    """
    lines: list[str] = []
    for item in overrides:
        line = str(item.input_line)
        group, _, key = str(item.key_or_group).partition(".")
        if key and not item.is_delete() and group in TOP_LEVEL:
            line = "++" + line.lstrip("+")
        elif group in MULTI_CHOICE_GROUPS and group not in listed and not item.is_delete():
            line = "+" + line.lstrip("+")
        lines.append(line)
    return lines


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep over lists of values, in Hydra's order.

    What a sweeper plugin searches (ranges) is left out: those runs are checked when they start.

    Example:
        >>> sweep(["seed=1,2", "precision=fp32"])
        [['seed=1', 'precision=fp32'], ['seed=2', 'precision=fp32']]
    """
    choices: list[list[str]] = []
    for item in parse_overrides(overrides):
        if item.is_sweep_override() and not item.is_discrete_sweep():
            continue
        if item.is_sweep_override():
            choices.append([f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()])
        else:
            choices.append([str(item.input_line)])
    return [list(combination) for combination in itertools.product(*choices)]
