"""Weights in host memory as a GPU sees them: copied and never computed with; and how many copies live."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff.callbacks._offload_frozen.host_weights import storage_key
from lightning_eff.callbacks._offload_frozen.offloaded_weights import OffloadedWeights
from lightning_eff.core.host_offload import HostOffload

MOVES = {"_has_compatible_shallow_copy_type", "_to_copy", "clone", "copy_", "detach", "empty_like"}
"""Operations that take tensors of two devices, or compute nothing."""


class HostOnly(TorchDispatchMode):
    """Notes operations that compute with weights in host memory, and the bytes of their copies that live."""

    def __init__(self, offloaded: OffloadedWeights) -> None:
        super().__init__()
        hosts = [host for block in offloaded.blocks.values() for host in block.weights.hosts]
        self._hosts = {storage_key(host) for host in hosts}
        self.computed: list[str] = []
        self.live_bytes = self.most_live_bytes = 0

    @override
    def __enter__(self) -> Self:
        HostOffload.weight_observers.append(self._count)
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        HostOffload.weight_observers.remove(self._count)
        super().__exit__(*error)

    def _count(self, copy: Tensor) -> None:
        storage = copy.untyped_storage()
        self.live_bytes += storage.nbytes()
        self.most_live_bytes = max(self.most_live_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in MOVES:
            tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
            strided = [t for t in tensors if t.layout == torch.strided]
            self.computed += [name] * any(storage_key(t) in self._hosts for t in strided)
        return func(*args, **(kwargs or {}))
