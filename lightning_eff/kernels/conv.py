"""Chains of convolutions, pooling and activations in spatial tiles, forward and backward.

A tile of the output is computed from the tile of the input that it reads, which is larger by a halo; the
backward pass does so again. So between the layers only one tile exists at a time, and the result is that of
the whole image up to rounding. Padding is added at the borders of the image, and nowhere else.

    input   |   halo [ tile ] halo   |      conv 3x3, conv 3x3: a halo of 2
    output  |        [ tile ]        |

What is computed twice, the halo, is at most a quarter of the layers' outputs where the tiles are chosen here.
Samples have no halo and are divided first.

Why a 1x1 or a patch convolution is torch's too, and not a view and a product of matrices: torch's own holds
no byte more (benchmarks/tiled_conv.py). The product is faster on a CPU for few outputs and for patches, but
patches are then a copy, and in channels-first memory weights of several samples have a gradient each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_eff.core.arguments import Positive, check_value
from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels._conv.function import apply
from lightning_eff.kernels._conv.grid import Chain, Grid, choose
from lightning_eff.kernels._conv.layers import LocalLayer
from lightning_eff.kernels._conv.modules import (
    children_of,
    has_windows,
    is_container,
    overwrites_input,
    read_module,
)

__all__ = [
    "Chain",
    "Grid",
    "LocalLayer",
    "apply",
    "children_of",
    "choose_grid",
    "computed_itemsize",
    "has_windows",
    "is_container",
    "overwrites_input",
    "read_module",
    "read_segment",
    "tiled",
]

MIN_BUDGET_BYTES = 64 << 20


def tiled(
    segment: nn.Module | Iterable[nn.Module],
    x: Float[Tensor, "b c *space"],
    *,
    tiles: int | Sequence[int] | None = None,
    budget_mib: float | None = None,
) -> Float[Tensor, "b o *out"]:
    """Compute layers one after another in spatial tiles.

    Convolutions (also transposed, of any stride, padding, dilation and groups), max and average pooling,
    pointwise activations, dropout, batch normalization in evaluation mode, and nearest upsampling. Dropout
    draws for each tile. There is no second derivative.

    Args:
        segment: An `nn.Sequential`, a layer, or layers in their order.
        x: One to three spatial axes.
        tiles: Pieces of each spatial axis of the output, or of all of them; None for as many as
            `budget_mib` needs, with a halo of at most a quarter.
        budget_mib: MiB that the layers' outputs and two gradients may take on one tile; None for the larger
            of 64 and a quarter of `x`, which is held with two gradients of about its size anyway.

    Returns:
        The output of the last layer.

    Raises:
        ConfigError: A layer needs more than a window of pixels (statistics, a circular padding), is of a
            class that is not known, has hooks or a forward of its own, or would overwrite `x`; `tiles` or
            `budget_mib` is not positive, or both are given.
        ValueError: `x` has other axes than the layers, or is too small for them.
        RuntimeError: A second derivative is prepared, or weights have changed before the backward pass.

    Example:
        >>> layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        >>> x = torch.randn(1, 1, 9, 9)
        >>> torch.allclose(tiled(layers, x, tiles=2), layers(x), atol=1e-6)
        True
        >>> tiled([nn.InstanceNorm2d(1)], x, tiles=2)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: segment='InstanceNorm2d': expected local layers: ...
    """
    is_module = isinstance(segment, nn.Module) and not isinstance(segment, nn.ModuleList)
    modules: list[nn.Module] = [segment] if is_module else list(segment)  # pyright: ignore[reportArgumentType, reportAssignmentType]
    layers = read_segment(modules)
    check_value("budget_mib", budget_mib, Positive | None)
    if budget_mib is not None and tiles is not None:
        raise ConfigError(key="budget_mib", value=budget_mib, allowed="None where tiles are given")
    pieces = None if tiles is None else _pieces(tiles, x.dim() - 2)
    if layers and x.numel():
        chain = Chain.of(layers, x)
        budget_bytes = None if budget_mib is None else budget_mib * 2**20
        grid = choose_grid(chain, x, budget_bytes) if pieces is None else Grid(chain, (1, *pieces))
        if grid.num_tiles > 1:
            return apply(grid, x)
    for module in modules:
        x = module(x)
    return x


def _pieces(tiles: int | Sequence[int], num_axes: int) -> tuple[int, ...]:
    """Return the pieces of each spatial axis."""
    pieces: Any = (tiles,) * num_axes if not isinstance(tiles, (tuple, list)) else tuple(tiles)
    if len(pieces) != num_axes or not all(isinstance(each, int) and each >= 1 for each in pieces):
        raise ConfigError(key="tiles", value=tiles, allowed=f"{num_axes} whole numbers of at least 1, or one")
    return pieces


def choose_grid(chain: Chain, x: Tensor, budget_bytes: float | None) -> Grid:
    """Return the tiles of a chain for an input.

    Args:
        chain: Of the sizes of `x`.
        x: The input.
        budget_bytes: As `budget_mib` of `tiled`, in bytes.
    """
    budget_bytes = max(MIN_BUDGET_BYTES, x.nbytes // 4) if budget_bytes is None else budget_bytes
    return choose(chain, budget_bytes / computed_itemsize(x), is_cpu=x.device.type == "cpu")


def computed_itemsize(x: Tensor) -> int:
    """Return the bytes of a value of the layers' outputs."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype == torch.float32
    return torch.get_autocast_dtype(device).itemsize if is_cast else x.itemsize


def read_segment(modules: Iterable[nn.Module]) -> tuple[LocalLayer, ...]:
    """Return modules as layers in tiles.

    Raises:
        ConfigError: One cannot be computed in tiles, or overwrites the input of all.
    """
    layers: list[LocalLayer] = []
    for module in modules:
        found = read_module(module)
        if isinstance(found, str):
            raise ConfigError(key="segment", value=type(module).__name__, allowed=f"local layers: {found}")
        layers += found
        if overwrites_input(layers):
            allowed = "a first layer that does not overwrite the input: set inplace=False"
            raise ConfigError(key="segment", value=type(module).__name__, allowed=allowed)
    return tuple(layers)
