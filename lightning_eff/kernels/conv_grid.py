"""The grid of tiles of a chain of layers: the number of tiles, and each tile's pixels in each layer.

Along each axis, a tile's input range is computed from its output range, from the last layer to the first.
Pixels outside the image are padding and are not computed. Tiles are products of intervals, so areas are
products of lengths. Samples need no halo, so a grid divides the samples first, and spatial axes only if tiles
are still too large.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_eff.kernels.conv_layers import Interval, LocalLayer

MAX_HALO = 0.25
"""Largest fraction of the layers' outputs that may be computed more than once."""
MIN_BUDGET_BYTES = 64 << 20

NATIVE_AXES, NATIVE_ELEMENTS = 3, 20480
"""On a CPU, torch 2.13 computes a 3-D convolution of one sample about ten times slower if channels x depth x
height is at most `NATIVE_ELEMENTS`."""


@dataclass(frozen=True)
class Tile:
    """A tile.

    Args:
        source: Index of the tile in the input.
        target: Index of the tile in the output.
        padding: For each layer, the padding at both ends of each spatial axis.
    """

    source: tuple[slice, ...]
    target: tuple[slice, ...]
    padding: tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Grid:
    """Layers, sizes of inputs and outputs, and tiles. Level 0 is the input, level n the nth layer's output.

    Args:
        layers: The layers in order.
        num_samples: Number of samples of the input.
        channels: Number of channels of each level.
        lengths: Spatial sizes of each level.
        pieces: Number of pieces into which the samples, and each spatial axis, are divided.
    """

    layers: tuple[LocalLayer, ...]
    num_samples: int
    channels: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[LocalLayer], x: Tensor, pieces: tuple[int, ...] | None = None) -> Grid:
        """Return the grid for an input [samples, channels, *space]; `pieces=None` gives a grid of one tile.

        Raises:
            ValueError: A layer expects a different number of axes, or the output of a layer would be empty.
        """
        lengths, channels = [tuple(x.shape[2:])], [x.shape[1]]
        for layer in layers:
            if layer.windows and len(layer.windows) != x.dim() - 2:
                axes = len(layer.windows)
                raise ValueError(f"x {list(x.shape)}: expected [samples, channels] and {axes} spatial axes")
            # Each layer's output is the input of the next layer.
            lengths.append(tuple(layer.window(axis).size(n) for axis, n in enumerate(lengths[-1])))
            channels.append(layer.channels or channels[-1])
        if not all(size > 0 for sizes in lengths for size in sizes):
            raise ValueError(f"x {list(x.shape)} is too small for its layers: sizes {lengths}")
        return cls(tuple(layers), len(x), tuple(channels), tuple(lengths), pieces or (1,) * (x.dim() - 1))

    @functools.cached_property
    def samples(self) -> list[Interval]:
        """The interval of samples in each piece."""
        return _split(self.num_samples, self.pieces[0])

    @functools.cached_property
    def axes(self) -> list[list[list[Interval]]]:
        """For each spatial axis and piece, the interval on each level."""
        return [
            [self._levels(axis, interval) for interval in _split(length, self.pieces[axis + 1])]
            for axis, length in enumerate(self.lengths[-1])
        ]

    def _levels(self, axis: int, outputs: Interval) -> list[Interval]:
        levels = [outputs]
        # From the last layer to the first: a layer has to compute the interval that the next layer reads.
        for layer, lengths in zip(self.layers[::-1], self.lengths[-2::-1], strict=True):
            levels.append(layer.window(axis).read(levels[-1], lengths[axis])[0])
        return levels[::-1]

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles, always in the same order."""
        for samples in self.samples:
            # One piece per axis; a piece lists its interval on every level, from the input to the output.
            for pieces in itertools.product(*self.axes):
                source, target = (
                    (slice(*samples), slice(None), *(slice(*piece[level]) for piece in pieces))
                    for level in (0, -1)
                )
                padding = tuple(
                    tuple(
                        layer.window(axis).read(piece[level + 1], self.lengths[level][axis])[1]
                        for axis, piece in enumerate(pieces)
                    )
                    for level, layer in enumerate(self.layers)
                )
                yield Tile(source, target, padding)

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles."""
        return math.prod(map(len, (self.samples, *self.axes)))

    def kept_elements(self) -> int:
        """Return the number of elements of layer outputs that autograd would save without tiles."""
        # An in-place layer writes to the memory of the previous level, and autograd saves that memory only
        # once.
        kept, memory = set[int](), [0]  # for each level, the level that owns the memory
        for level, layer in enumerate(self.layers):
            memory.append(memory[-1] if layer.is_in_place else level + 1)
            if layer.keeps:
                kept.add(memory[level] if layer.keeps == "input" else memory[level + 1])
        # The input and the output exist with and without tiles.
        return sum(self._elements(level) for level in kept - {0, memory[-1]})

    def tile_elements(self) -> int:
        """Return the number of elements in the largest tile's layer outputs and two gradients."""
        samples = max(end - first for first, end in self.samples)
        sizes = zip(self.channels, self._areas(max), strict=True)
        outputs = [samples * channels * area for channels, area in sizes][1:]
        # During the backward pass of a layer, the gradients of its output and of its input are in memory.
        return sum(outputs) + 2 * max(outputs)

    def saved_elements(self, *, is_input_trained: bool) -> int:
        """Return the number of elements by which tiles lower the peak of the backward pass.

        Without tiles, the peak is `kept_elements` plus the largest gradient between layers. With tiles, the
        peak is `tile_elements` plus the gradient of the input, which exists from the start.
        """
        largest = max(map(self._elements, range(1, len(self.layers))), default=0)
        plain = self.kept_elements() + largest
        return plain - self.tile_elements() - self._elements(0) * is_input_trained

    def halo(self) -> float:
        """Return the fraction of the layers' outputs that is computed more than once."""
        levels = list(zip(self.channels, self._areas(sum), self.lengths, strict=True))[1:]
        # With a stride, some pixels of a layer may never be read, so fewer may be computed than exist.
        again = sum(channels * max(0, area - math.prod(lengths)) for channels, area, lengths in levels)
        return again / sum(channels * math.prod(lengths) for channels, _, lengths in levels)

    def is_native(self) -> bool:
        """Return whether torch would compute a tile without oneDNN, but the whole image with oneDNN."""
        samples = min(end - first for first, end in self.samples)
        if len(self.axes) != NATIVE_AXES or samples > 1:
            return False
        for level, layer in enumerate(self.layers):
            depth, height = (min(end - first for first, end in _at(axis, level)) for axis in self.axes[:2])
            tile = self.channels[level] * depth * height
            image = self.channels[level] * math.prod(self.lengths[level][:2])
            # The limit applies only to batches of one sample: larger batches always take the fast path.
            is_fast = self.num_samples > 1 or image > NATIVE_ELEMENTS
            if layer.windows and is_fast and tile <= NATIVE_ELEMENTS:
                return True
        return False

    def _elements(self, level: int) -> int:
        return self.num_samples * self.channels[level] * math.prod(self.lengths[level])

    def _areas(self, over: Callable[[Iterable[int]], int]) -> list[int]:
        """Return each level's area; `over` (`max` or `sum`) combines the pieces' lengths along an axis."""
        return [
            math.prod(over(end - first for first, end in _at(axis, level)) for axis in self.axes)
            for level in range(len(self.lengths))
        ]


