"""Cutting a batch into micro-batches along its samples, and putting together again what they gave.

A batch is tensors in dicts, lists, tuples, named tuples, dataclasses, and what behaves like a dict. Samples
lie along the first dimension of every tensor; a nested or packed tensor and a list whose items differ in
length (token rows, images, boxes) have one sample an item. What has no samples (numbers, words, tensors
without a dimension, masks [1, ...] where others have more) goes to every micro-batch as it is. A batch
whose parts do not agree on the number of samples is refused, since any cut would be a guess.

Slices are views: nothing is copied, except what is nested or packed. Containers are new in each micro-batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_eff.errors import ConfigError

Splitter = Callable[[Any, int], Sequence[Any]]
"""Cuts a batch into micro-batches of a number of samples: `splitter(batch, micro_batch_size)`."""

PLAIN = (str, bytes, int, float, complex, bool, type(None), Enum, PurePath, torch.dtype, torch.device)
"""Values that belong to no sample."""
DEPTHS = (99, 1, 0)
"""Down to which depth lists are containers, and below it lists of samples; the first that fits counts."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A micro-batch.

    Args:
        batch: What `training_step` gets.
        num_samples: How many samples of the whole it has; None if nobody can tell.
    """

    batch: Any
    num_samples: int | None


class _UnclearError(Exception):
    """The parts of a batch do not agree, or one of them is nothing known."""


def num_samples(batch: Any) -> int | None:
    """Return the number of samples of a batch; None if it has none or its parts do not agree.

    Example:
        >>> num_samples({"tokens": torch.zeros(4, 7), "mask": torch.zeros(1, 7), "task": "copy"})
        4
        >>> num_samples([torch.zeros(5), torch.zeros(3)]), num_samples((torch.zeros(5, 2), torch.zeros(3)))
        (2, 2)
    """
    try:
        return _reading(batch)[0]
    except _UnclearError:
        return None


def split(batch: Any, micro_batch_size: int, splitter: Splitter | None = None) -> list[Part]:
    """Cut a batch into micro-batches of a size; the last one has what is left.

    Args:
        batch: Tensors in containers; samples lie along the first dimension.
        micro_batch_size: Samples of a micro-batch, at least 1.
        splitter: Cuts it instead.

    Raises:
        ConfigError: It has no samples that could be told, or the splitter returned nothing.

    Example:
        >>> [part.batch["x"].tolist() for part in split({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if splitter is not None:
        parts = [Part(part, num_samples(part)) for part in splitter(batch, micro_batch_size)]
        if not parts:
            raise ConfigError(key="splitter", value=parts, allowed="at least one micro-batch of each batch")
        return parts
    try:
        total, depth = _reading(batch)
    except _UnclearError as error:
        raise ConfigError(
            key="batch",
            value=str(error),
            allowed="the same number of samples along the first dimension of every part",
            remedies=["splitter=..., a function of the batch and the micro-batch size"],
        ) from None
    ends = [(first, min(total, first + micro_batch_size)) for first in range(0, total, micro_batch_size)]
    return [Part(_cut(batch, first, last, total, depth), last - first) for first, last in ends]


def _reading(batch: Any) -> tuple[int, int]:
    """Return the number of samples, and down to which depth lists are containers."""
    first_error: _UnclearError | None = None
    for depth in DEPTHS:
        try:
            sizes = dict(_sizes(batch, "batch", depth))
            return _agreed(sizes), depth
        except _UnclearError as error:
            first_error = first_error or error
    raise first_error or _UnclearError


def _agreed(sizes: Mapping[str, tuple[int, bool]]) -> int:
    """Return the number of samples that the parts of a batch have; those for all samples may have one."""
    own = {count for count, for_all in sizes.values() if not for_all}
    counts = own or {count for count, _ in sizes.values()}
    if len(counts) != 1:
        shown = ", ".join(f"{path} has {count}" for path, (count, _) in list(sizes.items())[:6])
        raise _UnclearError(shown or "no tensor and no list")
    (count,) = counts
    if count == 0:
        text = "no sample"
        raise _UnclearError(text)
    return count


def _sizes(value: Any, path: str, depth: int) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield the number of samples of each part that has some, by its path, and whether it is for all."""
    inside = _parts_of(value, depth)
    if inside is not None:
        for name, item in inside:
            yield from _sizes(item, f"{path}{name}", depth - 1)
    elif isinstance(value, PackedSequence):
        yield path, (len(pad_packed_sequence(value, batch_first=True)[1]), False)
    elif _is_list(value) or (_is_tensor(value) and len(value.shape)):
        yield path, (len(value), _is_tensor(value) and len(value.shape) > 1 and len(value) == 1)
    elif not (isinstance(value, PLAIN) or callable(value) or _is_tensor(value)):
        text = f"{path} is of type {type(value).__name__}, which only a splitter could cut"
        raise _UnclearError(text)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _parts_of(value: Any, depth: int) -> list[tuple[str, Any]] | None:
    """Return the parts of a container by their place in it; None for what has samples or nothing inside."""
    if _is_list(value):
        if value and not _is_container(value, depth):
            return None
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    inside = _inside(value)
    return None if inside is None else [(f".{name}", item) for name, item in inside]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "__array_interface__") and hasattr(value, "shape"))


def _is_container(items: Sequence[Any], depth: int) -> bool:
    """Say whether a list holds parts of a batch, each with all its samples; else each item is a sample."""
    if depth <= 0 or not items or all(isinstance(item, PLAIN) for item in items):
        return False
    leaves = [leaf for item in items for leaf in _leaves(item)]
    if not any(_is_tensor(leaf) or isinstance(leaf, PackedSequence) for leaf in leaves):
        return any(_inside(item) is not None for item in items) and not _are_alike(items)
    # Items that are alike and hold numbers, each with a label say, are samples.
    return not (_are_alike(items) and any(_is_number(leaf) for leaf in leaves))


def _are_alike(items: Sequence[Any]) -> bool:
    shapes = {_shape(item) for item in items}
    return len(items) > 1 and len(shapes) == 1 and shapes != {None}


def _shape(item: Any) -> Any:
    """Return what two samples have in common: their class and their keys."""
    if isinstance(item, (list, tuple)):
        return type(item), len(item)  # pyright: ignore[reportUnknownArgumentType]
    inside = _inside(item)
    return (type(item), *(name for name, _ in inside)) if inside is not None else None


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float)) or (_is_tensor(leaf) and not len(leaf.shape))


def _leaves(value: Any) -> Iterator[Any]:
    inside = _inside(value)
    if isinstance(value, PackedSequence) or (inside is None and not isinstance(value, (list, tuple))):
        yield value
        return
    items: Sequence[Any] = value if inside is None else [item for _, item in inside]
    for item in items:
        yield from _leaves(item)


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a dict, a dataclass or a named tuple; None for anything else."""
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        return [(str(key), item) for key, item in items.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, PackedSequence):
        named: Any = value
        return list(zip(named._fields, named, strict=True))
    return None


def _cut(value: Any, first: int, last: int, total: int, depth: int) -> Any:
    """Return the samples from `first` up to `last`, in new containers."""
    if _is_tensor(value):
        return _cut_tensor(value, first, last, total)
    if isinstance(value, PackedSequence):
        return _cut_packed(value, first, last)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items: Sequence[Any] = value
        if _is_container(items, depth):
            cut = [_cut(item, first, last, total, depth - 1) for item in items]
        else:
            cut = list(items[first:last] if len(items) == total else items)
        return tuple(cut) if isinstance(value, tuple) else cut
    inside = _inside(value)
    if inside is None:
        return value
    return _with_parts(value, [_cut(item, first, last, total, depth - 1) for _, item in inside])


def _with_parts(value: Any, parts: Sequence[Any]) -> Any:
    """Return a copy of a container with other parts."""
    if isinstance(value, tuple):
        return type(value)(*parts)  # pyright: ignore[reportUnknownVariableType]
    twin = copy.copy(value)
    if isinstance(value, Mapping):
        twin.update(zip(value, parts, strict=True))
    else:
        for field, part in zip(dataclasses.fields(value), parts, strict=True):
            object.__setattr__(twin, field.name, part)  # it may be frozen
    return twin


def _cut_tensor(value: Any, first: int, last: int, total: int) -> Any:
    if not len(value.shape) or len(value) != total:
        return value
    if isinstance(value, Tensor) and value.is_nested:
        rows = list(value.unbind()[first:last])
        return torch.nested.as_nested_tensor(rows, layout=value.layout)
    return value[first:last]


def _cut_packed(value: PackedSequence, first: int, last: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    kept = lengths[first:last]
    rows = padded[first:last, : int(kept.max())]
    return pack_padded_sequence(rows, kept, batch_first=True, enforce_sorted=value.sorted_indices is None)


def join(outputs: Sequence[Mapping[str, Any]], parts: Sequence[Part]) -> dict[str, Any]:
    """Put what `training_step` returned beside the loss together, as it would be for the whole batch.

    Tensors and lists with a row a sample are joined, other numbers are averaged by samples (`weight` is
    summed); of anything else it is the last micro-batch's.

    Example:
        >>> parts = [Part(None, 3), Part(None, 1)]
        >>> outputs = [{"top": torch.tensor(1.0), "ids": [1, 2, 3]}, {"top": torch.tensor(5.0), "ids": [4]}]
        >>> join(outputs, parts)
        {'top': tensor(2.), 'ids': [1, 2, 3, 4]}
    """
    if len(outputs) == 1:
        return dict(outputs[0])
    sizes = [part.num_samples for part in parts]
    return {key: _joined(key, [output.get(key) for output in outputs], sizes) for key in outputs[-1]}


def _joined(key: str, values: list[Any], sizes: list[int | None]) -> Any:
    if key == "weight":
        return sum(values[1:], start=values[0])
    rows = [len(value) if _has_rows(value) else None for value in values]
    if None not in rows and rows == sizes:
        is_list = isinstance(values[0], list)
        return [item for value in values for item in value] if is_list else torch.cat(values)
    if all(_is_number(value) and not isinstance(value, bool) for value in values):
        return mean(values, sizes)
    return values[-1]


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def mean(values: Sequence[Any], shares: Sequence[float | None]) -> Any:
    """Return the mean of numbers by the samples or the weight of each; a plain mean where nobody knows."""
    known = [1.0 if share is None else float(share) for share in shares]
    if len(values) == 1 or not any(known):
        return values[0]
    total = sum(known)
    # A mean over nothing is not a number, and neither is it times 0.
    return sum(value * (share / total) for value, share in zip(values, known, strict=True) if share)
