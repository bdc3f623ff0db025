"""The grid of tiles of a chain of layers: which intervals of every layer a tile computes, and how many tiles.

Samples are pieces without a halo, so they are divided first. Along a spatial axis a tile's inputs are found
from its outputs, layer by layer from the last to the first; what lies outside of the image is padding and is
not computed. Tiles are products of intervals, so that areas are products of sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_eff.kernels._conv.layers import LocalLayer, Place
from lightning_eff.kernels._conv.windows import Interval

MAX_HALO = 0.25
"""Fraction of all outputs of the layers that may be computed more than once."""

NATIVE_AXES, NATIVE_ELEMENTS = 3, 20480
"""torch 2.13 computes 3-D convolutions of one sample on a CPU some ten times slower where channels x depth x
height are this or less."""


@dataclass(frozen=True)
class Chain:
    """Layers, and the sizes of what passes them.

    Args:
        layers: In their order.
        lengths: Spatial sizes of the input, and of the output of each layer.
        channels: Of the same.
        samples: Of all of them.
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
            if layer.num_axes not in (None, x.dim() - 2):
                raise ValueError(
                    f"x {list(x.shape)}: expected [samples, channels] and {layer.num_axes} spatial axes"
                )
            lengths.append(tuple(layer.window(axis).size(n) for axis, n in enumerate(lengths[-1])))
            channels.append(layer.channels or channels[-1])
        if not all(size > 0 for sizes in lengths for size in sizes):
            raise ValueError(f"x {list(x.shape)} is too small for its layers: sizes {lengths}")
        return cls(tuple(layers), tuple(lengths), tuple(channels), len(x))

    def elements(self, index: int) -> int:
        """Return the elements of the input (0), or of the output of a layer (from 1 on)."""
        return self.samples * self.channels[index] * math.prod(self.lengths[index])

    def kept_elements(self) -> int:
        """Return the elements between the layers that autograd keeps for the backward pass."""
        kept, memory = set[int](), [0]  # of each output: the first one in the same memory
        for index, layer in enumerate(self.layers):
            memory.append(memory[-1] if layer.is_in_place else index + 1)
            kept |= {"input": {memory[index]}, "result": {memory[index + 1]}, "": set[int]()}[layer.keeps]
        return sum(self.elements(index) for index in kept - {0, memory[-1]})


@dataclass(frozen=True)
class Tile:
    """A tile: its samples, and its intervals along the axes (of the input, and of each layer's output)."""

    samples: Interval
    axes: tuple[tuple[Interval, ...], ...]

    def index(self, level: int) -> tuple[slice, ...]:
        """Return the index of the tile in the input (0), or in the output of a layer."""
        return slice(*self.samples), slice(None), *(slice(*axis[level]) for axis in self.axes)


