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


def numbers(text: str) -> list[int]:
    """Read `N,N,N`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        message = f"expected N[,N...], whole numbers of at least 1, not {text!r}"
        raise argparse.ArgumentTypeError(message)
    return [int(word) for word in words]


def layers(text: str) -> list[tuple[int, ...]]:
    """Read `M,N,K;M,N,K`."""
    layers = [tuple(number.strip() for number in layer.split(",")) for layer in text.split(";")]
    if not all(len(layer) == 3 and all(n.isdecimal() and int(n) for n in layer) for layer in layers):
        message = f"expected M,N,K[;M,N,K...], whole numbers of at least 1, not {text!r}"
        raise argparse.ArgumentTypeError(message)
    return [tuple(map(int, layer)) for layer in layers]
