"""The forward of a container that computes segments of its children in tiles.

What is a segment is found at each call, by the layers' flags (batch normalization is local in evaluation
mode) and the input's size; how it is cut is remembered by the size. Of the segments that begin at a child,
the one is taken whose tiles save most: a chain whose halo would leave few tiles is cut into shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.kernels.conv import (
    Chain,
    Grid,
    LocalLayer,
    apply,
    children_of,
    choose_grid,
    computed_itemsize,
    overwrites_input,
    read_module,
)
from lightning_eff.kernels.matmul import in_forward_mode, is_traced

MAX_AXES = 3
Child = tuple[str, nn.Module, tuple[LocalLayer, ...] | str]


@dataclass(frozen=True)
class Segment:
    """What a report says of children that were computed in tiles.

    Args:
        num_layers: Of all of them.
        num_tiles: Of an input.
        shape: Of that input.
        halo: Fraction of the layers' outputs that was computed more than once.
        not_held_bytes: What the layers would keep between them for the backward pass.
    """

    num_layers: int
    num_tiles: int
    shape: tuple[int, ...]
    halo: float
    not_held_bytes: int


class TiledContainer:
    """Replaces the forward of an `nn.Sequential`: it is assigned to the attribute `forward`.

    Args:
        module: The container.
        budget_bytes: As `kernels.conv.choose_grid` has it.
        min_pixels: Inputs with fewer (samples x space) are not tiled.
    """

    def __init__(self, module: nn.Module, *, budget_bytes: int | None, min_pixels: int) -> None:
        self.module, self.budget_bytes, self.min_pixels = module, budget_bytes, min_pixels
        self.segments: dict[str, Segment] = {}
        """Of the call that held back most, by the names of the first and the last child."""
        self.ends: dict[str, str] = {}
        """Why children ended a segment, by name."""
        self.max_pixels = 0
        self._cuts: dict[Any, tuple[int, tuple[int, ...]] | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the children, in tiles where that holds less."""
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        # Tiles are of one size, and have no forward derivative.
        if not isinstance(x, Tensor) or is_traced() or in_forward_mode():
            return type(self.module).forward(self.module, *args, **kwargs)
        named = list(children_of(self.module).items())
        while named and not self._may_tile(x):  # it may be upsampled
            x = named.pop(0)[1](x)
        children = [(name, child, read_module(child, TiledContainer)) for name, child in named]
        self.ends |= {name: found for name, _, found in children if isinstance(found, str)}
        segments: dict[str, Segment] = {}
        while children:
            num_children, grid = self._segment(children, x) if self._may_tile(x) else (1, None)
            if grid is not None:
                segments |= self._described(grid, x, children[:num_children])
            x = children[0][1](x) if grid is None else apply(grid, x)
            del children[:num_children]
        if segments and (not self.segments or _not_held(segments) > _not_held(self.segments)):
            self.segments = segments
        return x

    def attach(self) -> None:
        """Replace the container's forward."""
        self.module.forward = self

    def restore(self) -> None:
        """Give the container its own forward back; a second call does nothing."""
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def _may_tile(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or not 1 <= x.dim() - 2 <= MAX_AXES:
            return False
        if not x.is_floating_point() or x.is_meta:
            return False
        num_pixels = x.numel() // max(1, x.shape[1])
        self.max_pixels = max(self.max_pixels, num_pixels)
        return num_pixels >= self.min_pixels

    def _segment(self, children: Sequence[Child], x: Tensor) -> tuple[int, Grid | None]:
        """Return how many children to compute now, and their tiles; None for one child as it is."""
        run: list[tuple[LocalLayer, ...]] = []
        for _, _, found in children:
            if isinstance(found, str):
                break
            run.append(found)
        if not run or not run[0] or overwrites_input([layer for layers in run for layer in layers]):
            return 1, None
        key = (
            len(children), len(run), x.shape, computed_itemsize(x), x.requires_grad,
            tuple(layer.keeps for layers in run for layer in layers),
        )  # fmt: skip
        if key not in self._cuts:
            self._cuts[key] = self._best(run, x)
        cut = self._cuts[key]
        if cut is None:
            return 1, None
        num_children, pieces = cut
        grid = Grid(Chain.of([layer for layers in run[:num_children] for layer in layers], x), pieces)
        return num_children, grid

    def _best(self, run: Sequence[tuple[LocalLayer, ...]], x: Tensor) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of children, and the pieces, of the segment that holds least in tiles, if any."""
        best, most = None, 0
        for num_children in range(len(run), 0, -1):
            layers = [layer for part in run[:num_children] for layer in part]
            try:
                grid = choose_grid(Chain.of(layers, x), x, self.budget_bytes)
            except ValueError:  # the layers themselves say it better
                return None
            saved = grid.saved_elements(is_input_trained=x.requires_grad)
            if grid.num_tiles > 1 and saved > most:
                best, most = (num_children, grid.pieces), saved
        return best

    def _described(self, grid: Grid, x: Tensor, children: Sequence[Child]) -> dict[str, Segment]:
        """Return what is said of a segment, by its name."""
        names = [name for name, _, _ in children]
        not_held = grid.chain.kept_elements() * computed_itemsize(x) * torch.is_grad_enabled()
        name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        return {name: Segment(len(grid.chain.layers), grid.num_tiles, tuple(x.shape), grid.halo(), not_held)}


def _not_held(segments: dict[str, Segment]) -> int:
    return sum(each.not_held_bytes for each in segments.values())
