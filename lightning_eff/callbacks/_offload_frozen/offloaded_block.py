"""A block whose frozen weights are on the device only while it computes, forward and backward.

Two hooks around the forward pass open and close its weights. Autograd saves weights and views of them, which
would hold their copies until the backward pass; so around the forward pass a saved tensor that is in the
memory of a copy is saved as a description, by which the backward pass finds it in a new copy. All other saved
tensors are saved as they are, but the first of them that the backward pass needs opens the block too, for
functions that compute with its parameters then.

Within torch's checkpoint nothing is saved, and the block opens where it runs again. Hooks on saved tensors
switch off PyTorch's check for changes in place, so it is made here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_eff.callbacks._offload_frozen.fetcher import Fetcher
from lightning_eff.callbacks._offload_frozen.host_weights import CPU, HostWeights, storage_key
from lightning_eff.core.errors import ConflictWarning
from lightning_eff.core.recompute import RecomputedBlock

CHECKPOINT = "torch.utils.checkpoint"
"""Module of the hooks by which a checkpoint saves nothing."""
_MARK = "_offloaded_by"
_untraced: Any = torch.compiler.disable  # what is inside the block may be compiled, the hooks not


@dataclass(frozen=True, eq=False)
class _SavedWeight:
    """Stands for a frozen weight, or a view of it, in the graph."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


@dataclass(frozen=True, eq=False)
class _Saved:
    """Any other tensor that autograd saves, as the hooks outside of the block pack it."""

    packed: Any
    unpack: Callable[[Any], Tensor] | None
    version: int


@dataclass(eq=False)
class _Frame:
    """One forward pass that has not ended."""

    is_open: bool = False
    hooks: AbstractContextManager[Any] | None = None


class OffloadedBlock:
    """Keeps frozen weights of a block in host memory until `remove` is called.

    Args:
        block: The block.
        weights: Its frozen parameters.
        fetcher: Of all blocks of the model.
    """

    def __init__(self, block: nn.Module, weights: HostWeights, fetcher: Fetcher) -> None:
        self.weights = weights
        self._block, self._fetcher = block, fetcher
        self._frames: list[_Frame] = []
        # Outermost, so that checkpoints and their own hooks on saved tensors are inside.
        self._handles = [
            block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            block.register_forward_hook(self._after, always_call=True),
        ]
        vars(block)[_MARK] = self

    @staticmethod
    def of(block: nn.Module) -> OffloadedBlock | None:
        """Return the object that offloads a block, or None."""
        return vars(block).get(_MARK)

    def remove(self) -> None:
        """Remove the hooks; the weights stay in host memory until the model is moved, their copies too."""
        while self._frames:
            self._leave(self._frames.pop())
        self.weights.remove()
        vars(self._block).pop(_MARK, None)
        for handle in self._handles:
            handle.remove()

    @_untraced
    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = _Frame()
        self._frames.append(frame)  # before anything can fail
        if in_backward():
            self._fetcher.enter_backward(self.weights)
            return
        inputs = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        others = (p for p in block.parameters() if p.requires_grad)
        at = next(inputs, None)
        at = next(others, None) if at is None else at
        self._fetcher.enter_forward(self.weights, CPU if at is None else at.device)
        frame.is_open = True
        outer = _outer_hooks()
        if not torch.is_grad_enabled() or (outer and str(outer[0].__module__) == CHECKPOINT):
            return
        self._warn_of_casts(self._fetcher.device.type)
        pack, unpack = outer or (None, None)
        frame.hooks = saved_tensors_hooks(lambda tensor: self._pack(tensor, pack, unpack), self._unpack)
        frame.hooks.__enter__()

    def _warn_of_casts(self, device_type: str) -> None:
        """Warn once if autograd will keep a cast of each weight, on the device."""
        wide = [p for p in self.weights.parameters.values() if p.dtype == torch.float32 and p.ndim > 1]
        is_cast = torch.is_autocast_enabled(device_type) and RecomputedBlock.of(self._block) is None
        if wide and is_cast and not self._fetcher.are_casts_kept:
            self._fetcher.are_casts_kept = True
            text = (
                "OffloadFrozen: autocast casts frozen float32 weights, and autograd keeps the casts"
                "\n  try: precision=frozen_bf16\n  try: +callbacks=gradient_checkpointing"
            )
            warnings.warn(ConflictWarning(text), stacklevel=2)

    @_untraced
    def _after(self, *_: Any) -> None:
        if self._frames:
            self._leave(self._frames.pop())

    def _leave(self, frame: _Frame) -> None:
        if frame.hooks is not None:
            frame.hooks.__exit__(None, None, None)
        if frame.is_open:
            self._fetcher.leave_forward(self.weights)

    def _pack(
        self, tensor: Tensor, pack: Callable[[Tensor], Any] | None, unpack: Callable[[Any], Tensor] | None
    ) -> _SavedWeight | _Saved:
        index = None
        if tensor.layout == torch.strided and not tensor.requires_grad:
            with suppress(NotImplementedError):  # a tensor of torch.func has no memory of its own
                index = self._fetcher.copies_of(self.weights).index_of.get(storage_key(tensor))
        if index is not None:
            parameter = list(self.weights.parameters.values())[index]
            if tensor.dtype == parameter.dtype:
                size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
                return _SavedWeight(index, size, stride, offset, parameter._version)  # noqa: SLF001
        if pack is not None:
            return _Saved(pack(tensor), unpack, 0)
        # Not the tensor itself, which would hold the node that holds it.
        return _Saved(tensor.detach(), None, tensor._version)  # noqa: SLF001

    def _unpack(self, saved: _SavedWeight | _Saved) -> Tensor:
        if in_backward():
            self._fetcher.enter_backward(self.weights)
        if isinstance(saved, _SavedWeight):
            name, parameter = list(self.weights.parameters.items())[saved.index]
            _check_version(parameter._version, saved.version, f"{self.weights.name}.{name}")  # noqa: SLF001
            copy = self._fetcher.copies_of(self.weights).tensors[saved.index]
            return copy.as_strided(saved.size, saved.stride, saved.offset)
        if saved.unpack is not None:
            return saved.unpack(saved.packed)
        tensor: Tensor = saved.packed
        _check_version(tensor._version, saved.version, f"a tensor of {list(tensor.shape)}")  # noqa: SLF001
        return tensor


def _check_version(version: int, saved: int, what: str) -> None:
    if version != saved:
        msg = (
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what} is at version {version}; expected version {saved} instead"
        )
        raise RuntimeError(msg)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    autograd: Any = torch._C._autograd  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001, FBT003
