"""What an optimizer's factory says of itself before it is called: its settings, its classes, its layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_eff.core.optimization.composite import OptimizerFactory, PerParameter


def settings(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords that a factory was given, those of a factory among them included.

    Example:
        >>> from torch.optim import SGD
        >>> settings(functools.partial(SGD, lr=0.1, momentum=0.9))["momentum"]
        0.9
    """
    keywords: dict[str, Any] = dict(getattr(factory, "keywords", {}))
    for inner in [value for value in keywords.values() if isinstance(value, functools.partial)]:
        keywords = settings(inner) | keywords
    return keywords


def classes(factory: Callable[..., Any]) -> list[type]:
    """Return the classes that a factory makes, the outermost first."""
    kind = getattr(factory, "func", factory)
    keywords: Mapping[str, Any] = getattr(factory, "keywords", {})
    inner = [value for value in keywords.values() if isinstance(value, (functools.partial, type))]
    found = [kind] if isinstance(kind, type) else []
    return [*found, *(each for value in inner for each in classes(value))]


def layout(kind: type | None) -> str:
    """Return the name of the class whose layout an optimizer's state has; empty if it is not known.

    Example:
        >>> from torch.optim import AdamW
        >>> layout(AdamW)
        'torch.AdamW'
    """
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}" if kind is not None else ""


def kind_behind(factory: OptimizerFactory) -> type | None:
    """Return the class that will do the work, None if the factory does not say."""
    made = classes(factory)
    if made and issubclass(made[0], PerParameter):
        return made[1] if len(made) > 1 else torch.optim.AdamW
    return made[0] if made else None
