"""What an optimizer's factory shows before it is called: keywords, classes, and the layout of its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

SCHEDULE_KEYS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Keys that schedulers write into parameter groups and read back."""


def factory_keywords(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a `functools.partial`, including those of partials among them."""
    keywords: dict[str, Any] = dict(getattr(factory, "keywords", {}))
    for inner in [value for value in keywords.values() if isinstance(value, functools.partial)]:
        keywords = factory_keywords(inner) | keywords
    return keywords


def optimizer_classes(factory: Callable[..., Any]) -> list[type]:
    """Return the classes that a factory makes, the outermost first; none of a plain function."""
    kind: Any = getattr(factory, "func", factory)
    found: list[type] = [kind] if isinstance(kind, type) else []
    for value in getattr(factory, "keywords", {}).values():
        if isinstance(value, (functools.partial, type)):
            found += optimizer_classes(value)
    return found


def state_layout(optimizer: Any) -> str:
    """Return the name of the class whose layout the state of an optimizer, or of an optimizer's class, has.

    A wrapper has the layout of the optimizer inside, whose class is its attribute `kind_behind`.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    kind = getattr(optimizer, "kind_behind", None) or kind
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
