"""Which parts of a batch hold its samples, how many there are, and how each part is cut.

Samples lie along the first dimension of tensors; nested and packed tensors have one an item. A list holds
samples if what is in it says so, and is a container of tensors otherwise:

- inside another container, a list of words or numbers, of dicts (targets), or of tensors of one kind that do
  not agree otherwise (images, token rows);
- as the whole batch, items of one build with a number or a word in each (an image and its label), dicts whose
  tensors do not agree, token rows of several lengths. A tuple is always a container then.

Where that leaves two answers, or the parts disagree, there is none.
"""

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
"""Values that belong to no sample."""
LOOKED_AT = 16
"""Items of a list that are looked at to tell what it holds."""


class UnclearError(Exception):
    """The parts of a batch do not agree, or one of them is nothing known."""


def leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in the containers of a batch."""
    inside = _inside(value)
    if inside is None and not _is_list(value):
        yield value
        return
    items: Sequence[Any] = value if inside is None else [item for _, item in inside]
    for item in items:
        yield from leaves(item)


def read(batch: Any) -> Reading:
    """Return the way to read a batch on which its parts agree.

    Raises:
        UnclearError: There is none.

    Example:
        >>> read({"x": torch.zeros(4, 2), "boxes": [torch.zeros(1, 4)] * 4}).total
        4
    """
    error: UnclearError | None = None
    for inner_samples in (False, True):
        try:
            return Reading(batch, inner_samples=inner_samples)
        except UnclearError as unclear:
            error = error or unclear
    raise error or UnclearError


class Reading:
    """How a batch is read: how many samples it has, and which of its lists are lists of samples.

    Args:
        batch: What is read.
        inner_samples: Take lists of tensors inside the outermost container for lists of samples.
    """

    def __init__(self, batch: Any, *, inner_samples: bool) -> None:
        self._inner_samples = inner_samples or _has_inner_dicts(batch)
        self._has_tensors = any(_is_tensor(leaf) for leaf in _first_leaves(batch))
        self._samples: set[int] = set()  # the lists, by identity, whose items are samples
        self._tensors: dict[str, tuple[int, bool]] = {}
        self._lists: dict[str, int] = {}
        self._read(batch, "batch", outermost=True)
        self.total = self._agreed()

    def _agreed(self) -> int:
        if not self._has_tensors and len(self._lists) > 1 and all("[" in path for path in self._lists):
            text = "lists of words or numbers in a list: rows of samples, or of fields"
            raise UnclearError(text)
        own = {count for count, for_all in self._tensors.values() if not for_all}
        counts = own or {count for count, _ in self._tensors.values()} or set(self._lists.values())
        if len(counts) != 1 or not counts >= set(self._lists.values()):
            shown = [f"{path} has {count}" for path, (count, _) in self._tensors.items()]
            shown += [f"{path} has {count}" for path, count in self._lists.items()]
            raise UnclearError(", ".join(shown[:6]) or "no tensor and no list")
        (count,) = counts
        if count == 0:
            text = "no sample"
            raise UnclearError(text)
        return count

    def _read(self, value: Any, path: str, *, outermost: bool = False) -> None:
        inside = _inside(value)
        if inside is not None:
            for name, item in inside:
                self._read(item, f"{path}.{name}")
        elif _is_list(value):
            self._read_list(value, path, outermost=outermost)
        elif (count := _count(value)) is not None:
            self._tensors[path] = count
        elif not (_is_plain(value) or _is_tensor(value)):
            text = f"{path} is of type {type(value).__name__}, which only a splitter could cut"
            raise UnclearError(text)

    def _read_list(self, items: Sequence[Any], path: str, *, outermost: bool) -> None:
        samples = _are_samples(items) if outermost else self._are_inner_samples(items)
        if samples:
            self._samples.add(id(items))
            self._lists[path] = len(items)
            return
        for index, item in enumerate(items):
            self._read(item, f"{path}[{index}]")

    def _are_inner_samples(self, items: Sequence[Any]) -> bool:
        if not items or any(_is_tensor(leaf) for leaf in _first_leaves(items)):
            alike = len({_build(item)[:2] for item in items[:LOOKED_AT]}) == 1
            return bool(items) and self._inner_samples and alike
        return True

    def cut(self, batch: Any, first: int, last: int) -> Any:
        """Return the samples from `first` up to `last`."""
        return self._cut(batch, first, last, {})

    def _cut(self, value: Any, first: int, last: int, offsets: dict[int, Tensor]) -> Any:
        """Return a part of a value, in new containers.

        Args:
            value: A batch or what lies in it.
            first: The first sample.
            last: The one after the last.
            offsets: Those of jagged tensors that were cut, by identity, since tensors share them.
        """
        if id(value) in self._samples:
            return _like(value, value[first:last])
        inside = _inside(value)
        if inside is not None:
            return _with_parts(value, [self._cut(item, first, last, offsets) for _, item in inside])
        if _is_list(value):
            return _like(value, [self._cut(item, first, last, offsets) for item in value])
        count = _count(value)
        if count is None or count[0] != self.total or last - first == self.total:
            return value
        return _cut_tensor(value, first, last, offsets)


def _are_samples(items: Sequence[Any]) -> bool:
    """Say whether a batch that is a list holds samples: see the module's docstring."""
    looked_at = items[:LOOKED_AT]
    builds = {_build(item) for item in looked_at}
    if isinstance(items, tuple) or len(builds) != 1:
        return False
    (build,) = builds
    if build[0] == "tensor":  # token rows: of one build but for their length
        lengths = {len(item) for item in items} if build[1] else set()
        return len(lengths) > 1 and len({tuple(item.shape[1:]) for item in items}) == 1
    if build[0] not in ("dict", "list"):
        return build[0] == "plain"
    inside = [leaf for _, leaf in _members(looked_at[0])]
    with_tensors = any(_is_tensor(leaf) for leaf in _first_leaves(looked_at[0]))
    if with_tensors and any(is_number(leaf) or isinstance(leaf, str) for leaf in inside):
        return True
    # Dicts of tensors: of several loaders, if all agree on their number of samples, else samples.
    counts = {count for item in looked_at for leaf in leaves(item) if (count := _count(leaf)) is not None}
    return build[0] == "dict" and len({count for count, _ in counts}) > 1


