"""Split a batch into micro-batches along its samples.

A batch is tensors in dicts, lists, tuples, named tuples, dataclasses and mappings. Samples lie along the
first dimension of tensors; nested and packed tensors have one sample per item. Values without samples
(numbers, strings, 0-d tensors, masks [1, ...]) go to every micro-batch unchanged. A list holds samples if its
items show it, and is a container of tensors otherwise:

- inside another container, a list of strings or numbers, of dicts (targets), or of tensors of one kind whose
  first dimensions do not fit the rest of the batch (images, token sequences);
- as the full batch, items of one structure with a number or a string in each (an image and its label), dicts
  whose tensors differ in length, token sequences of several lengths. A tuple is always a container then.

If that leaves two readings, or the tensors disagree on the number of samples, the batch is rejected, since
any split would be a guess: pass a `splitter`.

Slices are views: nothing is copied but nested and packed tensors. Containers are new in each micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching.batch_tree import (
    AmbiguousBatchError,
    count_samples,
    cut_tensor,
    fields_of,
    is_list,
    is_number,
    is_plain,
    is_tensor,
    items_of,
    leaves,
    rebuild,
)

MAX_INSPECTED = 16
"""Items of a long list that are inspected to find out what it holds."""
Splitter = Callable[[Any, int], Sequence[Any]]
"""Splits a batch into micro-batches of a number of samples: `splitter(batch, micro_batch_size)`."""


@dataclasses.dataclass(frozen=True)
class MicroBatchPart:
    """A micro-batch."""

    batch: Any  # the argument of `training_step`
    num_samples: int | None  # None if unknown


def num_samples(batch: Any) -> int | None:
    """Return the number of samples of a batch; None if it has none or its tensors disagree.

    Example:
        >>> import torch
        >>> num_samples({"tokens": torch.zeros(4, 7), "mask": torch.zeros(1, 7), "task": "copy"})
        4
        >>> num_samples([torch.zeros(5), torch.zeros(3)]), num_samples((torch.zeros(5, 2), torch.zeros(3)))
        (2, None)
    """
    try:
        return BatchLayout.read(batch).num_samples
    except AmbiguousBatchError:
        return None


def split(
    batch: Any, micro_batch_size: int, splitter: Splitter | None = None, layout: BatchLayout | None = None
) -> list[MicroBatchPart]:
    """Split a batch into micro-batches of one size; the last one has the remainder.

    Args:
        batch: Tensors in containers; samples lie along the first dimension.
        micro_batch_size: Samples of a micro-batch, at least 1.
        splitter: Used in place of the built-in rules.
        layout: The batch's layout, if it was read already.

    Raises:
        ConfigError: The batch is ambiguous, or the splitter returned nothing.

    Example:
        >>> import torch
        >>> [part.batch["x"].tolist() for part in split({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if splitter is not None:
        batches: Any = splitter(batch, micro_batch_size)
        if not isinstance(batches, Sequence) or not batches:
            allowed = "a function that returns a list of at least one micro-batch"
            raise ConfigError(key="splitter", value=batches, allowed=allowed)
        return [MicroBatchPart(micro_batch, num_samples(micro_batch)) for micro_batch in batches]
    try:
        layout = layout or BatchLayout.read(batch)
    except AmbiguousBatchError as error:
        allowed = f"a function of batch and size that returns a list, since the batch is ambiguous: {error}"
        raise ConfigError(key="splitter", value=None, allowed=allowed) from None
    total = layout.num_samples
    ends = [(first, min(total, first + micro_batch_size)) for first in range(0, total, micro_batch_size)]
    return [MicroBatchPart(layout.cut(batch, first, last), last - first) for first, last in ends]


class BatchLayout:
    """The number of samples of a batch, and which of its lists are lists of samples.

    Args:
        batch: Must outlive the layout, which keeps lists by identity.
        inner_samples: Read lists of tensors inside the outermost container as lists of samples.
    """

    def __init__(self, batch: Any, *, inner_samples: bool) -> None:
        # Dicts in an inner list are targets, one per image of the list next to it.
        has_targets = any(
            is_list(item) and len(item) and isinstance(item[0], Mapping) for item in items_of(batch) or ()
        )
        self._inner_samples = inner_samples or has_targets
        self._sample_lists: set[int] = set()
        self._tensors: dict[str, tuple[int, bool]] = {}
        self._lists: dict[str, int] = {}
        self._visit(batch, "batch", is_outermost=True)
        has_tensors = any(is_tensor(leaf) for leaf in leaves(batch, MAX_INSPECTED))
        if not has_tensors and len(self._lists) > 1 and all("[" in path for path in self._lists):
            text = "lists of strings or numbers in a list are either rows of samples or columns of fields"
            raise AmbiguousBatchError(text)
        # Masks [1, ...] count only where nothing else does, and lists of samples have to agree with tensors.
        own = {count for count, is_shared in self._tensors.values() if not is_shared}
        counts = own or {count for count, _ in self._tensors.values()} or set(self._lists.values())
        if len(counts) != 1 or not counts >= set(self._lists.values()):
            found = {path: count for path, (count, _) in self._tensors.items()} | self._lists
            shown = [f"{path} has {count}" for path, count in found.items()]
            raise AmbiguousBatchError(", ".join(shown[:6]) or "no tensor and no list")
        (self.num_samples,) = counts
        if self.num_samples == 0:
            text = "no sample"
            raise AmbiguousBatchError(text)

    @classmethod
    def read(cls, batch: Any) -> BatchLayout:
        """Return the first reading in which all tensors agree on the number of samples.

        Raises:
            AmbiguousBatchError: They agree in none.

        Example:
            >>> import torch
            >>> BatchLayout.read({"x": torch.zeros(4, 2), "boxes": [torch.zeros(1, 4)] * 4}).num_samples
            4
        """
        try:
            return cls(batch, inner_samples=False)
        except AmbiguousBatchError as error:
            try:
                return cls(batch, inner_samples=True)
            except AmbiguousBatchError:
                raise error from None

    def _visit(self, value: Any, path: str, *, is_outermost: bool = False) -> None:
        fields = fields_of(value)
        if fields is not None:
            for name, item in fields:
                self._visit(item, f"{path}.{name}")
        elif is_list(value):
            if is_outermost:
                are_samples = _are_samples(value)
            else:
                has_values = bool(value) and not any(is_tensor(leaf) for leaf in leaves(value, MAX_INSPECTED))
                kinds = {_structure(item)[:2] for item in value[:MAX_INSPECTED]}
                are_samples = has_values or (self._inner_samples and len(kinds) == 1)
            if are_samples:
                self._sample_lists.add(id(value))
                self._lists[path] = len(value)
                return
            for index, item in enumerate(value):
                self._visit(item, f"{path}[{index}]")
        elif (count := count_samples(value)) is not None:
            self._tensors[path] = count
        elif not (is_plain(value) or is_tensor(value)):
            text = f"{path} has type {type(value).__name__}, which only a splitter could cut"
            raise AmbiguousBatchError(text)

    def cut(self, value: Any, first: int, last: int, offsets: dict[int, Tensor] | None = None) -> Any:
        """Return the samples from `first` up to `last`, in new containers.

        Args:
            value: The batch.
            first: The first sample.
            last: The one after the last.
            offsets: New offsets by identity of the old ones, which jagged tensors share.
        """
        offsets = {} if offsets is None else offsets
        if id(value) in self._sample_lists:
            return rebuild(value, value[first:last])
        items = items_of(value)
        if items is not None:
            return rebuild(value, [self.cut(item, first, last, offsets) for item in items])
        count = count_samples(value)
        if count is None or count[0] != self.num_samples or last - first == self.num_samples:
            return value
        return cut_tensor(value, first, last, offsets)


def _are_samples(items: Sequence[Any]) -> bool:
    """Return whether a batch that is a list holds samples, by the rules of the module's docstring."""
    inspected = items[:MAX_INSPECTED]
    structures = {_structure(item) for item in inspected}
    if isinstance(items, tuple) or len(structures) != 1:
        return False
    (structure,) = structures
    if structure[0] == "tensor":  # token sequences: alike but for their length
        lengths = {len(item) for item in items} if structure[1] else set()
        return len(lengths) > 1 and len({tuple(item.shape[1:]) for item in items}) == 1
    if structure[0] not in ("dict", "list"):
        return structure[0] == "plain"
    has_tensors = any(is_tensor(leaf) for leaf in leaves(inspected[0], MAX_INSPECTED))
    if has_tensors and any(is_number(item) or isinstance(item, str) for item in items_of(inspected[0]) or ()):
        return True
    # Dicts of tensors are batches of several loaders if all agree on their number of samples, else samples.
    counts = {count_samples(leaf) for item in inspected for leaf in leaves(item)} - {None}
    return structure[0] == "dict" and len({count[0] for count in counts if count is not None}) > 1


def _structure(value: Any) -> tuple[Any, ...]:
    """Return what samples of one kind have in common: the kinds of their items, by name or in order."""
    fields = fields_of(value)
    if fields is not None:
        return "dict", *((name, _structure(item)[0]) for name, item in fields)
    if is_list(value):
        return "list", *(_structure(item)[0] for item in value[:MAX_INSPECTED]), len(value)
    if isinstance(value, PackedSequence):
        return ("packed",)
    if is_tensor(value):
        return "tensor", value.ndim
    return ("plain",) if is_plain(value) else ("unknown",)
