"""Split a batch into micro-batches along its samples.

A batch may consist of nested containers: the containers of torch's pytree (dicts, lists, tuples, named
tuples), other mappings (a tokenizer's encodings) and dataclasses. How a value in the containers is split
depends on its type:

- Tensors and arrays are split along their first dimension, and lists of texts or numbers by item. All these
  values must have the same number of samples.
- Numbers, texts, 0-d tensors and the values named in `keep` (class weights, positions, a graph) are passed to
  every micro-batch unsplit.
- If there is no `splitter`, values of other types are rejected, since any split would be a guess.

Slices of tensors are views of the batch; each micro-batch has new containers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import KeyPath, MappingKey, SequenceKey, tree_flatten_with_path, tree_iter

from lightning_eff.core.errors import ConfigError, list_remedy

Splitter = Callable[[Any, int], Sequence[Any]]
"""Function that splits a batch into micro-batches: `splitter(batch, micro_batch_size)`."""
PLAIN = (str, bytes, int, float, complex, type(None), torch.Size)
"""Types without tensors. A single value applies to all samples; a list has one value per sample."""
MAX_INSPECTED = 256
"""Maximum number of items of a list that are inspected for tensors; a list may have a million items."""
Values = list[tuple[KeyPath, Any]]
"""The values in a batch's containers, with their paths."""
Build = Callable[[Iterator[Any]], Any]
"""Function that rebuilds a batch in new containers from new values, in the order of `Values`."""


@dataclasses.dataclass(frozen=True)
class MicroBatchPart:
    """A micro-batch and its number of samples."""

    batch: Any  # the argument of `training_step`
    num_samples: int | None  # None if unknown


