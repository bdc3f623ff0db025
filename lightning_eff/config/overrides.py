"""Parse Hydra overrides, and extend what they may set."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import MULTI_CHOICE_GROUPS, OPTIONAL_GROUPS
from lightning_eff.core.errors import UsageError

NO_OVERRIDE = "not an override; expected key=value, group=option, +key=value or ~key"
REASONS: dict[type[Exception], str] = {
    RecursionError: "nested too deep",
    ValueError: "a number with too many digits",
}
"""Python errors that Hydra 1.3's parser lets through."""
MAX_SHOWN = 100
"""Characters of an override in a message."""


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides in Hydra's grammar.

    Raises:
        UsageError: An override does not follow the grammar.
    """
    parser, parsed = OverridesParser.create(), list[Override]()
    for line in overrides:
        try:
            parsed += parser.parse_overrides([line])
        except (OverrideParseException, RecursionError, ValueError) as error:
            shown = line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
            raise UsageError(f"{shown}: {REASONS.get(type(error), NO_OVERRIDE)}{_quoted(line)}") from error
    return parsed


def _quoted(line: str) -> str:
    """Return a remedy for a value that only its characters keep from being one, else nothing."""
    key, is_assignment, value = line.partition("=")
    if not is_assignment or any(sign in value for sign in "[]{}(),"):  # a slip in a list, perhaps
        return ""
    escaped = value.replace('"', '\\"')  # a backslash stands for itself, unless it is the last
    quoted = f'{key}="{escaped}"'
    try:
        OverridesParser.create().parse_overrides([quoted])
    except (OverrideParseException, RecursionError, ValueError):
        return ""
    return f"\n  try: {shlex.quote(quoted)}  # quotes of Hydra within those of the shell"


def allow_new_keys(
    overrides: Sequence[Override], *, listed: Collection[str] = MULTI_CHOICE_GROUPS
) -> list[str]:
    """Return overrides that may set keys missing from a group's YAML, and options where a recipe has none.

    Hydra takes a new key only with `++`. Whether the key is a parameter of the group's class is checked
    after composing. Groups of several options, and optional ones, that the recipe does not list (`listed`)
    get `+`.

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
            line = "++" + line.lstrip("+")
        elif group in may_be_unlisted and group not in listed and not item.is_delete():
            line = "+" + line.lstrip("+")
        lines.append(line)
    return [*lines, *_merge_choices([item for item in overrides if _is_choice(item)], listed)]


def _merge_choices(choices: Sequence[Override], listed: Collection[str]) -> list[str]:
    """Return one override for each group of several options, to which `+` adds.

    Hydra 1.3 replaces the lists of several recipes by a list and not by one option, and drops what `+` adds
    to a list that replaces. Of two that replace the first is left to be reported.
    """
    lines: list[str] = []
    for group in dict.fromkeys(str(item.key_or_group) for item in choices):
        own = [item for item in choices if str(item.key_or_group) == group]
        replacing = [item for item in own if not item.is_add()]
        last = [*replacing[-1:], *(item for item in own if item.is_add())]
        lists = [_options_of(item) for item in replacing[:-1]]
        lists.append([name for item in last for name in _options_of(item)])
        sign = "" if replacing and group in listed else "+"
        lines += [f"{sign}{group}=[{','.join(names)}]" for names in lists]
    return lines


def _is_choice(item: Override) -> bool:
    """Return whether an override chooses options in a group of several."""
    is_in_group = str(item.key_or_group) in MULTI_CHOICE_GROUPS
    if not is_in_group or item.is_delete() or item.is_sweep_override():
        return False
    return all(isinstance(name, str) for name in _options_of(item))


def _options_of(item: Override) -> list[Any]:
    value = item.value()
    return value if isinstance(value, list) else [value]
