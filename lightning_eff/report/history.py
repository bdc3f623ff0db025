"""Values of a run by optimizer step, for the charts of its page; a long run keeps every second, fourth ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_POINTS = 250
"""Maximum points of a series."""


@dataclass
class _Kept:
    points: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    stride: int = 1
    count: int = 0


class History:
    """Series of values by name.

    Example:
        >>> history = History()
        >>> for step in range(1, 1000):
        ...     history.add("rate", step, 0.5)
        >>> points = history.series()["rate"]
        >>> points[:2], len(points)
        ([(4, 0.5), (8, 0.5)], 249)
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def add(self, name: str, step: int, value: float) -> None:
        """Add a value, later than the ones before."""
        kept = self._kept.get(name) or self._kept.setdefault(name, _Kept())
        kept.count += 1
        if kept.count % kept.stride == 0:
            kept.points.append((step, value))
            if len(kept.points) > NUM_POINTS:
                del kept.points[::2]
                kept.stride *= 2

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """Return the points of each series."""
        return {name: list(kept.points) for name, kept in self._kept.items()}


class Validation(History):
    """The metrics of each validation: those that appeared while one ran."""

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()
        self._before: set[str] = set()

    def begin(self, metrics: Mapping[str, Any]) -> None:
        """Note before a validation which metrics there are."""
        self._before = set(metrics)

    def end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics after a validation."""
        self._names |= metrics.keys() - self._before
        for name in metrics:
            if name in self._names:
                self.add(name, step, float(metrics[name]))
