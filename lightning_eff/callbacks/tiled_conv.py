"""Compute chains of convolutions in spatial tiles, so that only one tile's inner activations exist at a time.

For large images and volumes, activations at full resolution are most of a step's memory. A layer is local if
a pixel of its output depends on a window of its input. Such layers are convolutions, pooling, pointwise
activations, dropout, and normalization over channels or in evaluation mode. Consecutive local children of an
`nn.Sequential` form a segment. One autograd function computes the segment in overlapping tiles; the overlap
is the halo. The forward pass keeps only the segment's input, and the backward pass recomputes one tile at a
time. Parameters, names and checkpoints stay the same, hooks of the container run once, and each weight gets
one gradient.

Every other child ends a segment and is computed for the full image:

- statistics over all pixels: batch normalization in training, instance and group normalization;
- transposed convolutions and upsampling;
- padding with anything but zeros, and pooling with `ceil_mode`;
- a class that is not torch's own, hooks on a layer, and sharded weights.

Layers that a custom forward calls one after another are not tiled, because the forward may read the
activations between them. Put them into an `nn.Sequential`.

A segment is tiled under these conditions, which are calculated before anything runs:

- its input has at least `min_pixels`, and a single tile would exceed the budget;
- the halo adds at most a quarter of the pixels;
- the tiles hold less than the layers would keep.

Samples have no halo, so a batch is divided first. A chain with a larger halo is cut into shorter ones. Tiles
are used in evaluation too: they save memory, and dropout draws the same numbers with and without gradients.

Saves: activations between the convolutions of a chain, on large images and volumes.
Costs: one more forward of the segments, at most a third of their operations, and the halo. A block that
    `callbacks/gradient_checkpointing` recomputes costs nothing more if it ends with the segment. If it saves
    something later (a norm, a second segment), the segment is computed three times. Dropout draws per tile:
    statistically equal, not bit for bit. No second derivatives.
When not: images are small (a message says so); norms over all pixels, which end a chain.
Conflicts: `callbacks/torch_compile`, which unrolls tiles; `callbacks/gradient_checkpointing` with
    `selective`, which would keep the convolutions of all tiles.
Source: StreamingCNN, https://arxiv.org/abs/1911.04432; torch.utils.checkpoint
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import Count, Positive, check_arguments
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.managed import Tiling
from lightning_eff.core.model_surgery import BlockSelector
from lightning_eff.core.technique import Outcome, Try
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels.conv import apply
from lightning_eff.kernels.conv_grid import Grid, choose_grid, computed_itemsize
from lightning_eff.kernels.conv_layers import (
    LocalLayer,
    children_of,
    has_windows,
    is_container,
    overwrites_input,
    read_module,
)
from lightning_eff.kernels.matmul import in_forward_mode, is_traced

NOT_FOUND = "no nn.Sequential with convolutions or pooling found"
MAX_ENDS = 3
"""Maximum number of reasons in a report's line."""


@check_arguments
def tile_convs(
    model: nn.Module,
    *,
    modules: BlockSelector = None,
    tile_budget_mib: Positive | None = None,
    min_pixels: Count = 65536,
) -> dict[str, TiledContainer]:
    """Compute chains of convolutions of a model in tiles; for Fabric, or your own training loop.

    Args:
        model: Any module; containers whose forward is already replaced do not change.
        modules: As in `TiledConv`.
        tile_budget_mib: As in `TiledConv`.
        min_pixels: As in `TiledConv`.

    Returns:
        The replacement of each container's forward, by name; its `restore` undoes it.

    Raises:
        ConfigError: A value is outside its range, or `modules` selects nothing or a module that is no
            container.

    Warns:
        NoEffectWarning: No container with convolutions was found.

    Example:
        >>> level = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        >>> list(tile_convs(nn.ModuleDict({"level": level, "head": nn.Linear(8, 2)})))
        ['level']
    """
    tiled = _tile(model, modules, tile_budget_mib, min_pixels)
    before = (vars(each).get("forward") for each in model.modules())
    if not tiled and not any(isinstance(forward, TiledContainer) for forward in before):
        warnings.warn(f"tile_convs had no effect: {NOT_FOUND}", NoEffectWarning, stacklevel=3)
    return tiled


def _tile(
    model: nn.Module, modules: BlockSelector, tile_budget_mib: float | None, min_pixels: int
) -> dict[str, TiledContainer]:
    budget_bytes = None if tile_budget_mib is None else max(1, int(tile_budget_mib * 2**20))
    tiled = {
        name: TiledContainer(module, budget_bytes=budget_bytes, min_pixels=min_pixels)
        for name, module in _containers(model, modules).items()
        # Pointwise layers alone gain nothing, and a forward on the instance belongs to another technique.
        if "forward" not in vars(module) and has_windows(module)
    }
    for forward in tiled.values():
        forward.module.forward = forward
    return tiled


