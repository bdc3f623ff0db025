"""Count what a few training batches cost, exactly: operations, and bytes where no allocator counts them.

Counting slows a batch down, so it stops as soon as it has seen what matters: the first batch, whose
operations every batch repeats, and on the CPU two whole optimizer steps: not before the second have
parameters, gradients, optimizer state and activations been alive together in every batch of a step. None of
it changes a number of the training.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from lightning_eff.report.flops import FlopCount
from lightning_eff.report.live_bytes import LiveBytes


class Probe:
    """Counts from `begin` to `end` of each batch, until `done`.

    Args:
        count_flops: Count the first batch's operations.
        count_bytes: Count live bytes of two whole optimizer steps.
        live: What counts them, where more than their number is to be known.
    """

    def __init__(self, *, count_flops: bool, count_bytes: bool, live: LiveBytes | None = None) -> None:
        self.num_batches = 0
        self.flops: int | None = None
        self.peak_bytes: int | None = None
        self.peak_if_held_bytes: int | None = None
        self._count_flops = count_flops
        self._live = (live or LiveBytes()) if count_bytes else None
        self._open = ExitStack()

    def done(self, steps: int) -> bool:
        """Say whether nothing is left to count after `steps` optimizer steps of this fit."""
        flops_left = self._count_flops and self.flops is None
        bytes_left = self._live is not None and (steps < 2 or self.num_batches < 2)
        return not (flops_left or bytes_left)

    def begin(self, batch: object, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Start to count a batch that is about to be trained on."""
        if self._live is not None:
            self._live.begin(batch, module, optimizers)
            self._open.callback(self._live.end)
            self._open.enter_context(self._live)
        if self._count_flops and self.flops is None:
            self._flop_count = self._open.enter_context(FlopCount())

    def end(self) -> None:
        """Stop counting; the batch is complete."""
        self.close()
        self.num_batches += 1
        if self._count_flops and self.flops is None:
            self.flops = self._flop_count.flops
        if self._live is not None:
            self.peak_bytes = self._live.peak_bytes
            self.peak_if_held_bytes = self._live.peak_if_held_bytes

    def close(self) -> None:
        """Stop counting, also in the middle of a batch that failed."""
        self._open.close()