def _at(axis: list[list[Interval]], level: int) -> list[Interval]:
    return [piece[level] for piece in axis]


def choose_grid(layers: Sequence[LocalLayer], x: Tensor, budget_bytes: float | None) -> Grid:
    """Return the grid with the fewest cuts whose tiles fit a budget, unless that would exceed the halo limit.

    Args:
        layers: The layers in order.
        x: The input.
        budget_bytes: Bytes for one tile's layer outputs and two gradients. None means the larger of 64 MiB
            and a quarter of the size of `x`. Less would save little, because `x` and two gradients of about
            its size are in memory anyway.

    Raises:
        ValueError: `x` does not fit the layers.
    """
    budget_bytes = max(MIN_BUDGET_BYTES, x.nbytes // 4) if budget_bytes is None else budget_bytes
    budget_elements, is_cpu = budget_bytes / computed_itemsize(x), x.device.type == "cpu"
    chosen = grid = Grid.of(layers, x)
    while grid is not None and (excess := grid.tile_elements() / budget_elements) > 1:
        # Greedy: take the first finer grid within the halo limit. Cuts of samples add no halo, so they come
        # first.
        finer = (each for each in _finer(grid, excess) if each.halo() <= MAX_HALO)
        grid = next((each for each in finer if not (is_cpu and each.is_native())), None)
        # If no finer grid is within the limits, the last grid exceeds the budget.
        chosen = grid or chosen
    return chosen


def computed_itemsize(x: Tensor) -> int:
    """Return the bytes of one element of the layers' outputs."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype == torch.float32
    return torch.get_autocast_dtype(device).itemsize if is_cast else x.itemsize


def _finer(grid: Grid, excess: float) -> Iterator[Grid]:
    """Yield finer grids: first with more cuts of the samples, then with one more cut of an axis."""
    samples, *pieces = grid.pieces
    if samples < grid.num_samples:
        # A tile's size is proportional to its samples, so jump to the number of cuts that would fit.
        more = min(grid.num_samples, max(samples + 1, int(samples * excess)))
        yield replace(grid, pieces=(more, *pieces))
    lengths = grid.lengths[-1]
    # The axis with the longest pieces comes first, because a cut adds the smallest fraction of halo there. Of
    # equal axes, the last comes first.
    for axis in sorted(range(len(pieces)), key=lambda axis: (-(lengths[axis] // pieces[axis]), -axis)):
        if pieces[axis] < lengths[axis]:
            yield replace(grid, pieces=(samples, *pieces[:axis], pieces[axis] + 1, *pieces[axis + 1 :]))


def _split(length: int, pieces: int) -> list[Interval]:
    """Split a length into intervals of equal length; the last interval may be shorter."""
    # ceil(length / pieces); rounding up may leave fewer intervals than pieces.
    size = -(-length // pieces)
    return [(first, min(first + size, length)) for first in range(0, length, size)]
