"""The training loss of each optimizer step, kept without making the device wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NUM_PENDING = 128
"""Values that stay on their device before they are read together."""
NUM_POINTS = 2048
"""Points that are kept at most; a longer run keeps means of 2, 4, 8 ... steps."""


class Losses:
    """Losses by optimizer step: the mean of a step's batches.

    Example:
        >>> losses = Losses()
        >>> for step, value in ((1, 3.0), (1, 1.0), (2, 1.5)):
        ...     losses.add(step, {"loss": torch.tensor(value)})
        >>> losses.curve()
        [(1, 2.0), (2, 1.5)]
    """

    def __init__(self) -> None:
        self._pending: list[tuple[int, Tensor]] = []
        self._points: list[tuple[int, float, int]] = []
        """Last step, sum and number of a point's batches."""
        self._stride = 1

    def add(self, step: int, outputs: Any, times: int = 1) -> None:
        """Take what a training step gave for its batch; without a loss of one number it counts nothing.

        Args:
            step: Number of the optimizer step that the batch belongs to, from 1.
            outputs: As Lightning hands them to `on_train_batch_end`.
            times: What the loss was divided by.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        self._pending.append((step, loss.detach().reshape(()) * times))
        if len(self._pending) >= NUM_PENDING:
            self._settle()

    def curve(self) -> list[tuple[int, float]]:
        """Return steps and their losses; in a long run each is the mean of several, at the last of them."""
        self._settle()
        return [(step, total / count) for step, total, count in self._points]

    def _settle(self) -> None:
        if not self._pending:
            return
        values = torch.stack([loss.double() for _, loss in self._pending]).tolist()
        for (step, _), value in zip(self._pending, values, strict=True):
            last, total, count = self._points[-1] if self._points else (0, 0.0, 0)
            if count and (last - 1) // self._stride == (step - 1) // self._stride:
                self._points[-1] = (step, total + value, count + 1)
            else:
                self._points.append((step, value, 1))
        self._pending.clear()
        while len(self._points) > NUM_POINTS:
            self._merge()

    def _merge(self) -> None:
        self._stride *= 2
        merged: list[tuple[int, float, int]] = []
        for step, total, count in self._points:
            if merged and (merged[-1][0] - 1) // self._stride == (step - 1) // self._stride:
                merged[-1] = (step, merged[-1][1] + total, merged[-1][2] + count)
            else:
                merged.append((step, total, count))
        self._points = merged