@dataclass(frozen=True)
class Grid:
    """Tiles of a chain.

    Args:
        chain: The layers and sizes.
        pieces: Number of pieces of the samples, and of each spatial axis.
    """

    chain: Chain
    pieces: tuple[int, ...]

    def samples(self) -> list[Interval]:
        """Return the intervals of the samples."""
        return _split(self.chain.samples, self.pieces[0])

    def along(self, axis: int) -> list[tuple[Interval, ...]]:
        """Return the intervals of the pieces of an axis, of the input and of each layer's output."""
        found: list[tuple[Interval, ...]] = []
        for interval in _split(self.chain.lengths[-1][axis], self.pieces[axis + 1]):
            levels = [interval]
            for layer, lengths in zip(self.chain.layers[::-1], self.chain.lengths[-2::-1], strict=True):
                levels.append(layer.window(axis).held(levels[-1], lengths[axis]))
            found.append(tuple(levels[::-1]))
        return found

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles, always in the same order."""
        axes = [self.along(axis) for axis in range(len(self.chain.lengths[0]))]
        for samples in self.samples():
            for intervals in itertools.product(*axes):
                yield Tile(samples, intervals)

    def places(self, tile: Tile) -> list[Place]:
        """Return the place of each layer on a tile."""
        return [
            Place(
                tuple(axis[index] for axis in tile.axes),
                tuple(axis[index + 1] for axis in tile.axes),
                self.chain.lengths[index],
            )
            for index in range(len(self.chain.layers))
        ]

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles."""
        axes = range(len(self.chain.lengths[0]))
        return math.prod([len(self.samples()), *(len(self.along(axis)) for axis in axes)])

    def tile_elements(self) -> int:
        """Return the elements of the layers' outputs on the largest tile, and of two gradients."""
        sizes = self._lengths(max)
        samples = max(end - first for first, end in self.samples())
        each = [samples * self.chain.channels[level] * size for level, size in enumerate(sizes)]
        return sum(each[1:]) + 2 * max(each[1:])

    def saved_elements(self, *, is_input_trained: bool) -> int:
        """Return by how many elements the backward pass holds less than that of the layers without tiles.

        Those keep what is between them, and have the largest gradient of it when they begin; tiles have the
        gradient of the input from their beginning.
        """
        inner = range(1, len(self.chain.layers))
        plain = self.chain.kept_elements() + max((self.chain.elements(index) for index in inner), default=0)
        return plain - self.tile_elements() - self.chain.elements(0) * is_input_trained

    def is_native(self) -> bool:
        """Return whether torch would compute a tile without oneDNN, and the image with it."""
        samples = min(end - first for first, end in self.samples())
        if len(self.chain.lengths[0]) != NATIVE_AXES or samples > 1:
            return False
        axes = [self.along(axis) for axis in (0, 1)]
        for level, layer in enumerate(self.chain.layers):
            planes = (min(piece[level][1] - piece[level][0] for piece in axis) for axis in axes)
            tile = self.chain.channels[level] * math.prod(planes)
            image = self.chain.channels[level] * math.prod(self.chain.lengths[level][:2])
            is_fast = self.chain.samples > 1 or image > NATIVE_ELEMENTS
            if layer.num_axes is not None and is_fast and tile <= NATIVE_ELEMENTS:
                return True
        return False

    def halo(self) -> float:
        """Return the fraction of the layers' outputs that is computed more than once."""
        computed = self._lengths(sum)
        totals = [math.prod(lengths) for lengths in self.chain.lengths]
        weights = self.chain.channels
        pairs = list(zip(weights, computed, totals, strict=True))[1:]
        plain = sum(weight * total for weight, _, total in pairs)
        return sum(weight * max(0, size - total) for weight, size, total in pairs) / plain

    def _lengths(self, of_pieces: type | object) -> list[int]:
        """Return the product over the axes of the largest piece, or of the sum of the pieces, by level."""
        axes = [self.along(axis) for axis in range(len(self.chain.lengths[0]))]
        levels = range(len(self.chain.lengths))
        return [
            math.prod(of_pieces(piece[level][1] - piece[level][0] for piece in axis) for axis in axes)  # pyright: ignore[reportCallIssue]
            for level in levels
        ]


def choose(chain: Chain, budget_elements: float, *, is_cpu: bool = False) -> Grid:
    """Return the grid with the fewest cuts whose tiles are within a budget, as far as the halo allows.

    Args:
        chain: The layers and sizes.
        budget_elements: Of `Grid.tile_elements`.
        is_cpu: Whether torch's CPU convolutions compute it; `NATIVE_ELEMENTS` applies to them.
    """
    grid: Grid | None = Grid(chain, (1,) * (1 + len(chain.lengths[0])))
    chosen = grid
    while grid is not None and grid.tile_elements() > budget_elements:
        finer = (
            each for each in _finer(grid, grid.tile_elements() / budget_elements) if each.halo() <= MAX_HALO
        )
        grid = next((each for each in finer if not (is_cpu and each.is_native())), None)
        chosen = grid or chosen
    return chosen


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