class AmbiguousBatchError(Exception):
    """The samples of a batch cannot be counted or split; `odd` names values whose sample count differs."""

    def __init__(self, text: str, odd: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.odd = odd


def flatten(batch: Any, path: KeyPath = ()) -> tuple[Values, Build]:
    """Flatten a batch into its values with their paths; a list of texts or numbers is one value."""
    keyed, spec = tree_flatten_with_path(batch, is_leaf=_is_value)
    values: Values = []
    builders: list[Build] = []
    for keys, value in keyed:
        here = (*path, *keys)
        # torch's pytree treats other containers, such as dataclasses, as leaves, so flatten them here.
        fields = _fields(value)
        # The builder of a leaf is `next`, which takes one new value from the iterator.
        inner, build = ([(here, value)], next) if fields is None else flatten(fields, here)
        values += inner
        builders.append(build if fields is None else functools.partial(_refilled, value, build))
    return values, lambda new: spec.unflatten([build(new) for build in builders])


def _fields(value: Any) -> dict[Any, Any] | None:
    """Return the items of a mapping or dataclass, which is a leaf to torch's pytree; None for other types."""
    if isinstance(value, MutableMapping):
        mapping: MutableMapping[Any, Any] = value
        return dict(mapping)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _refilled(container: Any, build: Build, new: Iterator[Any]) -> Any:
    """Return a copy of a mapping or dataclass with new values."""
    result: Any = copy.copy(container)
    for key, item in build(new).items():
        if isinstance(result, MutableMapping):
            result[key] = item
        else:
            object.__setattr__(result, key, item)  # the dataclass may be frozen
    return result


def num_samples(batch: Any, keep: Sequence[str] = ()) -> int | None:
    """Count the samples of a batch; return None if it has no tensors, or if its values disagree.

    Args:
        batch: A batch of any type.
        keep: Names of values to ignore, as in `split`.

    Raises:
        ConfigError: A name in `keep` is not in the batch.

    Example:
        >>> num_samples({"tokens": torch.zeros(4, 7), "texts": ["a", "b", "c", "d"], "task": "copy"})
        4
        >>> num_samples((torch.zeros(5, 2), torch.zeros(3)))
    """
    try:
        return _count(flatten(batch)[0], keep)[0]
    except AmbiguousBatchError:
        return None


def split(
    batch: Any,
    micro_batch_size: int | None,
    splitter: Splitter | None = None,
    keep: Sequence[str] = (),
    *,
    owner: tuple[str, str] = ("callbacks.micro_batch", "MicroBatch"),
) -> list[MicroBatchPart]:
    """Split a batch into micro-batches of one size; the last micro-batch has the remaining samples.

    Args:
        batch: Tensors in containers; samples lie along the first dimension.
        micro_batch_size: Number of samples per micro-batch, at least 1; None does not split batches.
        splitter: Function that replaces the built-in rules.
        keep: Values that are passed to every micro-batch unsplit: names at any depth, or paths from the root
            of the batch. A path joins names and positions with dots (`1`, `targets.weights`).
        owner: For error messages, the override prefix and the class name of the technique that has these
            settings.

    Raises:
        ConfigError: The batch is ambiguous or lacks a name in `keep`, or the splitter returned nothing.

    Example:
        >>> [part.batch["x"].tolist() for part in split({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
        >>> [x.tolist() for x in split([torch.arange(3), torch.ones(3)], 2, keep=["1"])[1].batch]
        [[2], [1.0, 1.0, 1.0]]
    """
    if splitter is not None and micro_batch_size is not None:
        batches: Any = splitter(batch, micro_batch_size)
        if not isinstance(batches, Sequence) or not batches:
            allowed = "a function that returns a list of at least one micro-batch"
            raise ConfigError(key="splitter", value=batches, allowed=allowed)
        return [MicroBatchPart(micro_batch, num_samples(micro_batch)) for micro_batch in batches]
    try:
        values, build = flatten(batch)
        # `is_cut` holds the paths of the values with one row per sample.
        total, is_cut = _count(values, keep)
        if micro_batch_size is None or micro_batch_size >= total:
            # Return new containers even for a full batch, because `training_step` may change its containers,
            # and a retry needs the original batch.
            return [MicroBatchPart(build(value for _, value in values), total)]
        firsts = range(0, total, micro_batch_size)
        bounds = [(first, min(total, first + micro_batch_size)) for first in firsts]
        return [MicroBatchPart(build(_slices(values, is_cut, *each)), each[1] - each[0]) for each in bounds]
    except AmbiguousBatchError as error:
        if micro_batch_size is None:
            return [MicroBatchPart(batch, None)]
        allowed = f"a function of batch and size that returns a list, since the batch is ambiguous: {error}"
        keep_them = list_remedy(*owner, "keep", error.odd)
        remedies = [*([keep_them] if error.odd else []), f"{owner[1]}(splitter=lambda batch, size: [...])"]
        raise ConfigError(key="splitter", value=None, allowed=allowed, remedies=remedies) from None


def mean(values: Sequence[Any], weights: Sequence[float | None]) -> Any:
    """Return the weighted mean of the micro-batches' values; a weight of None counts as 1."""
    known = [1.0 if weight is None else float(weight) for weight in weights]
    if len(values) == 1 or not any(known):
        return values[0]
    total = sum(known)
    # Leave out values of weight 0, because a mean over no samples is NaN, and NaN * 0 is NaN.
    return sum(value * (weight / total) for value, weight in zip(values, known, strict=True) if weight)


def _count(values: Values, keep: Sequence[str]) -> tuple[int, Collection[KeyPath]]:
    """Find the number of samples, and the paths of the values to split.

    Raises:
        AmbiguousBatchError: The values have different numbers of samples, or a value has an unknown type.
        ConfigError: A name in `keep` is not in the batch.
    """
    _check_names(keep, values)
    counts: dict[KeyPath, int] = {}
    has_array = False
    for path, value in values:
        if any(_is_kept(name, _dotted(path)) for name in keep):
            continue
        if _is_in_list_of_samples(path, value):
            raise AmbiguousBatchError(
                f"{_shown(path)} is in a list of samples with tensors, which only a splitter can cut"
            )
        if _is_array(value):
            has_array |= value.ndim > 0
            if value.ndim:
                counts[path] = int(value.size(0)) if isinstance(value, Tensor) else len(value)
        elif type(value) in (list, tuple):
            counts[path] = len(value)
        elif not isinstance(value, PLAIN):
            kind = type(value).__name__
            raise AmbiguousBatchError(f"{_shown(path)} has type {kind}, which only a splitter can cut")
    # Lists without tensors are ambiguous: their items may be samples, or fields (DataLoader collates pairs of
    # texts into a list of two fields).
    if not has_array or len({*counts.values()}) != 1:
        shown = [f"{_shown(path)} has {count}" for path, count in counts.items()]
        odd = [_dotted(path) for path, count in counts.items() if count != next(iter(counts.values()))]
        raise AmbiguousBatchError(", ".join(shown[:6]) or "no tensor and no list", odd[:3])
    total = next(iter(counts.values()))
    if not total:
        raise AmbiguousBatchError("no sample")
    return total, counts


def _slices(values: Values, is_cut: Collection[KeyPath], first: int, last: int) -> Iterator[Any]:
    for path, value in values:
        if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
            raise AmbiguousBatchError(
                f"{_shown(path)} is a nested or sparse tensor, which only a splitter can cut"
            )
        yield value[first:last] if path in is_cut else value


def _is_array(value: Any) -> bool:
    """Return whether a value may hold samples, like a tensor, a NumPy array or a TensorDict."""
    return isinstance(value, Tensor) or (hasattr(value, "ndim") and hasattr(value, "__getitem__"))


def _is_value(node: Any) -> bool:
    """Return whether torch's pytree should not descend into a node, such as a list of texts or numbers."""
    if type(node) in (list, tuple) and node:
        return all(isinstance(value, PLAIN) for value in itertools.islice(tree_iter(node), MAX_INSPECTED))
    # A packed sequence is a named tuple too, but none of its fields has one row per sample.
    return isinstance(node, (torch.Size, PackedSequence))


def _is_in_list_of_samples(path: KeyPath, value: Any) -> bool:
    """Return whether the path contains a list of single samples, which have no batch dimension.

    The first item of such a list is a dict (one image's targets), or has a number or text alongside tensors
    (an image and its label). In the outermost list, however, dicts may be the batches of several loaders. An
    inner list that begins with a tensor without dimensions has one label per sample.
    """
    is_label = _is_array(value) and not value.ndim
    is_scalar = isinstance(value, PLAIN) or is_label
    is_first = len(path) > 1 and path[-1] == SequenceKey(0)
    return (is_label and is_first) or any(
        outer == SequenceKey(0)
        and ((depth > 0 and isinstance(inner, MappingKey)) or (is_scalar and depth == len(path) - 2))
        for depth, (outer, inner) in enumerate(itertools.pairwise(path))
    )


def _is_kept(name: str, path: str) -> bool:
    """Return whether a path begins with `name` or contains it; a position matches only at the beginning."""
    return f"{path}.".startswith(f"{name}.") or (not name.isdigit() and name in path.split("."))


def _check_names(keep: Sequence[str], values: Values) -> None:
    paths = [_dotted(path) for path, _ in values] if keep else []
    missing = next((name for name in keep if not any(_is_kept(name, path) for path in paths)), None)
    if missing is not None:
        names = ", ".join(filter(None, paths[:24]))
        has = f"has: {names}" if names else "is one value, without names"
        raise ConfigError(key="keep", value=missing, allowed=f"a name or path in the batch, which {has}")


def _dotted(path: KeyPath) -> str:
    """Return a path in the notation of `keep`."""
    # Each of torch's key objects has a single field: a key, a position or a name.
    steps: Any = path
    return ".".join(str(getattr(step, dataclasses.fields(step)[0].name)) for step in steps)


def _shown(path: KeyPath) -> str:
    return f"batch.{_dotted(path)}" if path else "batch"
