"""Types of the command line's options: each reads a word, or says what is wrong with it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from lightning_eff.core.text import parse_bytes


def at_least(least: float, kind: type[float] = int) -> Callable[[str], float]:
    """Return a type that reads a number of at least `least`."""

    def number(text: str) -> float:
        value = kind(text)  # argparse reports a ValueError
        if not least <= value < math.inf:
            message = f"{text}: expected at least {least}"
            raise argparse.ArgumentTypeError(message)
        return value

    return number


def size(text: str) -> int:
    """Read a size with its unit."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
