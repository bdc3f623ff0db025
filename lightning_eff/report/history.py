"""Collect a run's values by optimizer step, for the charts of the report's page.

`EfficiencyReport` fills `Losses` and `Validation`; `LoggedFigures` (logged.py) fills a `History`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

NUM_POINTS = 240
"""Maximum number of points in a series, since a screen cannot resolve more points."""
NUM_LOSSES = 2048
"""Maximum number of points of the training loss, which `compare` compares step by step."""
NUM_PENDING = 128
"""Number of losses that stay on their device until one transfer reads all of them."""
Point = tuple[float, float]


def thinned(points: Sequence[Point], num_points: int = NUM_POINTS) -> list[Point]:
    """Replace every k consecutive points by their mean at the last step; at most `num_points` remain.

    Example:
        >>> thinned([(1, 4.0), (2, 2.0), (3, 1.0)], 2)
        [(2, 3.0), (3, 1.0)]
    """
    # Ceiling division; 1 for an empty series.
    stretch = -(-len(points) // num_points) or 1
    parts = [points[begin : begin + stretch] for begin in range(0, len(points), stretch)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


class History:
    """Named series of points; a point is a step and a value.

    Example:
        >>> history = History()
        >>> history.add("rate", 1, 0.5)
        >>> history.series()
        {'rate': [(1, 0.5)]}
    """

    def __init__(self) -> None:
        # Arrays keep 16 bytes per step: 8 for the step and 8 for the value.
        self._values: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, name: str, step: int, value: float) -> None:
        """Add a value; `step` must not be smaller than the series' previous step."""
        if name not in self._values:
            self._values[name] = array("q"), array("d")
        steps, values = self._values[name]
        steps.append(step)
        values.append(value)

    def series(self) -> dict[str, list[Point]]:
        """Return the points of each series, thinned to `NUM_POINTS`."""
        return {name: thinned(list(zip(*pair, strict=True))) for name, pair in self._values.items()}


class Validation(History):
    """History of the validation metrics, that is, of all metrics that first appeared during a validation."""

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()
        self._before: set[str] = set()

    def begin(self, metrics: Mapping[str, Any]) -> None:
        """Store the names of the metrics that exist before a validation."""
        self._before = set(metrics)

    def end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a validation that has ended."""
        # Remember the names, because the metrics already exist before the second validation.
        self._names |= metrics.keys() - self._before
        for name in metrics:
            if name in self._names:
                self.add(name, step, float(metrics[name]))


class Losses:
    """Mean training loss of each optimizer step, collected without waiting for the device.

    Example:
        >>> losses = Losses()
        >>> for step, value in ((1, 3.0), (1, 1.0), (2, 1.5)):
        ...     losses.add(step, {"loss": torch.tensor(value)})
        >>> losses.curve()
        [(1, 2.0), (2, 1.5)]
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")
        self._pending: list[Tensor] = []

    def add(self, step: int, outputs: Any, times: int = 1) -> None:
        """Record the loss of one batch; outputs without a scalar loss are ignored.

        Args:
            step: Optimizer step that the batch belongs to, counted from 1.
            outputs: Outputs that Lightning passes to `on_train_batch_end`.
            times: Factor that undoes Lightning's division of the loss.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        self._steps.append(step)
        if loss.is_cpu and not self._pending:  # reading does not wait, and is cheaper than a copy
            self._values.append(loss.item() * times)
            return
        self._pending.append(loss.detach().reshape(()).double() * times)
        if len(self._pending) >= NUM_PENDING:
            self._read_pending()

    def curve(self) -> list[Point]:
        """Return points of step and loss; in a long run, each point is the mean of several steps."""
        self._read_pending()
        pairs = zip(self._steps, self._values, strict=True)
        by_step = [
            (step, [loss for _, loss in batch]) for step, batch in groupby(pairs, lambda pair: pair[0])
        ]
        return thinned([(step, sum(losses) / len(losses)) for step, losses in by_step], NUM_LOSSES)

    def _read_pending(self) -> None:
        # One transfer reads all losses, instead of one wait per loss.
        self._values.extend(torch.stack(self._pending).tolist() if self._pending else ())
        self._pending.clear()
