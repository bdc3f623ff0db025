"""A batch in micro-batches, and once more in smaller ones when memory runs out: the same step all the same.

`MicroBatches.run` cuts a batch and runs each part. When one does not fit, everything that the step has
changed so far is brought back (random states, buffers, metrics, gradients) and the step is computed once
more from its first sample, in smaller parts. What comes out is to the bit what would have come out with that
size from the start. Where a step has several batches, those before are computed once more too, without
logging anything twice.

Across ranks (DDP) nothing is synchronized until a rank has all its gradients, so that a rank which runs out
of memory only takes longer, and the others wait for it where the gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.microbatching import ddp
from lightning_eff.microbatching.fitting import Fitting
from lightning_eff.microbatching.samples import leaves
from lightning_eff.microbatching.snapshot import Rollback
from lightning_eff.microbatching.splitting import Part
from lightning_eff.microbatching.window import Window


class RunPart(Protocol):
    """Forward and backward pass of one micro-batch."""

    def __call__(self, part: Part, whole: int | None, *, first: bool, last: bool) -> Any:
        """Return what is to be known of it; must not keep the graph.

        Args:
            part: The micro-batch.
            whole: Samples of the batch that it is a part of.
            first: Whether it is the first of its batch.
            last: Whether it is the last of its batch.
        """
        ...


@dataclass
class _Batch:
    """A batch of the step, and what came of it."""

    batch: Any
    whole: int | None
    run_part: RunPart
    versions: list[int]
    done: list[tuple[Part, Any]] = field(default_factory=list[tuple[Part, Any]])


class MicroBatches:
    """Runs the batches of a step in parts that fit. One object serves step after step.

    Args:
        fitting: How large they are.
        window: The arithmetic of the step.
        rollback: What a step changes; used where `fitting` adapts.
        model: What is trained, wrapped by DDP or not.
        device: Where it is.
    """

    def __init__(
        self, fitting: Fitting, window: Window, rollback: Rollback, model: nn.Module, device: torch.device
    ) -> None:
        self.fitting = fitting
        self._window = window
        self._rollback = rollback
        self._model = model
        self._device = device
        self.replica = model if isinstance(model, DistributedDataParallel) and fitting.adapts else None
        """Set where this rank's gradients are averaged with the others' at the end of a step alone."""
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._before: list[_Batch] = []
        self._again = False
        self._finished = False
        if not self.fitting.adapts:
            return
        if self.replica is not None:
            ddp.take_buffers(self.replica)
        self._rollback.keep()
        self._mark = self._window.mark()
        self._had_gradients = any(parameter.grad is not None for parameter in self._model.parameters())

    def back_to(self, num_batches: int) -> None:
        """Forget the batches after so many: an optimizer evaluates its closure once more."""
        del self._before[num_batches:]

    def run(self, batch: Any, run_part: RunPart) -> list[tuple[Part, Any]]:
        """Run one batch of the step, and return its parts with what each has returned.

        The list is changed later on, if a later batch of the step does not fit and this one is run again.
        """
        fitting = self.fitting
        one = _Batch(batch, fitting.samples(batch), run_part, _versions(batch))
        if self._finished or not fitting.adapts:  # the second evaluation of a closure has no way back
            try:
                one.done = self._run_parts(one, fitting.size)
            except Exception as error:
                if is_out_of_memory(error) and not fitting.adapts:
                    error.add_note("micro_batch_size=auto would have halved the micro-batch and gone on")
                raise
            fitting.num_split += len(one.done) > 1
            return one.done
        self._again = False
        if self._before:
            self._rollback.keep_visible()

        def attempt(size: int | None) -> list[tuple[Part, Any]]:
            if self._again:
                self._run_those_before(size)
            return self._run_parts(one, size)

        def undo() -> None:
            self._undo([*self._before, one])

        with self._alone():
            one.done = fitting.attempt(
                attempt, whole=lambda: fitting.count(batch), undo=undo, device=self._device
            )
        fitting.num_split += len(one.done) > 1
        self._before.append(one)
        return one.done

    def _run_parts(self, one: _Batch, size: int | None) -> list[tuple[Part, Any]]:
        parts = self.fitting.parts(one.batch, size)
        whole = _total(parts, one.whole)
        last = len(parts) - 1
        return [
            (part, one.run_part(part, whole, first=index == 0, last=index == last))
            for index, part in enumerate(parts)
        ]

    def _run_those_before(self, size: int | None) -> None:
        for one in self._before:
            one.done[:] = self._run_parts(one, size)
        self._rollback.restore_visible()

    def _undo(self, batches: Iterable[_Batch]) -> None:
        self._again = True
        self._window.back(self._mark)
        self._rollback.restore()
        if not self._had_gradients:
            for parameter in self._model.parameters():
                parameter.grad = None
        if any(_versions(one.batch) != one.versions for one in batches):
            text = "out of memory, and training_step changes its batch in place: no second try is possible"
            raise RuntimeError(text)

    @contextmanager
    def _alone(self) -> Generator[None]:
        if self.replica is None:
            yield
        else:
            with ddp.alone(self.replica):
                yield

    def finish(self) -> None:
        """End a step's gradients: average them over the ranks, let go of its batches."""
        self._before = []
        self._finished = True
        self.fitting.finish_step(self.replica)
        if self.fitting.adapts:
            self._rollback.learn()


def _total(parts: Sequence[Part], whole: int | None) -> int | None:
    """Return the samples of all parts together, as a splitter has made them."""
    counts = [part.num_samples for part in parts]
    if None in counts:
        return whole if len(parts) == 1 else 0
    return sum(count for count in counts if count is not None)


def _versions(batch: Any) -> list[int]:
    """Return how often each tensor of a batch was changed in place."""
    values = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves(batch)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]  # noqa: SLF001
