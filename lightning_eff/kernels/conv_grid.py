"""The grid of tiles of a chain of layers: which pixels of every layer a tile computes, and how many tiles.

Along an axis, a tile's inputs are found from its outputs, layer by layer from the last to the first; what
lies outside the image is padding and is not computed. Tiles are products of intervals, so areas are products
of lengths. Samples need no halo, so they are divided first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_eff.kernels.conv_layers import Interval, LocalLayer

MAX_HALO = 0.25
"""Fraction of all outputs of the layers that may be computed more than once."""
MIN_BUDGET_BYTES = 64 << 20

NATIVE_AXES, NATIVE_ELEMENTS = 3, 20480
"""torch 2.13 computes 3-D convolutions of one sample on a CPU some ten times slower where channels x depth x
height are this or less."""


@dataclass(frozen=True)
class Chain:
    """Layers, and the sizes of their inputs and outputs.

    Args:
        layers: In their order.
        lengths: Spatial sizes of the input, and of the output of each layer.
        channels: Of the input, and of the output of each layer.
        samples: Number of samples.
    """

    layers: tuple[LocalLayer, ...]
    lengths: tuple[tuple[int, ...], ...]
    channels: tuple[int, ...]
    samples: int

    @classmethod
    def of(cls, layers: Sequence[LocalLayer], x: Tensor) -> Chain:
        """Return the chain for an input [samples, channels, *space].

        Raises:
            ValueError: A layer takes another number of axes, or has no output.
        """
        lengths, channels = [tuple(x.shape[2:])], [x.shape[1]]
        for layer in layers:
            if layer.windows and len(layer.windows) != x.dim() - 2:
                axes = len(layer.windows)
                raise ValueError(f"x {list(x.shape)}: expected [samples, channels] and {axes} spatial axes")
            lengths.append(tuple(layer.window(axis).size(n) for axis, n in enumerate(lengths[-1])))
            channels.append(layer.channels or channels[-1])
        if not all(size > 0 for sizes in lengths for size in sizes):
            raise ValueError(f"x {list(x.shape)} is too small for its layers: sizes {lengths}")
        return cls(tuple(layers), tuple(lengths), tuple(channels), len(x))

    def elements(self, level: int) -> int:
        """Return the elements of the input (level 0), or of the output of a layer (from 1)."""
        return self.samples * self.channels[level] * math.prod(self.lengths[level])

    def kept_elements(self) -> int:
        """Return the elements between the layers that autograd keeps for the backward pass."""
        kept, memory = set[int](), [0]  # the level whose memory each level has: in place, an earlier one's
        for index, layer in enumerate(self.layers):
            memory.append(memory[-1] if layer.is_in_place else index + 1)
            if layer.keeps:
                kept.add(memory[index] if layer.keeps == "input" else memory[index + 1])
        return sum(self.elements(level) for level in kept - {0, memory[-1]})


@dataclass(frozen=True)
class Tile:
    """A tile.

    Args:
        source: Its index in the input.
        target: Its index in the output.
        padding: Of each layer: padding at both ends of each spatial axis.
    """

    source: tuple[slice, ...]
    target: tuple[slice, ...]
    padding: tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Piece:
    """A piece of one axis: its interval of the input and of each layer's output, and each layer's padding."""

    levels: tuple[Interval, ...]
    padding: tuple[Interval, ...]


@dataclass(frozen=True)
class Grid:
    """Tiles of a chain.

    Args:
        chain: The layers and sizes.
        pieces: Number of pieces of the samples, and of each spatial axis.
    """

    chain: Chain
    pieces: tuple[int, ...]

    @functools.cached_property
    def samples(self) -> list[Interval]:
        """The intervals of the samples."""
        return _split(self.chain.samples, self.pieces[0])

    @functools.cached_property
    def axes(self) -> list[list[Piece]]:
        """The pieces of each spatial axis."""
        return [
            [self._piece(axis, interval) for interval in _split(length, self.pieces[axis + 1])]
            for axis, length in enumerate(self.chain.lengths[-1])
        ]

    def _piece(self, axis: int, outputs: Interval) -> Piece:
        levels, padding = [outputs], list[Interval]()
        for layer, lengths in zip(self.chain.layers[::-1], self.chain.lengths[-2::-1], strict=True):
            first, end = layer.window(axis).needed(levels[-1])
            held = max(first, 0), min(end, lengths[axis])
            levels.append(held)
            padding.append((held[0] - first, end - held[1]))
        return Piece(tuple(levels[::-1]), tuple(padding[::-1]))

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles, always in the same order."""
        for samples in self.samples:
            for pieces in itertools.product(*self.axes):
                source, target = (
                    (slice(*samples), slice(None), *(slice(*piece.levels[level]) for piece in pieces))
                    for level in (0, -1)
                )
                yield Tile(source, target, tuple(zip(*(piece.padding for piece in pieces), strict=True)))

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles."""
        return math.prod(map(len, (self.samples, *self.axes)))

    def tile_elements(self) -> int:
        """Return the elements of the layers' outputs on the largest tile, and of two gradients."""
        samples = max(end - first for first, end in self.samples)
        sizes = zip(self.chain.channels, self._areas(max), strict=True)
        outputs = [samples * channels * area for channels, area in sizes][1:]
        return sum(outputs) + 2 * max(outputs)

    def saved_elements(self, *, is_input_trained: bool) -> int:
        """Return by how many elements the backward pass holds less than without tiles.

        Without tiles it begins with what is between the layers, and the largest gradient of that; in tiles
        the gradient of the input is there from the beginning.
        """
        inner = range(1, len(self.chain.layers))
        plain = self.chain.kept_elements() + max((self.chain.elements(level) for level in inner), default=0)
        return plain - self.tile_elements() - self.chain.elements(0) * is_input_trained

    def halo(self) -> float:
        """Return the fraction of the layers' outputs that is computed more than once."""
        levels = list(zip(self.chain.channels, self._areas(sum), self.chain.lengths, strict=True))[1:]
        # A stride may leave pixels of a layer unread: then fewer are computed than there are.
        again = sum(channels * max(0, area - math.prod(lengths)) for channels, area, lengths in levels)
        return again / sum(channels * math.prod(lengths) for channels, _, lengths in levels)

    def _areas(self, over: Callable[[Iterable[int]], int]) -> list[int]:
        """Return for each level the product over the axes of the largest piece, or of all pieces' sum."""
        return [
            math.prod(over(p.levels[level][1] - p.levels[level][0] for p in axis) for axis in self.axes)
            for level in range(len(self.chain.lengths))
        ]

    def is_native(self) -> bool:
        """Return whether torch would compute a tile without oneDNN, but the image with it."""
        samples = min(end - first for first, end in self.samples)
        if len(self.axes) != NATIVE_AXES or samples > 1:
            return False
        for level, layer in enumerate(self.chain.layers):
            planes = [min(p.levels[level][1] - p.levels[level][0] for p in axis) for axis in self.axes[:2]]
            tile, image = (
                self.chain.channels[level] * math.prod(sizes)
                for sizes in (planes, self.chain.lengths[level][:2])
            )
            is_fast = self.chain.samples > 1 or image > NATIVE_ELEMENTS
            if layer.windows and is_fast and tile <= NATIVE_ELEMENTS:
                return True
        return False