def _containers(model: nn.Module, modules: BlockSelector) -> dict[str, nn.Module]:
    """Return the selected containers and all containers inside them; by default the model's."""
    selected = {"": model}
    if modules is not None:
        selected = model_surgery.select_blocks(model, modules, key="modules")
        for name, module in selected.items():
            if not is_container(module):
                allowed = f"modules of class nn.Sequential with its forward; {type(module).__name__} is none"
                raise ConfigError(key="modules", value=name, allowed=allowed)
    return {
        name: inner
        for prefix, module in selected.items()
        # Containers inside containers too: the inner one is tiled if the outer one is not.
        for name, inner in module.named_modules(prefix=prefix)
        if is_container(inner)
    }


class TiledConv(Tiling):
    """Compute the chains of convolutions in `nn.Sequential` containers in spatial tiles.

    Args:
        modules: Class names or name patterns of containers (`net.levels.*`), classes, or a predicate of name
            and module; None takes every `nn.Sequential`.
        tile_budget_mib: MiB that the layers' outputs and two gradients may take for one tile; None takes the
            larger of 64 and a quarter of the segment's input.
        min_pixels: Inputs with fewer pixels or voxels (samples x space) are not tiled.

    Raises:
        ConfigError: A value is outside its range, or `modules` selects nothing or a module that is no
            container.
        ConflictError: The blocks are compiled, or another technique keeps the tiled activations.

    Warns:
        NoEffectWarning: No container with convolutions was found, or nothing was computed in tiles.

    Example:
        >>> import lightning.pytorch as pl
        >>> callback = TiledConv(tile_budget_mib=256)
        >>> trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> TiledConv(min_pixels=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: min_pixels=0: expected a whole number of at least 1
    """

    lowers = ("activations",)
    try_as = (Try(needs=("peak/convolution",)),)

    @check_arguments
    def __init__(
        self,
        *,
        modules: BlockSelector = None,
        tile_budget_mib: Positive | None = None,
        min_pixels: Count = 65536,
    ) -> None:
        super().__init__()
        self.modules = modules
        self.tile_budget_mib = tile_budget_mib
        self.min_pixels = min_pixels

    @override
    def tile(self, model: nn.Module) -> dict[str, TiledContainer]:
        """Replace the forward of containers."""
        return _tile(model, self.modules, self.tile_budget_mib, self.min_pixels)

    @override
    def outcome(self) -> Outcome:
        """Report the segments, their tiles and halo, the bytes not held, and why segments ended."""
        segments = {
            f"{name}.{part}" if name else part: segment
            for name, each in self._tiled.items()
            for part, segment in each.segments.items()
        }
        ends = {
            f"{name}.{child}" if name else child: reason
            for name, each in self._tiled.items()
            for child, reason in each.ends.items()
        }
        tiles = max((each.num_tiles for each in segments.values()), default=1)
        halo = max((each.halo for each in segments.values()), default=0.0)
        not_held = sum(each.not_held_bytes for each in segments.values())
        pixels = max((each.max_pixels for each in self._tiled.values()), default=0)
        if not self._tiled:
            did = NOT_FOUND
        elif not segments:
            why = "no chain of two layers or more exceeds its budget (tile_budget_mib)"
            why = why if pixels >= self.min_pixels else f"min_pixels={self.min_pixels:,}"
            did = f"{pixels:,} pixels: nothing in tiles ({why})"
        else:
            did = (
                f"{len(segments)} segment{'s' * (len(segments) != 1)} in up to {tiles} tiles: "
                f"{human_bytes(not_held)} not kept for the backward pass, {halo:.0%} more pixels for the halo"
            )
        reasons = list(dict.fromkeys(ends.values()))
        did += f"; segments end: {', '.join(reasons[:MAX_ENDS])}" if reasons else ""
        numbers = {
            "segments": {name: vars(each) for name, each in segments.items()}, "tiles": tiles, "halo": halo,
            "not_held_bytes": not_held, "pixels": pixels, "ends": ends,
        }  # fmt: skip
        return Outcome(did=did, effective=bool(segments), numbers=numbers)


MAX_AXES = 3
Child = tuple[str, nn.Module, tuple[LocalLayer, ...] | str]
"""Name, module, and its local layers or the reason that it has none."""


@dataclass(frozen=True)
class Segment:
    """Children that were computed in tiles, for the report.

    Args:
        num_tiles: Tiles of an input.
        halo: Pixels of the layers' outputs that were computed a second time, as a fraction of all.
        not_held_bytes: Bytes of activations that the layers would have kept for the backward pass.
    """

    num_tiles: int
    halo: float
    not_held_bytes: int


