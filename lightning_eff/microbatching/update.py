"""An optimizer's update, wholly or not at all: when memory runs out in it, it is undone and tried again.

Memory runs out in an update where its state is allocated, in the first one, or where it needs temporaries.
Half of it may be done by then. `Undo` keeps parameters, gradients and state in host memory and brings them
back. `whole` does so around each update on a CPU, and on other devices around the first one, since a copy of
everything to the host takes longer than a step. Later on, an update that has changed nothing yet is tried
again as well, which torch's counters of changes in place tell for torch's own optimizers; one that has
changed something cannot be undone, and the error says so. An optimizer that evaluates its closure more than
once in a step is left to itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.microbatching.fitting import let_go
from lightning_eff.report.live_bytes import tensors_in


@runtime_checkable
class SharesState(Protocol):
    """An optimizer that stands for others, which hold the same state once more."""

    def share_state(self) -> None:
        """Hand the state and the groups as they are to the optimizers behind."""
        ...


class Undo:
    """Parameters, gradients and state of an optimizer at one moment.

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
        self._groups = [_containers(_options(group)) for group in optimizer.param_groups]
        self._state = {key: _containers(value) for key, value in optimizer.state.items()}
        self._tensors = list({id(tensor): tensor for tensor in self._changeable()}.values())
        self._versions = [tensor._version for tensor in self._tensors]  # noqa: SLF001 - counts changes in place
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors] if copies else None

    def _changeable(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            yield from tensors_in(_options(group))
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
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in _options(group).keys() - options.keys():
                del group[key]
            group.update(_containers(options))
        for key in [key for key in self._optimizer.state if key not in self._state]:
            del self._optimizer.state[key]
        for key, value in self._state.items():
            self._optimizer.state[key] = _containers(value)
        if isinstance(self._optimizer, SharesState):
            self._optimizer.share_state()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _containers(value: Any) -> Any:
    """Return a value in containers of its own; what lies in them is the same."""
    if isinstance(value, dict):
        items: dict[Any, Any] = value
        return {key: _containers(item) for key, item in items.items()}
    return [_containers(item) for item in value] if type(value) is list else value


def _counts_changes(optimizer: Optimizer) -> bool:
    """Say whether an optimizer changes tensors by torch's operations alone, which count that."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", __name__.partition(".")[0])


@contextmanager
def whole(optimizer: Optimizer, device: torch.device, *, first: bool) -> Generator[None]:
    """Let the optimizer's next `step`, whoever calls it, happen wholly or not at all.

    Args:
        optimizer: What steps.
        device: Where the parameters are.
        first: Whether this is its first update, in which it makes its state.
    """
    original: Any = optimizer.step
    copies = first or device.type == "cpu"

    @functools.wraps(original)
    def step(*args: Any, **keywords: Any) -> Any:
        return _Update(optimizer, original, device, copies=copies).run(args, keywords)

    was_there = "step" in optimizer.__dict__
    optimizer.step = step
    try:
        yield
    finally:
        if was_there:
            optimizer.step = original
        else:
            optimizer.__dict__.pop("step", None)


class _Update:
    """One call of `step`: the closure is evaluated inside, and what comes after it may be undone.

    Args:
        optimizer: What steps.
        original: Its `step`.
        device: Where the parameters are.
        copies: Keep the values.
    """

    def __init__(
        self, optimizer: Optimizer, original: Callable[..., Any], device: torch.device, *, copies: bool
    ) -> None:
        self._optimizer = optimizer
        self._original = original
        self._device = device
        self._copies = copies
        self._undo: Undo | None = None
        self._evaluations = 0
        self._loss: Any = None

    def run(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        closure = keywords.get("closure", args[0] if args else None)
        if closure is None:
            self._undo = Undo(self._optimizer, copies=self._copies)
            return self._try_twice(lambda _: self._original(*args, **keywords))

        def call(evaluate: Callable[[], Any]) -> Any:
            if "closure" in keywords:
                return self._original(*args, **(keywords | {"closure": evaluate}))
            return self._original(evaluate, *args[1:], **keywords)

        def evaluate() -> Any:
            self._undo = None  # what runs out of memory in here is not the update
            self._evaluations += 1
            self._loss = closure()
            if self._evaluations == 1:
                self._undo = Undo(self._optimizer, copies=self._copies)
            return self._loss

        return self._try_twice(call, evaluate)

    def _try_twice(
        self, call: Callable[[Callable[[], Any]], Any], evaluate: Callable[[], Any] = lambda: None
    ) -> Any:
        try:
            return call(evaluate)
        except Exception as error:
            undo = self._undo
            if not is_out_of_memory(error) or undo is None:
                raise
            _restore(undo, error)
        let_go(self._device)
        try:
            return call(lambda: self._loss)
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note("the optimizer's update does not fit, which no micro-batch size changes")
                _restore(undo, error)
            raise


def _restore(undo: Undo, error: Exception) -> None:
    try:
        undo.restore()
    except RuntimeError as reason:
        error.add_note(f"out of memory in the optimizer's update: {reason}")
        raise error from None
