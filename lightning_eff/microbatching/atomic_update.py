"""An optimizer update that happens completely or not at all: after an out-of-memory error it is retried.

Memory runs out in an update that allocates the optimizer's state (the first one) or temporaries, when half
of the parameters may be updated already. `atomic_update` keeps an `OptimizerSnapshot` in host memory around
each update on a CPU. On other devices it does so around the first update only, since copying everything to
the host takes longer than a step. A later update that failed before it changed anything is retried as well,
which torch's counters of changes in place show for torch's own optimizers; otherwise the error says that it
cannot be undone. An optimizer that evaluates its closure more than once in a step (LBFGS) is not retried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.microbatching.micro_batch_size import free_memory
from lightning_eff.microbatching.snapshot import OptimizerSnapshot


@contextmanager
def atomic_update(optimizer: Optimizer, device: torch.device, *, is_first: bool) -> Generator[None]:
    """Make the optimizer's next `step`, whoever calls it, happen completely or not at all.

    Args:
        optimizer: Its `step` is replaced inside the context.
        device: Where the parameters are.
        is_first: Whether this is its first update, which allocates its state.
    """
    original: Any = optimizer.step
    copies = is_first or device.type == "cpu"

    @functools.wraps(original)
    def step(*args: Any, **keywords: Any) -> Any:
        return _AtomicStep(optimizer, original, device, copies=copies).run(args, keywords)

    is_wrapped = "step" in optimizer.__dict__  # an LR scheduler has replaced it
    optimizer.step = step
    try:
        yield
    finally:
        if is_wrapped:
            optimizer.step = original
        else:
            optimizer.__dict__.pop("step", None)


class _AtomicStep:
    """One call of `step`: the snapshot is taken after the closure, whose own errors are not retried."""

    def __init__(
        self, optimizer: Optimizer, original: Callable[..., Any], device: torch.device, *, copies: bool
    ) -> None:
        self._optimizer = optimizer
        self._original = original
        self._device = device
        self._copies = copies
        self._snapshot: OptimizerSnapshot | None = None
        self._num_evaluations = 0
        self._loss: Any = None

    def run(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        closure: Any = keywords.get("closure", args[0] if args else None)

        def evaluate() -> Any:
            self._snapshot = None  # memory that runs out in the closure is not the update's
            self._num_evaluations += 1
            self._loss = closure()
            if self._num_evaluations == 1:
                self._snapshot = OptimizerSnapshot(self._optimizer, copies=self._copies)
            return self._loss

        def call(evaluate: Callable[[], Any]) -> Any:
            if closure is None:
                return self._original(*args, **keywords)
            if "closure" in keywords:
                return self._original(*args, **(keywords | {"closure": evaluate}))
            return self._original(evaluate, *args[1:], **keywords)

        if closure is None:
            self._snapshot = OptimizerSnapshot(self._optimizer, copies=self._copies)
        return self._attempt_twice(call, evaluate)

    def _attempt_twice(self, call: Callable[[Callable[[], Any]], Any], evaluate: Callable[[], Any]) -> Any:
        try:
            return call(evaluate)
        except Exception as error:
            if not is_out_of_memory(error) or self._snapshot is None:
                raise
            _restore(self._snapshot, error)
        # Outside of the handler the error is gone, and with it the frames that hold temporaries.
        free_memory(self._device)
        try:
            return call(lambda: self._loss)  # the gradients are those of the first evaluation
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note("the optimizer's update does not fit; micro_batch_size does not change that")
                _restore(self._snapshot, error)
            raise


def _restore(snapshot: OptimizerSnapshot, error: Exception) -> None:
    try:
        snapshot.restore()
    except RuntimeError as reason:
        error.add_note(f"out of memory in the optimizer's update, which cannot be undone: {reason}")
        raise error from None
