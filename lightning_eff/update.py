"""An optimizer's update, wholly or not at all: when memory runs out in it, it is undone and tried again.

Memory runs out in an update where its state is allocated, in the first one, or where it needs temporaries.
Half of it may be done by then. `Undo` keeps parameters and state in host memory and brings them back.
`whole` does so around each update on a CPU, and on other devices around the first one, since a copy of
everything to the host takes longer than a step. Later on, an update that has changed nothing yet is tried
again as well, which torch's counters of changes in place tell for torch's own optimizers; one that has
changed something cannot be undone, and the error says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff.errors import is_out_of_memory
from lightning_eff.fitting import let_go
from lightning_eff.measure.memory import tensors_in


class Undo:
    """Parameters, gradients' places and state of an optimizer at one moment.

    Args:
        optimizer: Whose update may be undone.
        copies: Keep the values, in host memory; else `restore` can only find out that nothing was changed.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> before = layer.weight.detach().clone()
        >>> undo = Undo(optimizer)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> _ = optimizer.step()
        >>> undo.restore()
        >>> torch.equal(layer.weight, before), len(optimizer.state)
        (True, 0)
    """

    def __init__(self, optimizer: Optimizer, *, copies: bool = True) -> None:
        self._optimizer = optimizer
        self._options = [_options(group) for group in optimizer.param_groups]
        self._state = {key: _shallow(value) for key, value in optimizer.state.items()}
        self._tensors = list({id(tensor): tensor for tensor in self._changeable()}.values())
        self._versions = [tensor._version for tensor in self._tensors]  # noqa: SLF001 - counts changes in place
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors] if copies else None

    def _changeable(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]
        yield from tensors_in(list(self._optimizer.state.values()))

    def restore(self) -> None:
        """Bring everything back.

        Raises:
            RuntimeError: Something was changed of which no copy was kept.
        """
        changed = [t._version != v for t, v in zip(self._tensors, self._versions, strict=True)]  # noqa: SLF001
        if self._values is None and (any(changed) or not _counts_changes(self._optimizer)):
            text = f"{sum(changed)} of {len(changed)} tensors were changed already, which cannot be undone"
            raise RuntimeError(text)
        for tensor, value in zip(self._tensors, self._values or (), strict=self._values is not None):
            with torch.no_grad():
                tensor.copy_(value)
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)
        for key in [key for key in self._optimizer.state if key not in self._state]:
            del self._optimizer.state[key]
        for key, value in self._state.items():
            self._optimizer.state[key] = _shallow(value)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _counts_changes(optimizer: Optimizer) -> bool:
    """Say whether an optimizer changes tensors by torch's operations alone, which count that."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", __name__.partition(".")[0])


@contextmanager
def whole(optimizer: Optimizer, device: torch.device, *, first: bool) -> Generator[None]:
    """Let the optimizer's next `step`, whoever calls it, happen wholly or not at all.

    Args:
        optimizer: One whose `step` works without a closure; others are left alone.
        device: Where the parameters are.
        first: Whether this is its first update, in which it makes its state.
    """
    original: Any = optimizer.step
    if not _is_optional(original, "closure"):
        yield
        return

    @functools.wraps(original)
    def step(*args: Any, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        if args:
            closure, args = args[0], args[1:]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _try_twice(
            lambda: original(*args, **keywords), Undo(optimizer, copies=first or device.type == "cpu"), device
        )
        return loss

    was_there = "step" in optimizer.__dict__
    optimizer.step = step
    try:
        yield
    finally:
        if was_there:
            optimizer.step = original
        else:
            optimizer.__dict__.pop("step", None)


def _try_twice(update: Callable[[], Any], undo: Undo, device: torch.device) -> None:
    try:
        update()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        try:
            undo.restore()
        except RuntimeError as reason:
            error.add_note(f"out of memory in the optimizer's update: {reason}")
            raise error from None
    else:
        return
    let_go(device)
    try:
        update()
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note("the optimizer's update does not fit, which no micro-batch size changes")
        raise


def _is_optional(step: Callable[..., Any], name: str) -> bool:
    parameter = inspect.signature(step).parameters.get(name)
    return parameter is not None and parameter.default is not inspect.Parameter.empty
