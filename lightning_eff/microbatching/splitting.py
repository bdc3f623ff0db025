"""Cutting a batch into micro-batches along its samples, and putting together again what they gave.

A batch is tensors in dicts, lists, tuples, named tuples, dataclasses, and what behaves like a dict, or lists
of samples (samples.py says which). What has no samples (numbers, words, tensors without a dimension, masks
[1, ...]) goes to every micro-batch as it is. A batch whose parts do not agree on the number of samples is
refused, since any cut would be a guess: give a splitter.

Slices are views: nothing is copied, except what is nested or packed. Containers are new in each micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching.samples import Reading, UnclearError, is_number, read

Splitter = Callable[[Any, int], Sequence[Any]]
"""Cuts a batch into micro-batches of a number of samples: `splitter(batch, micro_batch_size)`."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A micro-batch.

    Args:
        batch: What `training_step` gets.
        num_samples: How many samples of the whole it has; None if nobody can tell.
    """

    batch: Any
    num_samples: int | None


def num_samples(batch: Any) -> int | None:
    """Return the number of samples of a batch; None if it has none or its parts do not agree.

    Example:
        >>> num_samples({"tokens": torch.zeros(4, 7), "mask": torch.zeros(1, 7), "task": "copy"})
        4
        >>> num_samples([torch.zeros(5), torch.zeros(3)]), num_samples((torch.zeros(5, 2), torch.zeros(3)))
        (2, None)
    """
    reading = reading_of(batch)
    return None if reading is None else reading.total


def reading_of(batch: Any) -> Reading | None:
    """Return how to read a batch, for `split`; None if its parts do not agree."""
    try:
        return read(batch)
    except UnclearError:
        return None


def split(
    batch: Any, micro_batch_size: int, splitter: Splitter | None = None, reading: Reading | None = None
) -> list[Part]:
    """Cut a batch into micro-batches of a size; the last one has what is left.

    Args:
        batch: Tensors in containers; samples lie along the first dimension.
        micro_batch_size: Samples of a micro-batch, at least 1.
        splitter: Cuts it instead.
        reading: How to read it, where that is known.

    Raises:
        ConfigError: It has no samples that could be told, or the splitter returned nothing.

    Example:
        >>> [part.batch["x"].tolist() for part in split({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if splitter is not None:
        cut: Any = splitter(batch, micro_batch_size)
        if not isinstance(cut, Sequence) or not cut:
            raise ConfigError(
                key="splitter",
                value=cut,
                allowed="a function that returns a list of at least one micro-batch",
            )
        return [Part(part, num_samples(part)) for part in cut]
    try:
        reading = reading or read(batch)
    except UnclearError as error:
        allowed = f"a function of batch and size that returns a list, for a batch of unclear size: {error}"
        raise ConfigError(key="splitter", value=None, allowed=allowed) from None
    total = reading.total
    ends = [(first, min(total, first + micro_batch_size)) for first in range(0, total, micro_batch_size)]
    return [Part(reading.cut(batch, first, last), last - first) for first, last in ends]


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
    if key == "weight" and None not in values:
        return sum(values[1:], start=values[0])
    rows = {_row(value) for value in values}
    if len(rows) == 1 and None not in rows and [len(value) for value in values] == sizes:
        is_list = isinstance(values[0], list)
        return [item for value in values for item in value] if is_list else torch.cat(values)
    if all(is_number(value) for value in values):
        return mean(values, sizes)
    return values[-1]


def _row(value: Any) -> Any:
    """Return what the rows of two values must have in common to be joined; None for what has no rows."""
    if isinstance(value, list):
        return "list"
    joinable = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return (value.shape[1:], value.dtype, value.device) if joinable and value.dim() else None


def mean(values: Sequence[Any], shares: Sequence[float | None]) -> Any:
    """Return the mean of numbers by the samples or the weight of each; a plain mean where nobody knows."""
    known = [1.0 if share is None else float(share) for share in shares]
    if len(values) == 1 or not any(known):
        return values[0]
    total = sum(known)
    # A mean over nothing is not a number, and neither is it times 0.
    return sum(value * (share / total) for value, share in zip(values, known, strict=True) if share)
