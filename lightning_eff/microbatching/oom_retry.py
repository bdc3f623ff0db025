"""Run the batches of a step in micro-batches, and again in smaller ones when memory runs out.

When a micro-batch does not fit, everything that the step has changed (random states, buffers, metrics,
gradients) is restored and the step is computed again from its first sample in half the size. The result
equals to the bit that of a run with this size from the start. In a step of several batches the earlier ones
are computed again too, without logging anything twice.

Under DDP nothing is synchronized until a rank has all its gradients: a rank that runs out of memory only
takes longer, and the others wait for it where the gradients are averaged. Then all agree on the size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_eff.core.call_state import version
from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.microbatching import ddp
from lightning_eff.microbatching.micro_batch_size import MicroBatchSize, free_memory
from lightning_eff.microbatching.snapshot import StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart, leaves
from lightning_eff.microbatching.window import Window

RunPart = Callable[..., Any]
"""Runs forward and backward pass of a micro-batch, and returns its output without the graph.

`run_part(part, batch_samples, is_first=..., is_last=...)`: the `MicroBatchPart`, whether it is the first and
the last of its batch, and the samples of this batch (None if unknown, 0 if only those of its slices are).
"""
PartOutputs = list[tuple[MicroBatchPart, Any]]
"""The micro-batches of a batch, with what `RunPart` returned for each."""


@dataclass
class _Batch:
    """A batch of the current step, and its outputs so far."""

    batch: Any
    num_samples: int | None
    run_part: RunPart
    versions: list[int]
    outputs: PartOutputs = field(default_factory=PartOutputs)


class OomRetry:
    """Runs the batches of a step in micro-batches that fit. One object serves step after step.

    Args:
        micro_batch_size: The current size.
        window: Scales the losses of the step.
        snapshot: Of what a step changes; used if the size is `auto`.
        model: The trained model, wrapped by DDP or not.
        device: Where it is.
    """

    def __init__(
        self,
        micro_batch_size: MicroBatchSize,
        window: Window,
        snapshot: StepSnapshot,
        model: nn.Module,
        device: torch.device,
    ) -> None:
        self._size = micro_batch_size
        self._window = window
        self._snapshot = snapshot
        self._model = model
        self._device = device
        is_ddp = isinstance(model, DistributedDataParallel)
        self.replica = model if is_ddp and micro_batch_size.is_auto else None
        """Set if this rank's gradients are averaged at the end of a step, in place of by DDP."""
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self.earlier: list[_Batch] = []  # the batches of the step that were run
        self._is_finished = False
        if not self._size.is_auto:
            return
        if self.replica is not None:
            ddp.take_buffers(self.replica)
        self._snapshot.keep()
        self._window_state = self._window.state()
        self._had_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
        self._num_halvings = len(self._size.halvings)

    def run(self, batch: Any, run_part: RunPart) -> PartOutputs:
        """Run one batch of the step, and return its micro-batches with their outputs.

        The list changes later on, if a later batch of the step does not fit and this one is run again.
        """
        size = self._size
        current = _Batch(batch, size.num_samples(batch), run_part, _versions(batch))
        # After `finish` an optimizer evaluates its closure again, when its parameters have changed: no retry.
        if self._is_finished or not size.is_auto:
            try:
                current.outputs = self._run_parts(current)
            except Exception as error:
                if is_out_of_memory(error) and not size.is_auto:
                    error.add_note("micro_batch_size=auto would halve the micro-batch and retry")
                raise
        else:
            if self.earlier:
                self._snapshot.keep_visible()
            with nullcontext() if self.replica is None else ddp.without_collectives(self.replica):
                current.outputs = self._run_until_it_fits(current)
            self.earlier.append(current)
        size.num_split += len(current.outputs) > 1
        return current.outputs

    def _run_until_it_fits(self, current: _Batch) -> PartOutputs:
        """Run a batch; in further attempts the earlier batches of the step too, without logging again."""
        is_retry = False
        while True:
            try:
                if is_retry:
                    for earlier in self.earlier:
                        earlier.outputs[:] = self._run_parts(earlier)
                    self._snapshot.restore_visible()
                return self._run_parts(current)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._size.halve(self._size.num_samples(current.batch, by_splitting=True), error)
            # Only here, outside of the handler, are the error and the frames that it held gone.
            self._undo(current)
            free_memory(self._device)
            is_retry = True

    def _run_parts(self, current: _Batch) -> PartOutputs:
        parts = self._size.split(current.batch, self._size.current)
        # The sum over the slices, since a splitter may make more or fewer samples than the batch had.
        counts = [part.num_samples for part in parts if part.num_samples is not None]
        batch_samples = current.num_samples if len(parts) == 1 else 0
        batch_samples = sum(counts) if len(counts) == len(parts) else batch_samples
        last = len(parts) - 1
        return [
            (part, current.run_part(part, batch_samples, is_first=index == 0, is_last=index == last))
            for index, part in enumerate(parts)
        ]

    def _undo(self, current: _Batch) -> None:
        self._window.restore(self._window_state)
        self._snapshot.restore()
        if not self._had_gradients:
            for parameter in self._model.parameters():
                parameter.grad = None
        if any(_versions(each.batch) != each.versions for each in (*self.earlier, current)):
            raise RuntimeError(
                "out of memory, and training_step changes its batch in place, so it cannot be run again"
            )

    def finish(self) -> None:
        """Average the gradients over the ranks, agree on the size of the next step, and free the batches."""
        self.earlier = []
        self._is_finished = True
        if self.replica is not None:
            was_halved = len(self._size.halvings) > self._num_halvings
            if ddp.average_gradients(self.replica, also=float(was_halved)):
                # On any rank: all of them continue with the smallest size.
                smallest, _ = ddp.extremes(self._size.current or self._size.largest, self.replica)
                self._size.current = int(smallest)


def _versions(batch: Any) -> list[int]:
    """Return how often each tensor of a batch was changed in place, as torch counts it."""
    return [version(leaf) for _, leaf in leaves(batch) if isinstance(leaf, Tensor)]
