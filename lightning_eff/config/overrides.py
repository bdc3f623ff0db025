"""Parse Hydra overrides, and add the prefixes that Hydra needs to accept new keys and options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import MULTI_CHOICE_GROUPS, OPTIONAL_GROUPS
from lightning_eff.core.errors import UsageError

NO_OVERRIDE = "not an override; expected key=value, group=option, +key=value or ~key"
MAX_SHOWN = 100
"""Messages show at most this many characters of an override."""


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in Hydra's grammar.

    Raises:
        UsageError: An override does not follow the grammar.
    """
    parser, parsed = OverridesParser.create(), list[Override]()
    # Parse one line at a time, so that an error names its override.
    for line in overrides:
        try:
            parsed += parser.parse_overrides([line])
        except (OverrideParseException, RecursionError, ValueError) as error:
            shown = line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
            raise UsageError(f"{shown}: {NO_OVERRIDE}") from error
    return parsed


def allow_new_keys(
    overrides: Sequence[Override], *, listed: Collection[str] = MULTI_CHOICE_GROUPS
) -> list[str]:
    """Return overrides with Hydra's prefixes for new keys (`++`) and for options that a recipe lacks (`+`).

    A later check, after composing, rejects a new key that is not a parameter of the group's class. An
    override of a multi-option or optional group gets `+` if the group is not in `listed`, the groups that the
    recipe lists.

    Example:
        >>> allow_new_keys(parse_overrides(["trainer.max_time=00:01:00:00", "callbacks=[a]"]), listed=[])
        ['++trainer.max_time=00:01:00:00', '+callbacks=[a]']
    """
    lines: list[str] = []
    may_be_unlisted = (*MULTI_CHOICE_GROUPS, *OPTIONAL_GROUPS)
    for item in overrides:
        line = str(item.input_line)
        group, _, key = str(item.key_or_group).partition(".")
        if _is_choice(item):
            continue
        if key and not item.is_delete() and group in TOP_LEVEL:
            # `++` adds the key or replaces its value.
            line = "++" + line.lstrip("+")
        elif group in may_be_unlisted and group not in listed and not item.is_delete():
            line = "+" + line.lstrip("+")
        lines.append(line)
    return [*lines, *_merge_choices([item for item in overrides if _is_choice(item)], listed)]


def _merge_choices(choices: Sequence[Override], listed: Collection[str]) -> list[str]:
    """Merge all overrides of a multi-option group into one, including options that were added with `+`.

    In Hydra 1.3, a list in an override can replace the lists of several recipes, but a single option cannot.
    Hydra also drops options that are added with `+` to a replacing list. If two overrides replace the list of
    a group, both are returned, so that Hydra reports the error.
    """
    lines: list[str] = []
    for group in dict.fromkeys(str(item.key_or_group) for item in choices):
        own = [item for item in choices if str(item.key_or_group) == group]
        replacing = [item for item in own if not item.is_add()]
        # Options that are added with `+` come after the replacing list, in every order of the overrides.
        last = [*replacing[-1:], *(item for item in own if item.is_add())]
        lists = [_options_of(item) for item in replacing[:-1]]
        lists.append([name for item in last for name in _options_of(item)])
        sign = "" if replacing and group in listed else "+"
        lines += [f"{sign}{group}=[{','.join(names)}]" for names in lists]
    return lines


def _is_choice(item: Override) -> bool:
    """Return whether an override chooses options in a multi-option group."""
    is_in_group = str(item.key_or_group) in MULTI_CHOICE_GROUPS
    if not is_in_group or item.is_delete() or item.is_sweep_override():
        return False
    return all(isinstance(name, str) for name in _options_of(item))


def _options_of(item: Override) -> list[Any]:
    value = item.value()
    return value if isinstance(value, list) else [value]
