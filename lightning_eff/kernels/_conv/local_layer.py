"""A layer as it is computed on a tile: its place, its padding at the borders of the image, its crops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lightning_eff.kernels._conv.windows import Interval, Scattered, Window


@dataclass(frozen=True)
class Place:
    """Intervals of a layer on a tile, one per spatial axis."""

    held: tuple[Interval, ...]
    """Of the input."""
    wanted: tuple[Interval, ...]
    """Of the output."""
    lengths: tuple[int, ...]
    """Of the input as a whole."""


Compute = Callable[[Tensor, Sequence[Tensor | None], Place], Tensor]


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """A layer as it is computed on a tile.

    Args:
        compute: Takes the held input, the tensors and the place; returns the wanted output.
        windows: One per spatial axis, or one for all of them; none for a pointwise layer.
        channels: Of its output; None for those of its input.
        tensors: Weights and the like that may need a gradient.
        keeps: What autograd keeps for its backward pass: `input`, `result` or nothing.
        is_in_place: Whether it overwrites its input.
        draws: Whether it draws random numbers.
        num_axes: Spatial axes of its input; None for any number.
    """

    compute: Compute
    windows: tuple[Window | Scattered, ...] = ()
    channels: int | None = None
    tensors: tuple[Tensor | None, ...] = ()
    keeps: str = "input"
    is_in_place: bool = False
    draws: bool = False
    num_axes: int | None = None

    @property
    def is_new(self) -> bool:
        """Return whether its output is other memory than its input."""
        return not self.is_in_place and (self.draws or bool(self.keeps) or bool(self.windows))

    def window(self, axis: int) -> Window | Scattered:
        """Return the window along a spatial axis."""
        return self.windows[axis % len(self.windows)] if self.windows else Window()


def padded(
    x: Tensor,
    windows: Sequence[Window],
    place: Place,
    *,
    mode: str = "constant",
    value: float | None = None,
    is_explicit: bool = False,
) -> tuple[Tensor, list[int]]:
    """Return the needed input, and the padding that is left to the layer itself.

    Zeros that are the same on both sides are the layer's to add, which makes no copy, unless `is_explicit`.
    """
    padding, around, crops = [], list[int](), []
    for window, held, wanted in zip(windows, place.held, place.wanted, strict=True):
        first, end = window.needed(wanted)
        low, high = held[0] - first, end - held[1]
        is_left = mode == "constant" and low == high >= 0 and not is_explicit
        padding.append(low if is_left else 0)
        around = [*((0, 0) if is_left else (max(low, 0), max(high, 0))), *around]
        crops.append((max(-low, 0), None if is_left or (low >= 0 and high >= 0) else end - first))
    if any(around):
        x = F.pad(x, around, mode, value)
    for axis, (first, length) in enumerate(crops):
        if length is not None:
            x = x.narrow(axis + 2, first, length)
    return x, padding


def cropped(y: Tensor, firsts: Sequence[int], wanted: Sequence[Interval]) -> Tensor:
    """Return the wanted part of an output that begins at `firsts`."""
    for axis, (first, (start, end)) in enumerate(zip(firsts, wanted, strict=True)):
        if (start - first, end - start) != (0, y.shape[axis + 2]):
            y = y.narrow(axis + 2, start - first, end - start)
    return y
