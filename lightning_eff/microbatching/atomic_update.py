"""An optimizer update that happens completely or not at all: after an out-of-memory error it is retried.

Memory runs out in an update that allocates the optimizer's state (the first one) or temporaries, when half
of the parameters may be updated already. `atomic_update` keeps an `OptimizerSnapshot` in host memory around
each update on a CPU, and on other devices around the first one only, since copying everything to the host
takes longer than a step. An optimizer that evaluates its closure more than once in a step (LBFGS) is not
retried.
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
    if not is_first and device.type != "cpu":
        yield
        return
    original: Any = optimizer.step

    @functools.wraps(original)
    def step(*args: Any, **keywords: Any) -> Any:
        return _step_atomically(optimizer, original, args, keywords, device)

    is_wrapped = "step" in optimizer.__dict__  # an LR scheduler has replaced it
    optimizer.step = step
    try:
        yield
    finally:
        if is_wrapped:
            optimizer.step = original
        else:
            optimizer.__dict__.pop("step", None)


def _step_atomically(
    optimizer: Optimizer,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    device: torch.device,
) -> Any:
    """Step, twice if need be: the snapshot is taken after the closure, whose own errors are not retried."""
    closure: Any = keywords.get("closure", args[0] if args else None)
    snapshot: OptimizerSnapshot | None = None
    num_evaluations, loss, is_retry = 0, None, False

    def evaluate() -> Any:
        nonlocal snapshot, num_evaluations, loss
        if is_retry:
            return loss  # the gradients are those of the first evaluation
        snapshot = None  # memory that runs out in the closure is not the update's
        num_evaluations += 1
        loss = closure()
        snapshot = OptimizerSnapshot(optimizer) if num_evaluations == 1 else None
        return loss

    if closure is None:
        snapshot = OptimizerSnapshot(optimizer)
    elif "closure" in keywords:
        keywords = keywords | {"closure": evaluate}
    else:
        args = (evaluate, *args[1:])
    while True:
        try:
            return step(*args, **keywords)
        except Exception as error:
            if not is_out_of_memory(error) or snapshot is None:
                raise
            snapshot.restore()
            if is_retry:
                error.add_note("the optimizer's update does not fit; micro_batch_size does not change that")
                raise
        # Outside of the handler the error is gone, and with it the frames that hold temporaries.
        free_memory(device)
        is_retry = True
