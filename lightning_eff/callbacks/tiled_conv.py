"""Compute chains of convolutions in spatial tiles, so that only one tile's inner activations exist at a time.

For large images and volumes, activations at full resolution take most of a step's memory. A layer is local if
each output pixel depends only on a window of the input. Local layers are convolutions, pooling, pointwise
activations, dropout, normalization over channels, and batch normalization in evaluation mode. Consecutive
local children of an `nn.Sequential` form a segment. One autograd function computes the segment in overlapping
tiles; the overlap is the halo. The forward pass saves only the segment's input, and the backward pass
recomputes one tile at a time. Parameters, names and checkpoints stay the same, hooks of the container run
once, and each weight gets one gradient.

Every other child ends a segment and is computed for the full image:

- normalization over all pixels: batch normalization in training, instance and group normalization;
- transposed convolutions and upsampling;
- padding with values other than zero, and pooling with `ceil_mode`;
- layers whose class is not torch's, and layers with hooks or sharded weights.

Layers that a custom forward calls one after another are not tiled, because the forward may read the
activations between them. Put such layers into an `nn.Sequential`.

Three conditions are checked before a segment runs. The segment is tiled if all of them hold:

- the segment's input has at least `min_pixels` pixels, and a single tile would exceed the budget;
- the halo adds at most a quarter of the pixels;
- the tiles need less memory than the activations that the layers would save for the backward pass.

A batch is divided into samples first, because a tile of full samples has no halo. A chain whose halo adds
more than a quarter of the pixels is cut into shorter chains. Tiles are also used when gradients are disabled,
because they save memory then too. So dropout draws the same numbers with and without gradients.

Saves: activations between the convolutions of a chain, on large images and volumes.
Costs: the halo, and one more forward pass of the segments, which adds at most a third to their operations.
    If `callbacks/gradient_checkpointing` recomputes a block that ends with the segment, tiles cost no further
    pass. If the block saves a tensor later (for a norm, or a second segment), the segment is computed three
    times.
    Dropout draws a mask per tile, so results are statistically equal, but not bit-identical. Second
    derivatives are not supported.
When not: images are small (a warning says so); the model has many norms over all pixels, which end chains.
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
"""Maximum number of reasons in a line of the report."""


@check_arguments
def tile_convs(
    model: nn.Module,
    *,
    modules: BlockSelector = None,
    tile_budget_mib: Positive | None = None,
    min_pixels: Count = 65536,
) -> dict[str, TiledContainer]:
    """Compute a model's chains of convolutions in tiles, with Fabric or in your own training loop.

    Args:
        model: Any module; the function skips containers whose forward is replaced already.
        modules: As in `TiledConv`.
        tile_budget_mib: As in `TiledConv`.
        min_pixels: As in `TiledConv`.

    Returns:
        The new forward of each container, by the container's name; the method `restore` undoes a replacement.

    Raises:
        ConfigError: A value is outside its range, `modules` selects nothing, or a selected module is not a
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
    """Return the selected containers and the containers inside them; by default, all in the model."""
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
        # Include nested containers: the inner container is tiled if the outer container is not.
        for name, inner in module.named_modules(prefix=prefix)
        if is_container(inner)
    }


