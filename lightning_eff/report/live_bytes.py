"""Count the live bytes of a step, on a device without allocator statistics.

`Recorder` (recording.py) extends `LiveBytes` to keep every event. A dispatch mode inspects each operation's
results. The count grows by the bytes of a new storage, and shrinks when the storage is garbage-collected. So
tensors that share a storage count once, and every run gives the same count to the byte. The count excludes
memory that an operation allocates and frees internally. If a storage is resized outside of an operation, the
count changes when a later operation returns the storage. Meta tensors have no memory and are skipped.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class InfraMode(TorchDispatchMode):
    """Base class of dispatch modes that only observe operations; flex attention accepts such modes."""

    supports_higher_order_operators = True

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Return True, because flex attention rejects all other modes (torch 2.13)."""
        return True


class LiveBytes(InfraMode):
    """Count live bytes, and their maximum, while operations run inside the `with` block.

    Example:
        >>> x = torch.zeros(1024)
        >>> live = LiveBytes()
        >>> live.add([x])
        >>> with live:
        ...     y = x * 2
        ...     del y
        >>> live.now_bytes, live.peak_bytes
        (4096, 8192)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors; skip values that are not tensors."""
        for tensor in tensors:
            if hasattr(type(tensor), "__tensor_flatten__"):
                self.add(tensors_in(tensor))  # a wrapper subclass: its own storage has a size but no memory
            elif isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                # torch returns the same Python object while a storage lives, so id() identifies it.
                key, num_bytes = id(storage), storage.nbytes()
                if key not in self._alive:
                    # Reading `.device` of a fake tensor dispatches an operation; reading `fake_device` does
                    # not.
                    if (getattr(tensor, "fake_device", None) or tensor.device).type == "meta":
                        continue
                    # The reference is weak, so the storage is still freed with its last tensor.
                    reference = weakref.ref(storage, lambda _, key=key: self.on_change(key, None))
                    self._alive[key] = (reference, 0)
                    # The shape of a view or of a nested tensor does not describe the full storage.
                    is_whole = not tensor.is_nested and tensor.nbytes == num_bytes
                    self.on_change(key, num_bytes, tuple(tensor.shape) if is_whole else ())
                elif num_bytes != self._alive[key][1]:
                    self.on_change(key, num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def on_change(self, key: int, num_bytes: int | None, shape: tuple[int, ...] = ()) -> None:  # noqa: ARG002
        """Count a new, resized or freed storage, which `key` identifies; `num_bytes=None` means freed."""
        reference, before = self._alive.pop(key)
        self.now_bytes += (num_bytes or 0) - before
        if num_bytes is not None:
            self._alive[key] = (reference, num_bytes)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add((out,) if isinstance(out, Tensor) else tree_leaves(out))
        return out


def state_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of an optimizer's state by device type.

    The bytes include tensors inside quantized tensors and inside a library's state objects.

    Example:
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> _ = optimizer.step()
        >>> state_bytes(optimizer)
        {'cpu': 40}
    """
    found: Counter[str] = Counter()
    # A tensor in several states counts once.
    for tensor in {id(tensor): tensor for tensor in tensors_in(list(optimizer.state.values()))}.values():
        found[tensor.device.type] += tensor.nbytes
    return dict(found)


def tensors_in(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield all plain tensors in a value, also inside containers, quantized tensors and attributes."""
    if id(value) in seen:
        return
    seen |= {id(value)}
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            inner = [getattr(value, name) for name in flatten()[0]]
            # Skip a DTensor's mesh (a tensor of rank numbers), which torch 2.13 lists, too.
            yield from tensors_in([each for each in inner if isinstance(each, Tensor)], seen)
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(list(vars(value).values()), seen)
