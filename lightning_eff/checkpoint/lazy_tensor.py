"""Tensors whose rows lie in several places: how a checkpoint is taken apart, and put together again.

On the way out each divided tensor of a checkpoint leaves an outline in it (a tensor on `meta`, its shape and
format alone), and this rank's rows stand beside it under the path of its first appearance. On the way in the
outline becomes an `InRows`: whoever wants some rows asks for them, and reads no others; to everyone else it
is the whole tensor, put together when it is first looked at. So a hook that looks into a checkpoint need not
know of this, and a model is never in memory as a whole unless somebody asks for all of it.

Why not leave outlines there and look the rows up beside them: a hook that computes with a value would compute
with none, and one that renames or copies tensors would lose them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff.core.errors import CheckpointError

Piece = tuple[int, Tensor]
"""A tensor's first row here, and the rows."""
_OF_OUTLINES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "nbytes", "layout")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.__len__, Tensor.is_floating_point),
}
"""What is asked of a tensor that needs none of its values."""


class InRows(Tensor):
    """A tensor that is put together when its values are needed; made by `in_rows`."""

    outline: Tensor
    pieces: list[Piece]

    def whole(self) -> Tensor:
        """Return the tensor put together, always the same one, so that what is changed in place stays."""
        if len(self.pieces) != 1:
            rows = [rows for _, rows in self.pieces]
            joined = torch.cat(rows) if rows else torch.empty_like(self.outline, device="cpu")
            self.pieces = [(0, joined)]
        return self.pieces[0][1]

    def rows(self, first: int, end: int) -> Tensor:
        """Return some rows and read no others; views of where they lie, if they lie in one place."""
        found = [
            rows[max(first - start, 0) : end - start]
            for start, rows in self.pieces
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
        def known(_: str, value: Tensor) -> Tensor:
            if not isinstance(value, InRows):
                return value
            return value.outline if func in _OF_OUTLINES else value.whole()

        return func(*mapped(tuple(args), known), **mapped(dict(kwargs or {}), known))


def in_rows(outline: Tensor, pieces: Iterable[Piece]) -> InRows:
    """Return the tensor that has this outline and these rows.

    Args:
        outline: Of the whole tensor, on `meta`.
        pieces: In any order; none, or those of a rank without rows, may be empty.

    Raises:
        CheckpointError: They are not the rows of such a tensor, each once.

    Example:
        >>> outline = torch.empty(3, 1, device="meta")
        >>> made = in_rows(outline, [(2, torch.ones(1, 1)), (0, torch.zeros(2, 1))])
        >>> made.shape, made.rows(1, 3).tolist(), (made * 2).tolist()
        (torch.Size([3, 1]), [[0.0], [1.0]], [[0.0], [0.0], [2.0]])
    """
    ordered = sorted(((first, rows) for first, rows in pieces if len(rows)), key=lambda piece: piece[0])
    end = 0
    for first, rows in ordered:
        if (first, rows.dtype, rows.shape[1:]) != (end, outline.dtype, outline.shape[1:]):
            break
        end += len(rows)
    else:
        if outline.ndim and end == len(outline):
            made = torch.empty_like(outline, device="meta").as_subclass(InRows)
            made.outline, made.pieces = outline, ordered
            return made
    text = f"rows of a tensor {tuple(outline.shape)} are missing, or of another one"
    raise CheckpointError(text)


def divide(checkpoint: Any, rows_of: Callable[[Tensor], Piece | Tensor]) -> tuple[Any, dict[str, Piece]]:
    """Take the divided tensors out of a checkpoint.

    Args:
        checkpoint: Stays as it is.
        rows_of: Returns this rank's rows of a tensor; for one that is not divided the whole.

    Returns:
        The rest, with outlines in it, one for each tensor under however many names; and the rows by path.
    """
    known: dict[int, Tensor] = {}
    divided: dict[str, Piece] = {}

    def outlined(path: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            found = rows_of(tensor)
            if isinstance(found, Tensor):
                known[id(tensor)] = found
            else:
                divided[path] = found
                known[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return known[id(tensor)]

    return mapped(checkpoint, outlined), divided


def assembled(value: Any, device: Any = "cpu") -> Any:
    """Return what `value` holds with each tensor put together; tied ones stay tied.

    Args:
        value: Dictionaries, lists and tuples of tensors and anything.
        device: Where what is put together goes.
    """
    known: dict[int, Tensor] = {}

    def put(_: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, InRows):
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor.whole().to(device)
        return known[id(tensor)]

    return mapped(value, put)


def mapped(value: Any, change: Callable[[str, Tensor], Any], path: str = "") -> Any:
    """Return what `value` holds with its tensors changed; what has none in it stays itself.

    Args:
        value: Dictionaries, lists and tuples of tensors and anything.
        change: Is given each tensor's path, as one would write it in Python, and the tensor.
        path: Of `value`.

    Example:
        >>> mapped({"a": [torch.ones(1), 2]}, lambda path, _: path)
        {'a': ["['a'][0]", 2]}
    """
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        new = {key: mapped(item, change, f"{path}[{key!r}]") for key, item in value.items()}
        if all(new[key] is item for key, item in value.items()):
            return value
        made = copy.copy(value)
        made.update(new)
        return made
    if type(value) in (list, tuple):
        items = [mapped(item, change, f"{path}[{number}]") for number, item in enumerate(value)]
        same = all(one is other for one, other in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value
