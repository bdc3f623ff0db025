"""Parse a verb's command line and print its JSON, alike for every verb."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from typing_extensions import override

from lightning_eff.core.errors import ConfigError, UsageError


class VerbParser(argparse.ArgumentParser):
    """An argument parser with `--json` and `--debug` that raises UsageError instead of exiting.

    Args:
        verb: Its name on the command line.
        flags: Options without a value.
    """

    def __init__(self, verb: str, *flags: str) -> None:
        super().__init__(prog=f"lightning-eff {verb}", add_help=False, allow_abbrev=False)
        self._verb = verb
        for flag in ("--json", "--debug", *flags):
            self.add_argument(flag, action="store_true")

    @override
    def error(self, message: str) -> NoReturn:
        text = f"{self._verb}: {message}\n  try: lightning-eff {self._verb} --help"
        raise UsageError(text)

    def parse_recipe(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse options, `recipe` and `overrides`, in any order; `--config-dir` may be repeated."""
        from lightning_eff.config.overrides import recipe_and_overrides

        self.add_argument("--config-dir", "-cd", action="append", default=[])
        options, words = self.parse_known_args(arguments)
        options.recipe, options.overrides = recipe_and_overrides(self._verb, words)
        return options

    def parse_word(self, arguments: Sequence[str], *, max_words: int = 1) -> argparse.Namespace:
        """Parse options and at most one `word`, which is empty when it is left out."""
        options, words = self.parse_known_args(arguments)
        unknown = [word for word in words if word.startswith("-")] + words[max_words:]
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}")
        options.word = words[0] if words else ""
        return options


def print_json(value: Any) -> None:
    """Write a value as JSON to the standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def known_device(key: str, name: str) -> str:
    """Return the name of a device if the cost model knows it.

    Args:
        key: What precedes the name on the command line, for example `device=`.
        name: The name.

    Raises:
        ConfigError: An unknown name.
    """
    from lightning_eff.kernels.devices import DEVICES

    names = (*DEVICES, "cpu")
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1) or ["h200"]
        allowed, remedies = f"one of {', '.join(names)}", [f"{key}{close[0]}"]
        raise ConfigError(key.rstrip("= "), name, allowed=allowed, remedies=remedies)
    return name
