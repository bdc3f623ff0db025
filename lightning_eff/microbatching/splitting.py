"""Split a batch into micro-batches along its samples.

A batch is tensors or arrays in dicts and other mappings, lists, tuples, named tuples and dataclasses. The
samples of a tensor lie along its first dimension, those of a list without tensors (texts, labels) are its
items, and all of them must have the same number. Numbers, strings and 0-d tensors go to every micro-batch
unchanged, and so does what `keep` names (class weights, positions), whatever its shape and type.

Anything else is rejected, since any split would be a guess: samples of different shapes in a list, objects,
texts without a tensor beside them. Pass a `splitter`, also to cut packed sequences and nested and sparse
tensors, whose samples are only counted.

Slices are views; containers are new in each micro-batch.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_eff.core.errors import ConfigError, list_remedy

Splitter = Callable[[Any, int], Sequence[Any]]
"""Splits a batch into micro-batches of a number of samples: `splitter(batch, micro_batch_size)`."""
SHARED = (
    *(str, bytes, int, float, complex, bool, type(None), type, Enum, PurePath, date, timedelta, range),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)
"""Types of values that belong to no sample."""
MAX_INSPECTED = 16
"""Items of a list that are inspected for tensors: a list may hold a million numbers."""


@dataclasses.dataclass(frozen=True)
class MicroBatchPart:
    """A micro-batch."""

    batch: Any  # the argument of `training_step`
    num_samples: int | None  # None if unknown


class AmbiguousBatchError(Exception):
    """The samples of a batch cannot be counted or cut; `odd` names what differs from the first of them."""

    def __init__(self, text: str, odd: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.odd = odd


def num_samples(batch: Any, keep: Sequence[str] = ()) -> int | None:
    """Return the number of samples of a batch; None if its tensors disagree, or it has none.

    Args:
        batch: Of any kind.
        keep: As in `split`: what it names is not counted.

    Raises:
        ConfigError: The batch lacks a name in `keep`.

    Example:
        >>> num_samples({"tokens": torch.zeros(4, 7), "texts": ["a", "b", "c", "d"], "task": "copy"})
        4
        >>> num_samples((torch.zeros(5, 2), torch.zeros(3)))
    """
    try:
        return _count(batch, keep)[0]
    except AmbiguousBatchError:
        return None


def split(
    batch: Any, micro_batch_size: int, splitter: Splitter | None = None, keep: Sequence[str] = ()
) -> list[MicroBatchPart]:
    """Split a batch into micro-batches of one size; the last one has the remainder.

    Args:
        batch: Tensors in containers; samples lie along the first dimension.
        micro_batch_size: Samples of a micro-batch, at least 1.
        splitter: Used in place of the built-in rule.
        keep: What every micro-batch gets whole: names at any depth, or paths from the outside, of names and
            positions with dots between them (`1`, `targets.weights`).

    Raises:
        ConfigError: The batch is ambiguous or lacks a name in `keep`, or the splitter returned nothing.

    Example:
        >>> [part.batch["x"].tolist() for part in split({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
        >>> [x.tolist() for x in split([torch.arange(3), torch.ones(3)], 2, keep=["1"])[1].batch]
        [[2], [1.0, 1.0, 1.0]]
    """
    if splitter is not None:
        batches: Any = splitter(batch, micro_batch_size)
        if not isinstance(batches, Sequence) or not batches:
            allowed = "a function that returns a list of at least one micro-batch"
            raise ConfigError(key="splitter", value=batches, allowed=allowed)
        return [MicroBatchPart(micro_batch, num_samples(micro_batch)) for micro_batch in batches]
    try:
        total, is_cut = _count(batch, keep)
        ends = [(first, min(total, first + micro_batch_size)) for first in range(0, total, micro_batch_size)]
        return [MicroBatchPart(_cut(batch, is_cut, first, last, total), last - first) for first, last in ends]
    except AmbiguousBatchError as error:
        allowed = f"a function of batch and size that returns a list, since the batch is ambiguous: {error}"
        keep_them = list_remedy("callbacks.micro_batch", "MicroBatch", "keep", error.odd)
        remedies = [*([keep_them] if error.odd else []), "MicroBatch(splitter=lambda batch, size: [...])"]
        raise ConfigError(key="splitter", value=None, allowed=allowed, remedies=remedies) from None


class _Keep:
    """What is not cut, by names and paths as in `split`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._wanted = {_path_parts(name): name for name in names}

    def name_of(self, path: str) -> tuple[str, ...]:
        """Return the name by which a value is kept, or a container around it; empty for what is not kept."""
        parts = _path_parts(path) if self._wanted else ()
        for end in range(1, len(parts) + 1):
            # A single name is found at any depth; a position only from the outside.
            path_so_far, single = parts[:end], parts[end - 1 : end]
            if path_so_far in self._wanted:
                return path_so_far
            if single in self._wanted and not parts[end - 1].isdigit():
                return single
        return ()

    def check(self, batch: Any) -> None:
        """Raise a ConfigError where the batch lacks a name."""
        paths = [path for path, _ in leaves(batch)] if self._wanted else []
        found = {self.name_of(path) for path in paths}
        missing = [name for parts, name in self._wanted.items() if parts not in found]
        if missing:
            names = [".".join(_path_parts(path)) for path in paths if path]
            has = (
                f"has: {', '.join(names[:24])}" if names else f"is one {type(batch).__name__}, without names"
            )
            raise ConfigError(
                key="keep", value=missing[0], allowed=f"a name or path in the batch, which {has}"
            )


def _path_parts(path: str) -> tuple[str, ...]:
    """Return the names and positions in a path, which may be written with dots or brackets."""
    return tuple(re.findall(r"[^.\[\]]+", path))


def leaves(value: Any, path: str = "", keep: _Keep | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the values in a batch's containers with their paths; a list without tensors is one value.

    Raises:
        AmbiguousBatchError: `keep` is given, and a list that is not kept has samples with tensors.
    """
    items = None if _is_list_of_values(value) else _items(value)
    if items is None:
        yield path, value
        return
    is_cut = keep is not None and not keep.name_of(path)
    if is_cut and _has_samples_with_tensors(value, is_outermost=not path):
        raise AmbiguousBatchError(
            f"batch{path} is a list of samples with tensors, which only a splitter can cut"
        )
    for name, item in items.items():
        yield from leaves(item, path + name, keep)


def _with_leaves(value: Any, new: Iterator[Any]) -> Any:
    """Return a batch in new containers, with other values in the order of `leaves`."""
    items = None if _is_list_of_values(value) else _items(value)
    return (
        next(new) if items is None else _rebuild(value, [_with_leaves(each, new) for each in items.values()])
    )


def _count(batch: Any, keep: Sequence[str]) -> tuple[int, list[bool]]:
    """Return the number of samples, and of each leaf whether it has samples.

    Raises:
        AmbiguousBatchError: The leaves disagree, or one has an unknown type.
        ConfigError: The batch lacks a name in `keep`.
    """
    kept, found, is_cut = _Keep(keep), list[tuple[str, int, bool]](), list[bool]()
    kept.check(batch)
    for path, value in leaves(batch, keep=kept):
        is_list = type(value) in (list, tuple)
        count = None
        if kept.name_of(path):
            pass
        elif is_list or _is_array(value):
            count = len(value) if is_list else _num_rows(value)
        elif not isinstance(value, SHARED) and not inspect.isroutine(value):
            raise AmbiguousBatchError(
                f"batch{path} has type {type(value).__name__}, which only a splitter could cut"
            )
        is_cut.append(count is not None)
        if count is not None:
            found.append((path, count, is_list))
    counts = {count for _, count, _ in found}
    # Lists alone are ambiguous: samples or, as DataLoader collates pairs of texts, fields.
    if len(counts) != 1 or all(is_list for _, _, is_list in found):
        shown = [f"batch{path} has {count}" for path, count, _ in found]
        odd = [".".join(_path_parts(path)) for path, count, _ in found if count != found[0][1]]
        raise AmbiguousBatchError(", ".join(shown[:6]) or "no tensor and no list", odd[:3])
    if counts == {0}:
        raise AmbiguousBatchError("no sample")
    return counts.pop(), is_cut


def _cut(batch: Any, is_cut: Sequence[bool], first: int, last: int, total: int) -> Any:
    """Return the samples from `first` up to `last` of `total`, in new containers."""
    values = [value for _, value in leaves(batch)]
    for index, value in enumerate(values) if last - first < total else ():
        if not is_cut[index]:
            continue
        if isinstance(value, PackedSequence) or (
            isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided)
        ):
            raise AmbiguousBatchError(
                "it has a packed sequence, or a nested or sparse tensor, which only a splitter can cut"
            )
        values[index] = value[first:last]
    return _with_leaves(batch, iter(values))


def _num_rows(value: Any) -> int | None:
    """Return the length of an array's first dimension; None for a scalar."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return (int(value.size(0)) if isinstance(value, Tensor) else len(value)) if value.ndim else None


def _is_array(value: Any) -> bool:
    """Return whether a value may have samples: a tensor, an array, a TensorDict, a packed sequence."""
    return isinstance(value, PackedSequence) or (hasattr(value, "ndim") and hasattr(value, "__getitem__"))


def _is_list_of_values(value: Any) -> bool:
    """Return whether a value is a list without tensors, such as texts."""
    return type(value) in (list, tuple) and len(value) > 0 and not _has_arrays(value)


def _has_arrays(value: Any) -> bool:
    """Return whether an array is among the first values of a container."""
    items = _items(value, MAX_INSPECTED)
    return _is_array(value) if items is None else any(map(_has_arrays, items.values()))


def _has_samples_with_tensors(value: Any, *, is_outermost: bool) -> bool:
    """Return whether a list holds samples with tensors in them, whose dimensions are not the batch's.

    They show by a number or a text beside a tensor (an image and its label), or as dicts inside the batch
    (the targets of each image); an outermost list of dicts may be the batches of several loaders.
    """
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    inner = _items(first)
    if inner is None:
        return False
    has_scalar = any(
        isinstance(x, (int, float, str)) or (_is_array(x) and _num_rows(x) is None) for x in inner.values()
    )
    return (isinstance(first, Mapping) and not is_outermost) or (isinstance(value, list) and has_scalar)


def _items(value: Any, max_items: int | None = None) -> dict[str, Any] | None:
    """Return the items of a container by how they are written behind its name; None for any other value."""
    if isinstance(value, SHARED) or _is_array(value):
        return None
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value
        return {f".{key}": item for key, item in mapping.items()}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {f".{name}": getattr(value, name) for name in names}
    if not isinstance(value, (list, tuple)):
        return None
    items: Sequence[Any] = value[:max_items]
    fields: Sequence[str] | None = getattr(value, "_fields", None)
    names = [f".{name}" for name in fields] if fields else [f"[{index}]" for index in range(len(items))]
    return dict(zip(names, items, strict=False))


def _rebuild(value: Any, items: Sequence[Any]) -> Any:
    """Return a copy of a container with other items."""
    if isinstance(value, tuple):
        named: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
        return named._make(items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return list(items)
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value
        result: Any = copy.copy(mapping) if hasattr(mapping, "__setitem__") else {}
        for key, item in zip(mapping, items, strict=True):
            result[key] = item
        return result
    result = copy.copy(value)
    for name, item in zip(_items(value) or (), items, strict=True):
        object.__setattr__(result, name[1:], item)  # the dataclass may be frozen
    return result