def choose_grid(chain: Chain, x: Tensor, budget_bytes: float | None) -> Grid:
    """Return the grid with the fewest cuts whose tiles are within a budget, as far as the halo allows.

    Args:
        chain: The layers, and the sizes for `x`.
        x: The input.
        budget_bytes: Bytes of the layers' outputs and two gradients on one tile; None for the larger of 64
            MiB and a quarter of `x`, which is held with two gradients of about its size anyway.
    """
    budget_bytes = max(MIN_BUDGET_BYTES, x.nbytes // 4) if budget_bytes is None else budget_bytes
    budget_elements, is_cpu = budget_bytes / computed_itemsize(x), x.device.type == "cpu"
    grid: Grid | None = Grid(chain, (1,) * (1 + len(chain.lengths[0])))
    chosen = grid
    while grid is not None and (excess := grid.tile_elements() / budget_elements) > 1:
        finer = (each for each in _finer(grid, excess) if each.halo() <= MAX_HALO)
        grid = next((each for each in finer if not (is_cpu and each.is_native())), None)
        chosen = grid or chosen
    return chosen


def computed_itemsize(x: Tensor) -> int:
    """Return the bytes of one element of the layers' outputs."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype == torch.float32
    return torch.get_autocast_dtype(device).itemsize if is_cast else x.itemsize


def _finer(grid: Grid, excess: float) -> Iterator[Grid]:
    """Yield grids with one more cut: of samples, then of the longest pieces, of the last axis first."""
    samples, *pieces = grid.pieces
    if samples < grid.chain.samples:
        yield Grid(grid.chain, (min(grid.chain.samples, max(samples + 1, int(samples * excess))), *pieces))
    lengths = grid.chain.lengths[-1]
    for axis in sorted(range(len(pieces)), key=lambda axis: (-(lengths[axis] // pieces[axis]), -axis)):
        if pieces[axis] < lengths[axis]:
            yield Grid(grid.chain, (samples, *pieces[:axis], pieces[axis] + 1, *pieces[axis + 1 :]))


def _split(length: int, pieces: int) -> list[Interval]:
    """Return intervals of one length, but for the last."""
    size = -(-length // pieces)
    return [(first, min(first + size, length)) for first in range(0, length, size)]