class TiledConv(Tiling):
    """Compute the chains of convolutions in `nn.Sequential` containers in spatial tiles.

    Args:
        modules: Class names or name patterns of containers (`net.levels.*`), classes, or a predicate of name
            and module; if None, every `nn.Sequential`.
        tile_budget_mib: Memory in MiB for one tile: the outputs of its layers, and two gradients. If None,
            the larger of 64 MiB and a quarter of the size of the segment's input.
        min_pixels: Inputs with fewer pixels or voxels (samples x space) are not tiled.

    Raises:
        ConfigError: A value is outside its range, `modules` selects nothing, or a selected module is not a
            container.
        ConflictError: The blocks are compiled, or another technique would store the activations of all tiles.

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
        """Report the segments, their tiles and halo, the bytes saved, and the reasons why segments end."""
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
"""Name and module of a child, and its local layers; a text with the reason if it has no local layers."""


@dataclass(frozen=True)
class Segment:
    """Children that were computed in tiles, for the report.

    Args:
        num_tiles: Number of tiles per input.
        halo: Fraction of the layers' outputs that was computed more than once.
        not_held_bytes: Bytes of activations that the layers would have saved for the backward pass.
    """

    num_tiles: int
    halo: float
    not_held_bytes: int


class TiledContainer:
    """Replaces the forward of an `nn.Sequential`; stored in the module's attribute `forward`.

    Each call determines the segments from the layers' flags (batch normalization is local in evaluation mode)
    and from the input's size. Among the segments that start at a child, the call chooses the segment whose
    tiles save the most memory. So a chain whose halo allows only few tiles is cut into shorter chains.

    Args:
        module: The container.
        budget_bytes: As in `kernels.conv_grid.choose_grid`.
        min_pixels: Inputs with fewer pixels (samples x space) are not tiled.
    """

    def __init__(self, module: nn.Module, *, budget_bytes: int | None, min_pixels: int) -> None:
        self.module, self.budget_bytes, self.min_pixels = module, budget_bytes, min_pixels
        self.segments: dict[str, Segment] = {}
        """Segments of the call that saved the most memory, by the names of the first and the last child."""
        self.ends: dict[str, str] = {}
        """Reason for each child that ended a segment, by the name of the child."""
        self.max_pixels = 0
        self._cuts: dict[Any, tuple[int, tuple[int, ...]]] = {}
        """Number of children of a segment, and its pieces per axis; (1, ()) if a child is not tiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the children; compute a segment in tiles if tiles need less memory."""
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        # Tiles need concrete sizes, which a trace lacks, and support no forward-mode derivatives.
        if not isinstance(x, Tensor) or is_traced() or in_forward_mode():
            return type(self.module).forward(self.module, *args, **kwargs)
        named = list(children_of(self.module).items())
        while named and not self._may_tile(x):  # x is small so far, but a later child may upsample it
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
                # Without gradients, the layers would have saved nothing for the backward pass.
                not_held = grid.kept_elements() * computed_itemsize(x) * torch.is_grad_enabled()
                path = first if num_children == 1 else f"{first}-{last}"
                segments[path] = Segment(grid.num_tiles, grid.halo(), not_held)
                x = apply(grid, x)
            del children[:num_children]
        if segments:
            # A container may be called with images of several sizes, so report the call that saved most.
            self.segments = max(segments, self.segments, key=_not_held_bytes)
        return x

    def restore(self) -> None:
        """Restore the container's own forward; a second call does nothing."""
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def _may_tile(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or not 1 <= x.dim() - 2 <= MAX_AXES:
            return False
        # A meta tensor has no memory that tiles could save.
        if not x.is_floating_point() or x.is_meta:
            return False
        # Samples x space; axis 1 is the channels.
        num_pixels = x.numel() // max(1, x.shape[1])
        self.max_pixels = max(self.max_pixels, num_pixels)
        return num_pixels >= self.min_pixels

    def _segment(self, children: Sequence[Child], x: Tensor) -> tuple[int, Grid | None]:
        """Return the number of children to compute next, and their tiles; (1, None) if no tiles are used."""
        run: list[tuple[LocalLayer, ...]] = []
        for _, _, found in children:
            if isinstance(found, str):
                break
            run.append(found)
        # An in-place layer at the front would overwrite pixels that the next tile reads as its halo.
        if not run or not run[0] or overwrites_input([layer for layers in run for layer in layers]):
            return 1, None
        # All inputs of the choice: the run of local children, the input, and what each layer keeps.
        key = (
            len(children), len(run), x.shape, computed_itemsize(x), x.requires_grad,
            tuple(layer.keeps for layers in run for layer in layers),
        )  # fmt: skip
        # Cache the choice, because a search takes milliseconds. Equal keys give the same cut.
        if key not in self._cuts:
            self._cuts[key] = self._best_cut(run, x)
        num_children, pieces = self._cuts[key]
        layers = [layer for part in run[:num_children] for layer in part]
        return num_children, Grid.of(layers, x, pieces) if pieces else None

    def _best_cut(self, run: Sequence[tuple[LocalLayer, ...]], x: Tensor) -> tuple[int, tuple[int, ...]]:
        """Find the segment whose tiles save the most memory; return its number of children and its pieces."""
        best, most_saved = (1, ()), 0
        # Try the longest segment first; a shorter segment must save strictly more.
        for num_children in range(len(run), 0, -1):
            layers = [layer for part in run[:num_children] for layer in part]
            try:
                grid = choose_grid(layers, x, self.budget_bytes)
            except ValueError:  # if x does not fit the layers, the layers themselves raise a clearer error
                return 1, ()
            saved = grid.saved_elements(is_input_trained=x.requires_grad)
            if grid.num_tiles > 1 and saved > most_saved:
                best, most_saved = (num_children, grid.pieces), saved
        return best


def _not_held_bytes(segments: dict[str, Segment]) -> int:
    return sum(each.not_held_bytes for each in segments.values())
