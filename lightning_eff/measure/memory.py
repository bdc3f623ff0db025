"""Live bytes of a step on a device without allocator statistics: every storage that exists, counted once.

A dispatch mode sees each operation's results. A storage that it has not seen adds its bytes, and takes
them away again when it dies, so tensors that share memory count once, and the figure is the same to the
byte in every run. What an operation allocates and frees inside itself is not seen, nor is a storage that
is resized without an operation. Meta tensors have no memory and count nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class LiveBytes(TorchDispatchMode):
    """Count the bytes that are alive while operations run inside, and the most there were.

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

    supports_higher_order_operators = True

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Say that operators which compile themselves (flex attention) may run inside."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made elsewhere; what is no tensor is passed over."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                self._add_storage(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._alive:
            known, before = self._alive[key]
            self._alive[key] = (known, num_bytes)
            self.now_bytes += num_bytes - before
            return

        def forget(_: object) -> None:
            self.now_bytes -= self._alive.pop(key)[1]

        self._alive[key] = (weakref.ref(storage, forget), num_bytes)
        self.now_bytes += num_bytes

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(tree_leaves(out))
        return out
