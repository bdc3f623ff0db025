"""The training loss of each optimizer step, recorded without synchronizing with the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NUM_PENDING = 128
"""Values that stay on their device before one transfer reads them all."""
NUM_POINTS = 2048
"""Maximum points of a curve; a longer run keeps means of 2, 4, 8 ... steps."""


@dataclass
class Losses:
    """Loss by optimizer step: the mean over the step's batches.

    Example:
        >>> losses = Losses()
        >>> for step, value in ((1, 3.0), (1, 1.0), (2, 1.5)):
        ...     losses.add(step, {"loss": torch.tensor(value)})
        >>> losses.curve()
        [(1, 2.0), (2, 1.5)]
    """

    _pending: list[tuple[int, Tensor]] = field(default_factory=list[tuple[int, Tensor]])
    _points: list[tuple[int, float, int]] = field(default_factory=list[tuple[int, float, int]])
    """Last step, sum and number of batches of each point."""
    _stride: int = 1

    def add(self, step: int, outputs: Any, times: int = 1) -> None:
        """Record the loss of one batch; outputs without a scalar loss are ignored.

        Args:
            step: Optimizer step that the batch belongs to, from 1.
            outputs: As Lightning passes them to `on_train_batch_end`.
            times: What the loss was divided by.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        self._pending.append((step, loss.detach().reshape(()) * times))
        if len(self._pending) >= NUM_PENDING:
            self._read_pending()

    def curve(self) -> list[tuple[int, float]]:
        """Return steps and losses; a point of a long run is the mean of several steps."""
        self._read_pending()
        return [(step, total / count) for step, total, count in self._points]

    def _read_pending(self) -> None:
        if not self._pending:
            return
        values = torch.stack([loss.double() for _, loss in self._pending]).tolist()
        new = [(step, value, 1) for (step, _), value in zip(self._pending, values, strict=True)]
        self._pending.clear()
        points = [*self._points, *new]
        while True:
            # Sum neighbouring points whose steps fall into the same stretch of `stride` steps.
            self._points = []
            for step, total, count in points:
                last_step, last_total, last_count = self._points[-1] if self._points else (0, 0.0, 0)
                # Steps count from 1: stretch 0 holds the steps 1 to `stride`.
                if self._points and (last_step - 1) // self._stride == (step - 1) // self._stride:
                    self._points[-1] = (step, last_total + total, last_count + count)
                else:
                    self._points.append((step, total, count))
            if len(self._points) <= NUM_POINTS:
                return
            points = self._points
            self._stride *= 2