class TiledContainer:
    """Replaces the forward of an `nn.Sequential`, as the module's attribute `forward`.

    Each call determines the segments from the layers' flags (batch normalization is local in evaluation mode)
    and from the input's size. Among the segments that start at a child, the call chooses the one whose tiles
    save most. So a chain whose halo would leave few tiles is cut into shorter ones.

    Args:
        module: The container.
        budget_bytes: As in `kernels.conv_grid.choose_grid`.
        min_pixels: Inputs with fewer (samples x space) are not tiled.
    """

    def __init__(self, module: nn.Module, *, budget_bytes: int | None, min_pixels: int) -> None:
        self.module, self.budget_bytes, self.min_pixels = module, budget_bytes, min_pixels
        self.segments: dict[str, Segment] = {}
        """Segments of the call that saved most, by the names of the first and the last child."""
        self.ends: dict[str, str] = {}
        """For each child that ended a segment, the reason."""
        self.max_pixels = 0
        self._cuts: dict[Any, tuple[int, tuple[int, ...]]] = {}
        """Number of children of a segment, and its pieces per axis; (1, ()) if nothing is tiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the children, in tiles if that holds less."""
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        # Tiles need concrete sizes, so no tracing, and have no forward-mode derivative.
        if not isinstance(x, Tensor) or is_traced() or in_forward_mode():
            return type(self.module).forward(self.module, *args, **kwargs)
        named = list(children_of(self.module).items())
        while named and not self._may_tile(x):  # small so far, but a later child may upsample x
            x = named.pop(0)[1](x)
        # Axes of x: samples, channels, then space.
        children = [(name, child, read_module(child, x.dim() - 2, TiledContainer)) for name, child in named]
        self.ends |= {name: found for name, _, found in children if isinstance(found, str)}
        segments: dict[str, Segment] = {}
        while children:
            num_children, grid = self._segment(children, x) if self._may_tile(x) else (1, None)
            if grid is None:  # one child, for the full image
                x = children[0][1](x)
            else:
                first, last = children[0][0], children[num_children - 1][0]
                # Without gradients nothing would have been kept.
                not_held = grid.kept_elements() * computed_itemsize(x) * torch.is_grad_enabled()
                path = first if num_children == 1 else f"{first}-{last}"
                segments[path] = Segment(grid.num_tiles, grid.halo(), not_held)
                x = apply(grid, x)
            del children[:num_children]
        if segments:
            # A container may be called with images of several sizes.
            self.segments = max(segments, self.segments, key=_not_held_bytes)
        return x

    def restore(self) -> None:
        """Restore the container's own forward; a second call does nothing."""
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def _may_tile(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or not 1 <= x.dim() - 2 <= MAX_AXES:
            return False
        # A meta tensor has only a shape, for which tiles save nothing.
        if not x.is_floating_point() or x.is_meta:
            return False
        # Samples x space; axis 1 is the channels.
        num_pixels = x.numel() // max(1, x.shape[1])
        self.max_pixels = max(self.max_pixels, num_pixels)
        return num_pixels >= self.min_pixels

    def _segment(self, children: Sequence[Child], x: Tensor) -> tuple[int, Grid | None]:
        """Return the number of children to compute next, and their tiles; None if untiled (one child)."""
        run: list[tuple[LocalLayer, ...]] = []
        for _, _, found in children:
            if isinstance(found, str):
                break
            run.append(found)
        # An in-place layer at the front would overwrite pixels that the next tile reads as its halo.
        if not run or not run[0] or overwrites_input([layer for layers in run for layer in layers]):
            return 1, None
        # Everything that decides the cut: the run of local children, the input, and what each layer keeps.
        key = (
            len(children), len(run), x.shape, computed_itemsize(x), x.requires_grad,
            tuple(layer.keeps for layers in run for layer in layers),
        )  # fmt: skip
        # A search takes milliseconds, and inputs of the same size have the same cut.
        if key not in self._cuts:
            self._cuts[key] = self._best_cut(run, x)
        num_children, pieces = self._cuts[key]
        layers = [layer for part in run[:num_children] for layer in part]
        return num_children, Grid.of(layers, x, pieces) if pieces else None

    def _best_cut(self, run: Sequence[tuple[LocalLayer, ...]], x: Tensor) -> tuple[int, tuple[int, ...]]:
        """Return the number of children, and the pieces, of the segment that saves most when tiled."""
        best, most_saved = (1, ()), 0
        # The longest segment first; a shorter one must save strictly more.
        for num_children in range(len(run), 0, -1):
            layers = [layer for part in run[:num_children] for layer in part]
            try:
                grid = choose_grid(layers, x, self.budget_bytes)
            except ValueError:  # x does not fit the layers: their own error is clearer
                return 1, ()
            saved = grid.saved_elements(is_input_trained=x.requires_grad)
            if grid.num_tiles > 1 and saved > most_saved:
                best, most_saved = (num_children, grid.pieces), saved
        return best


def _not_held_bytes(segments: dict[str, Segment]) -> int:
    return sum(each.not_held_bytes for each in segments.values())
