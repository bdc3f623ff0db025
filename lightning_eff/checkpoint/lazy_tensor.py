"""Tensors whose rows lie in several files: split a checkpoint into shards, and read it back lazily.

For saving, each sharded tensor of a checkpoint is replaced by an outline (a `meta` tensor: shape and dtype
only), and this rank's rows are collected under the path of the tensor's first appearance. For loading, each
outline becomes a `LazyShardedTensor`: `rows(first, end)` reads those rows and no others; any other use makes
it the full tensor on first access. So hooks that read a checkpoint need no special case, and a full model is
in memory only if something uses all of it.

Why not outlines plus a separate table of rows: a hook that computes with a value would get no values, and one
that renames or copies tensors would lose them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_only, tree_map_with_path
from typing_extensions import override

from lightning_eff.core.errors import CheckpointError

RowShard = tuple[int, Tensor]
"""Index of the first row, and the rows."""
_NEED_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "nbytes", "layout")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.__len__, Tensor.is_floating_point),
}
"""Functions that are answered by the outline."""


class LazyShardedTensor(Tensor):
    """A tensor that is concatenated when its values are needed; made by `from_shards`."""

    outline: Tensor
    shards: list[RowShard]
    """Sorted by first row, without empty ones."""

    def full_tensor(self) -> Tensor:
        """Return the full tensor, always the same object, so that changes in place persist."""
        if len(self.shards) != 1:
            rows = [rows for _, rows in self.shards]
            full = torch.cat(rows) if rows else torch.empty_like(self.outline, device="cpu")
            self.shards = [(0, full)]
        return self.shards[0][1]

    def rows(self, first: int, end: int) -> Tensor:
        """Return rows `first` to `end` and read no others; a view if they lie in one shard."""
        found = [
            rows[max(first - start, 0) : end - start]
            for start, rows in self.shards
            if start < end and first < start + len(rows)
        ]
        if first >= end or not found:
            return self.outline.new_empty((0, *self.outline.shape[1:]), device="cpu")
        return found[0] if len(found) == 1 else torch.cat(found)

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def unwrap(value: LazyShardedTensor) -> Tensor:
            return value.outline if func in _NEED_NO_VALUES else value.full_tensor()

        given: Any = tree_map_only(LazyShardedTensor, unwrap, (tuple(args), dict(kwargs or {})))
        return func(*given[0], **given[1])


def from_shards(outline: Tensor, shards: Iterable[RowShard]) -> LazyShardedTensor:
    """Return the tensor with an outline (on `meta`) and rows from shards in any order.

    Raises:
        CheckpointError: The shards do not cover the tensor's rows exactly once.

    Example:
        >>> outline = torch.empty(3, 1, device="meta")
        >>> lazy = from_shards(outline, [(2, torch.ones(1, 1)), (0, torch.zeros(2, 1))])
        >>> lazy.shape, lazy.rows(1, 3).tolist(), (lazy * 2).tolist()
        (torch.Size([3, 1]), [[0.0], [1.0]], [[0.0], [0.0], [2.0]])
    """
    ordered = sorted(((first, rows) for first, rows in shards if len(rows)), key=lambda shard: shard[0])
    end = 0
    for first, rows in ordered:
        if (first, rows.dtype, rows.shape[1:]) != (end, outline.dtype, outline.shape[1:]):
            break
        end += len(rows)
    else:
        if outline.ndim and end == len(outline):
            lazy = torch.empty_like(outline, device="meta").as_subclass(LazyShardedTensor)
            lazy.outline, lazy.shards = outline, ordered
            return lazy
    raise CheckpointError(f"rows of a tensor of shape {tuple(outline.shape)} are missing or do not fit it")


def split_shards(
    checkpoint: Any, shard_of: Callable[[Tensor], RowShard | Tensor]
) -> tuple[Any, dict[str, RowShard]]:
    """Return a checkpoint with outlines in place of its sharded tensors, and this rank's rows by path.

    `shard_of` returns this rank's rows of a sharded tensor, and any other tensor in full. A tensor under
    several names has one outline, and its rows are under the first.
    """
    known: dict[int, Tensor] = {}
    shards: dict[str, RowShard] = {}

    def outlined(path: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            found = shard_of(tensor)
            if isinstance(found, Tensor):
                known[id(tensor)] = found
            else:
                shards[path] = found
                known[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return known[id(tensor)]

    return map_tensors(checkpoint, outlined), shards


def materialize(value: Any, device: Any = "cpu") -> Any:
    """Return nested containers with full tensors on `device` instead of lazy ones; tied tensors stay tied."""
    known: dict[int, Tensor] = {}

    def full(_: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, LazyShardedTensor):
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor.full_tensor().to(device)
        return known[id(tensor)]

    return map_tensors(value, full)


def map_tensors(value: Any, change: Callable[[str, Tensor], Any]) -> Any:
    """Return a copy of nested containers; `change` gets each tensor's path, as a subscript, and the tensor.

    Example:
        >>> map_tensors({"a": [torch.ones(1), 2]}, lambda path, _: path)
        {'a': ["['a'][0]", 2]}
    """
    return tree_map_with_path(
        lambda path, leaf: change(keystr(path), leaf) if isinstance(leaf, Tensor) else leaf, value
    )
