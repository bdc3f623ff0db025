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

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.remedies import list_remedy

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


class _Whole:
    """Holds a value of a batch that goes to every micro-batch unchanged."""

    def __init__(self, value: Any) -> None:
        self.value = value


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
        return _count_samples(_with_whole(batch, keep))
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
        batch = _with_whole(batch, keep)
        total = _count_samples(batch)
        ends = [(first, min(total, first + micro_batch_size)) for first in range(0, total, micro_batch_size)]
        return [MicroBatchPart(_cut(batch, first, last, total), last - first) for first, last in ends]
    except AmbiguousBatchError as error:
        allowed = f"a function of batch and size that returns a list, since the batch is ambiguous: {error}"
        keep_them = list_remedy("callbacks.micro_batch", "MicroBatch", "keep", error.odd)
        remedies = [*([keep_them] if error.odd else []), "MicroBatch(splitter=lambda batch, size: [...])"]
        raise ConfigError(key="splitter", value=None, allowed=allowed, remedies=remedies) from None


def _with_whole(batch: Any, keep: Sequence[str]) -> Any:
    """Return a batch in which what `keep` names is held in a `_Whole`."""
    if not keep:
        return batch
    wanted = {_path_parts(name): name for name in keep}
    names: list[str] = []

    def wrap(value: Any, path: tuple[str, ...]) -> Any:
        # A single name is found at any depth; a position only from the outside.
        name = next((n for n in (path, path[-1:]) if n in wanted and (n == path or not n[0].isdigit())), None)
        if path:
            names.append(".".join(path))
        if name is not None:
            found.add(name)
            return _Whole(value)
        items = None if _is_list_of_values(value) else _items(value)
        if items is None:
            return value
        return _rebuild(value, [wrap(item, (*path, *_path_parts(key))) for key, item in items.items()])

    found: set[tuple[str, ...]] = set()
    wrapped = wrap(batch, ())
    missing = [name for parts, name in wanted.items() if parts not in found]
    if missing:
        has = f"has: {', '.join(names[:24])}" if names else f"is one {type(batch).__name__}, without names"
        raise ConfigError(key="keep", value=missing[0], allowed=f"a name or path in the batch, which {has}")
    return wrapped


def _path_parts(path: str) -> tuple[str, ...]:
    """Return the names and positions in a path, which may be written with dots or brackets."""
    return tuple(re.findall(r"[^.\[\]]+", path))


def _count_samples(batch: Any) -> int:
    """Return the number of samples of a batch, or raise where its tensors and lists disagree."""
    found = list(_counts(batch, "batch"))
    counts = {count for _, count, _ in found}
    # Lists alone are ambiguous: samples or, as DataLoader collates pairs of texts, fields.
    if len(counts) != 1 or all(is_list for _, _, is_list in found):
        shown = [f"{path} has {count}" for path, count, _ in found]
        odd = [".".join(_path_parts(path)[1:]) for path, count, _ in found if count != found[0][1]]
        raise AmbiguousBatchError(", ".join(shown[:6]) or "no tensor and no list", odd[:3])
    if counts == {0}:
        text = "no sample"
        raise AmbiguousBatchError(text)
    return counts.pop()


def leaves(value: Any, max_items: int | None = None) -> Iterator[Any]:
    """Yield the values in the containers of a batch; of lists at most the first `max_items`."""
    items = _items(value, max_items)
    if items is None:
        yield value
        return
    for item in items.values():
        yield from leaves(item, max_items)


def _counts(value: Any, path: str) -> Iterator[tuple[str, int, bool]]:
    """Yield path and number of what has samples, and whether it is a list."""
    if _is_list_of_values(value):
        yield path, len(value), True
    elif (items := _items(value)) is not None:
        if _has_samples_with_tensors(value, is_outermost=path == "batch"):
            text = f"{path} is a list of samples with tensors, which only a splitter can cut"
            raise AmbiguousBatchError(text)
        for name, item in items.items():
            yield from _counts(item, f"{path}{name}")
    elif _is_array(value):
        count = _num_rows(value)
        if count is not None:
            yield path, count, False
    elif not (isinstance(value, (*SHARED, _Whole)) or inspect.isroutine(value)):
        text = f"{path} has type {type(value).__name__}, which only a splitter could cut"
        raise AmbiguousBatchError(text)


def _cut(value: Any, first: int, last: int, total: int) -> Any:
    """Return the samples from `first` up to `last` of `total`, in new containers."""
    if isinstance(value, _Whole):
        return _in_new_containers(value.value)
    if _is_list_of_values(value):
        return type(value)(value[first:last])
    items = _items(value)
    if items is not None:
        return _rebuild(value, [_cut(item, first, last, total) for item in items.values()])
    if last - first == total or not _is_array(value) or _num_rows(value) is None:
        return value
    if isinstance(value, PackedSequence) or (
        isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided)
    ):
        text = "it has a packed sequence, or a nested or sparse tensor, which only a splitter can cut"
        raise AmbiguousBatchError(text)
    return value[first:last]


def _in_new_containers(value: Any) -> Any:
    items = None if _is_list_of_values(value) else _items(value)
    return value if items is None else _rebuild(value, [_in_new_containers(item) for item in items.values()])


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
    is_list = type(value) in (list, tuple) and len(value) > 0
    return is_list and not any(
        _is_array(leaf) or isinstance(leaf, _Whole) for leaf in leaves(value, MAX_INSPECTED)
    )


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
