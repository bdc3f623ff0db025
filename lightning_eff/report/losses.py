"""The training loss of each optimizer step, recorded without synchronizing with the device."""

from __future__ import annotations

import math
from array import array
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

NUM_PENDING = 128
"""Values that stay on their device before one transfer reads them all."""
NUM_POINTS = 2048
"""Maximum points of a curve; a longer run has means of 2, 4, 8 ... steps."""


class Losses:
    """Loss by optimizer step: the mean over the step's batches.

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
            step: Optimizer step that the batch belongs to, from 1.
            outputs: As Lightning passes them to `on_train_batch_end`.
            times: What the loss was divided by.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        self._steps.append(step)
        self._pending.append(loss.detach().reshape(()).double() * times)
        if len(self._pending) >= NUM_PENDING:
            self._read_pending()

    def curve(self) -> list[tuple[int, float]]:
        """Return steps and losses; a point of a long run is the mean of several steps."""
        self._read_pending()
        # Steps count from 1: stretch 0 holds the steps 1 to `stride`.
        num_steps = self._steps[-1] - self._steps[0] + 2 if self._steps else 1
        stride = 2 ** max(0, math.ceil(math.log2(num_steps / NUM_POINTS)))
        pairs = zip(self._steps, self._values, strict=True)
        stretches = (list(stretch) for _, stretch in groupby(pairs, lambda pair: (pair[0] - 1) // stride))
        return [(stretch[-1][0], sum(loss for _, loss in stretch) / len(stretch)) for stretch in stretches]

    def _read_pending(self) -> None:
        self._values.extend(torch.stack(self._pending).tolist() if self._pending else ())
        self._pending.clear()