def _build(value: Any) -> tuple[Any, ...]:
    """Return what two samples have in common: the kinds of their members, by name or in order."""
    if _inside(value) is not None:
        return "dict", *((name, _build(item)[0]) for name, item in _members(value))
    if _is_list(value):
        return "list", *(_build(item)[0] for item in value[:LOOKED_AT]), len(value)
    if isinstance(value, PackedSequence):
        return ("packed",)
    if _is_tensor(value):
        return "tensor", value.ndim
    return ("plain",) if _is_plain(value) else ("unknown",)


def _members(value: Any) -> list[tuple[str, Any]]:
    inside = _inside(value)
    return [(str(index), item) for index, item in enumerate(value)] if inside is None else inside


def _has_inner_dicts(batch: Any) -> bool:
    """Say whether a list inside of a batch holds dicts: targets, one for each of the images beside them."""
    members = _members(batch) if _is_list(batch) or _inside(batch) is not None else []
    lists = [item for _, item in members if _is_list(item) and len(item)]
    return any(isinstance(item, Mapping) for each in lists for item in each[:1])


def _first_leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in a value, and of long lists in their first items alone."""
    inside = _inside(value)
    if inside is None and not _is_list(value):
        yield value
        return
    for item in value[:LOOKED_AT] if inside is None else [item for _, item in inside]:
        yield from _first_leaves(item)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, PackedSequence)) or _is_tensordict(value)


def _is_tensordict(value: Any) -> bool:
    return type(value).__module__.startswith("tensordict") and hasattr(value, "batch_size")


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN, type)) or inspect.isroutine(value)


def _is_list(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and not isinstance(value, torch.Size)
    return is_list and not hasattr(value, "_fields")


def _count(value: Any) -> tuple[int, bool] | None:
    """Return the samples of a tensor, and whether it may be one for all; None for what has none.

    Raises:
        UnclearError: It is a tensor that cannot be cut.
    """
    if _is_tensordict(value):
        return (int(value.batch_size[0]), False) if len(value.batch_size) else None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]), False
    if isinstance(value, np.ndarray):
        return (len(value), False) if value.ndim else None
    if not isinstance(value, Tensor) or not value.dim():
        return None
    if value.layout not in (torch.strided, torch.jagged):
        text = f"a tensor of layout {value.layout}, which only a splitter could cut"
        raise UnclearError(text)
    count = int(value.size(0))
    tokens = not (value.is_floating_point() or value.dtype == torch.bool)
    return count, count == 1 and value.dim() > 1 and not tokens


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a dict, a dataclass or a named tuple; None for anything else."""
    if isinstance(value, (Tensor, str, int, float, PackedSequence, type)) or _is_tensordict(value):
        return None
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        return [(str(key), item) for key, item in items.items()]
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in fields if hasattr(value, name)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named: Any = value
        return list(zip(named._fields, named, strict=True))
    return None


def _like(value: Sequence[Any], items: Sequence[Any]) -> Sequence[Any]:
    return tuple(items) if isinstance(value, tuple) else list(items)


def _with_parts(value: Any, parts: Sequence[Any]) -> Any:
    """Return a copy of a container with other parts."""
    if isinstance(value, tuple):
        named: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
        return named._make(parts)
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value
        twin: Any = copy.copy(value) if hasattr(value, "__setitem__") else {}
        for key, part in zip(mapping, parts, strict=True):
            twin[key] = part
        return twin
    twin = copy.copy(value)
    for (name, _), part in zip(_inside(value) or (), parts, strict=True):
        object.__setattr__(twin, name, part)  # it may be frozen
    return twin


def _cut_tensor(value: Any, first: int, last: int, offsets: dict[int, Tensor]) -> Any:
    if isinstance(value, PackedSequence):
        return _cut_packed(value, first, last)
    if isinstance(value, Tensor) and value.is_nested:
        return _cut_nested(value, first, last, offsets)
    return value[first:last]


def _cut_nested(value: Tensor, first: int, last: int, offsets: dict[int, Tensor]) -> Tensor:
    """Cut a nested tensor; jagged ones that share their offsets share the new ones too."""
    jagged: Any = value
    if value.layout != torch.jagged or jagged.lengths() is not None:
        return torch.nested.as_nested_tensor(list(value.unbind()[first:last]), layout=value.layout)
    old = jagged.offsets()
    begin, end = int(old[first]), int(old[last])
    new = offsets.setdefault(id(old), old[first : last + 1] - begin)
    return torch.nested.nested_tensor_from_jagged(jagged.values()[begin:end], new)


def _cut_packed(value: PackedSequence, first: int, last: int) -> PackedSequence:
    """Cut a packed sequence in the order that its sequences were given in, and pack them as it was packed."""
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    kept = lengths[first:last]
    rows = padded[first:last, : int(kept.max())]
    return pack_padded_sequence(rows, kept, batch_first=True, enforce_sorted=value.sorted_indices is None)


def is_number(value: Any) -> bool:
    """Say whether a value is a number, as Python's or as a tensor; a truth value is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number or (isinstance(value, Tensor) and not value.dim())
