"""Walk the containers of a batch: their items, the samples of tensors, and copies with other items."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

PLAIN = (
    *(str, bytes, int, float, complex, bool, type(None), Enum, PurePath, date, timedelta, range),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, np.generic, np.dtype),
)
"""Types of values that belong to no sample."""


class AmbiguousBatchError(Exception):
    """The tensors of a batch disagree on its samples, or a value has an unsupported type."""


def leaves(value: Any, max_items: int | None = None) -> Iterator[Any]:
    """Yield the values in the containers of a batch; of lists at most the first `max_items`."""
    items = items_of(value)
    if items is None:
        yield value
        return
    for item in items[: max_items if is_list(value) else None]:
        yield from leaves(item, max_items)


def is_number(value: Any) -> bool:
    """Return whether a value is a number or a 0-d tensor; a bool is none."""
    is_python_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_python_number or (isinstance(value, Tensor) and not value.dim())


def items_of(value: Any) -> Sequence[Any] | None:
    """Return the items of a container; None for any other value."""
    fields = fields_of(value)
    if fields is not None:
        return [item for _, item in fields]
    return value if is_list(value) else None


def fields_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named items of a mapping, a dataclass or a named tuple; None for anything else."""
    if isinstance(value, (str, int, float, type)) or is_tensor(value):
        return None
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        return [(str(key), item) for key, item in items.items()]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named: Any = value
        return list(zip(named._fields, named, strict=True))
    return None


def is_list(value: Any) -> bool:
    """Return whether a value is a list or a tuple without names."""
    is_sequence = isinstance(value, (list, tuple)) and not isinstance(value, torch.Size)
    return is_sequence and not hasattr(value, "_fields")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, an array, a packed sequence or a TensorDict."""
    is_tensordict = type(value).__module__.startswith("tensordict") and hasattr(value, "batch_size")
    return is_tensordict or isinstance(value, (Tensor, np.ndarray, PackedSequence))


def is_plain(value: Any) -> bool:
    """Return whether a value belongs to no sample, and goes to every micro-batch."""
    return isinstance(value, (*PLAIN, type)) or inspect.isroutine(value)


def count_samples(value: Any) -> tuple[int, bool] | None:
    """Return the samples of a tensor, and whether it may be one mask for all; None if it has no samples.

    Raises:
        AmbiguousBatchError: A sparse or otherwise unsupported layout.
    """
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]), False
    if isinstance(value, np.ndarray):
        return (len(value), False) if value.ndim else None
    if not isinstance(value, Tensor):  # a TensorDict, or no tensor at all
        return (int(value.batch_size[0]), False) if is_tensor(value) and len(value.batch_size) else None
    if not value.dim():
        return None
    if value.layout not in (torch.strided, torch.jagged):
        text = f"a tensor of layout {value.layout}, which only a splitter could cut"
        raise AmbiguousBatchError(text)
    count = int(value.size(0))
    is_mask = value.is_floating_point() or value.dtype == torch.bool  # integers [1, ...] are tokens
    return count, count == 1 and value.dim() > 1 and is_mask


def rebuild(value: Any, items: Sequence[Any]) -> Any:
    """Return a copy of a container with other items."""
    if is_list(value):
        return tuple(items) if isinstance(value, tuple) else list(items)
    if isinstance(value, tuple):
        named: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
        return named._make(items)
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value
        result: Any = copy.copy(value) if hasattr(value, "__setitem__") else {}
        for key, item in zip(mapping, items, strict=True):
            result[key] = item
        return result
    result = copy.copy(value)
    for (name, _), item in zip(fields_of(value) or (), items, strict=True):
        object.__setattr__(result, name, item)  # the dataclass may be frozen
    return result


def cut_tensor(value: Any, first: int, last: int, offsets: dict[int, Tensor]) -> Any:
    """Return the samples of a tensor from `first` up to `last`: a view where it is neither nested nor packed.

    Args:
        value: `is_tensor` holds.
        first: The first sample.
        last: The one after the last.
        offsets: New offsets of jagged tensors by identity of the old ones, since tensors share them.
    """
    if isinstance(value, PackedSequence):  # cut in the order of the original sequences, then packed alike
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        kept = lengths[first:last]
        rows = padded[first:last, : int(kept.max())]
        return pack_padded_sequence(rows, kept, batch_first=True, enforce_sorted=value.sorted_indices is None)
    if not (isinstance(value, Tensor) and value.is_nested):
        return value[first:last]
    jagged: Any = value
    if value.layout != torch.jagged or jagged.lengths() is not None:
        return torch.nested.as_nested_tensor(list(value.unbind()[first:last]), layout=value.layout)
    old = jagged.offsets()
    begin, end = int(old[first]), int(old[last])
    new = offsets.setdefault(id(old), old[first : last + 1] - begin)
    return torch.nested.nested_tensor_from_jagged(jagged.values()[begin:end], new)
