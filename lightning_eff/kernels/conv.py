"""Compute chains of convolutions, pooling and activations in spatial tiles, forward and backward.

`callbacks/tiled_conv` uses this module for the segments of a model; `tiled` is the public function. Each tile
of the output is computed from a tile of the input, which is larger by a halo. The backward pass computes each
tile again. So intermediate outputs exist for only one tile at a time, and the result matches the untiled
result up to rounding. Padding is added only at the borders of the image.

    input   |   halo [ tile ] halo   |      conv 3x3, conv 3x3: a halo of 2
    output  |        [ tile ]        |

The forward pass saves only the input and the weights for the backward pass. The backward pass sums the
gradients of all tiles in one tensor of the input's size, and in one tensor per weight. The autograd function
returns these sums for its inputs, so hooks, DDP, FSDP2 and optimizers that step in the backward pass get one
gradient per weight.

Why not checkpointed slices of x under autograd: the backward pass of each slice allocates a tensor of zeros
as large as x.

Why 1x1 and patch convolutions use torch's convolution, not a view and a matrix product: torch's convolution
needs no more memory (benchmarks/tiled_conv.py). On a CPU a matrix product is faster for few outputs and for
patches. But a matrix product copies the patches, and computes one weight gradient per sample in
channels-first memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states
from typing_extensions import override

from lightning_eff.core.arguments import Positive, check_value
from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels.conv_grid import Grid, Tile, choose_grid
from lightning_eff.kernels.conv_layers import LocalLayer, overwrites_input, read_module


def tiled(
    segment: nn.Module | Iterable[nn.Module],
    x: Float[Tensor, "b c *space"],
    *,
    tiles: int | Sequence[int] | None = None,
    budget_mib: float | None = None,
) -> Float[Tensor, "b o *out"]:
    """Compute a chain of layers in spatial tiles.

    Supported: convolutions with zero padding (any stride, dilation and groups), max and average pooling,
    pointwise activations, dropout, batch normalization in evaluation mode, and layer normalization over
    channels. Dropout draws a mask per tile. Second derivatives are not supported.

    Args:
        segment: An `nn.Sequential`, a layer, or layers in their order.
        x: Input with one to three spatial axes.
        tiles: Number of pieces of each spatial axis of the output, or one number for all axes. If `tiles` is
            None, `budget_mib` determines the number, and at most a quarter of the outputs is computed more
            than once.
        budget_mib: Memory in MiB for one tile's layer outputs and two gradients. None means the larger of 64
            MiB and a quarter of the size of `x`. Less would save little, because `x` and two gradients of
            about its size are in memory anyway.

    Returns:
        The output of the last layer.

    Raises:
        ConfigError: A layer is not supported: it needs more than a window of pixels (statistics, mirrored
            padding), scatters its input (transposed convolution, upsampling), has an unsupported class, hooks
            or a custom forward, or would overwrite `x`. Also raised if `tiles` or `budget_mib` is not
            positive, or if both are given.
        ValueError: `x` has a different number of axes than the layers expect, or is too small for the layers.
        RuntimeError: A second derivative is requested, or weights have changed before the backward pass.

    Example:
        >>> layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        >>> x = torch.randn(1, 1, 9, 9)
        >>> torch.allclose(tiled(layers, x, tiles=2), layers(x), atol=1e-6)
        True
        >>> tiled([nn.InstanceNorm2d(1)], x, tiles=2)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: segment='InstanceNorm2d': expected local layers: ...
    """
    # A ModuleList has no forward, so it counts as a list of layers.
    is_module = isinstance(segment, nn.Module) and not isinstance(segment, nn.ModuleList)
    modules: list[nn.Module] = [segment] if is_module else list(segment)  # pyright: ignore[reportArgumentType, reportAssignmentType]
    num_axes = x.dim() - 2
    layers = read_segment(modules, num_axes)
    check_value("budget_mib", budget_mib, Positive | None)
    if budget_mib is not None and tiles is not None:
        raise ConfigError(key="budget_mib", value=budget_mib, allowed="None where tiles are given")
    pieces: Any = tuple(tiles) if isinstance(tiles, (tuple, list)) else (tiles,) * num_axes
    if tiles is not None and (
        len(pieces) != num_axes or not all(isinstance(each, int) and each >= 1 for each in pieces)
    ):
        raise ConfigError(key="tiles", value=tiles, allowed=f"{num_axes} whole numbers of at least 1, or one")
    if layers and x.numel():
        budget_bytes = None if budget_mib is None else budget_mib * 2**20
        grid = Grid.of(layers, x, (1, *pieces)) if tiles is not None else choose_grid(layers, x, budget_bytes)
        if grid.num_tiles > 1:
            return apply(grid, x)
    for module in modules:
        x = module(x)
    return x


def read_segment(modules: Iterable[nn.Module], num_axes: int) -> tuple[LocalLayer, ...]:
    """Return the layers of modules, for an input with `num_axes` spatial axes.

    Raises:
        ConfigError: A module cannot be computed in tiles, or overwrites the input of the segment.
    """
    layers: list[LocalLayer] = []
    for module in modules:
        found = read_module(module, num_axes)
        if isinstance(found, str):
            raise ConfigError(key="segment", value=type(module).__name__, allowed=f"local layers: {found}")
        layers += found
        if overwrites_input(layers):
            allowed = "a first layer that does not overwrite the input: set inplace=False"
            raise ConfigError(key="segment", value=type(module).__name__, allowed=allowed)
    return tuple(layers)


def apply(grid: Grid, x: Float[Tensor, "b c *space"]) -> Float[Tensor, "b o *out"]:
    """Compute the layers of a grid for x, tile by tile."""
    run = _Run(grid, x.device)
    tensors = [each for layer in grid.layers for each in layer.tensors]
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (x, *tensors)):
        return run.forward(x, tensors)
    needs_grad = torch.empty(0, device=x.device, requires_grad=True)
    save: Callable[..., Tensor] = _Save.apply  # pyright: ignore[reportAssignmentType]
    compute: Callable[..., Tensor] = _Tiled.apply  # pyright: ignore[reportAssignmentType]
    return compute(run, save(needs_grad, x, *tensors), x, *tensors)


class _Save(torch.autograd.Function):
    """Save tensors for the backward pass of `_Tiled`; the result has no elements.

    A checkpointed block is recomputed until all its saved tensors exist. `_Save` runs before the first tile.
    So if a checkpointed block ends with these layers, the recomputation stops before their tiles.
    """

    @staticmethod
    @override
    def forward(ctx: Any, needs_grad: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return needs_grad.new_empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        # `_Tiled` returns the gradients of all tensors.
        return (None,) * len(ctx.needs_input_grad)


class _Tiled(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, run: _Run, saved: Tensor, x: Tensor, *tensors: Tensor | None) -> Tensor:
        # The tensors are saved in the node of `_Save`, where activation checkpointing can free and restore
        # them.
        ctx.run, ctx.saved = run, saved.grad_fn
        return run.forward(x, tensors)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch would treat these gradients as constants
            raise RuntimeError(
                "layers in tiles have no second derivative: compute them without tiles for gradient penalties"
            )
        tensors = ctx.saved.saved_tensors  # raises if the graph was freed or a weight has changed
        return None, None, *ctx.run.backward(tensors, grads[0], ctx.needs_input_grad[2:])


class _Run:
    """A forward pass, and the state that the backward pass needs to compute tiles again.

    Args:
        grid: The tiles.
        device: The device of the input.
    """

    def __init__(self, grid: Grid, device: torch.device) -> None:
        self._grid, kind = grid, device.type
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Casts of weights are not cached, because surrounding code would reuse these casts, which have no
        # gradient. The backward pass runs outside of the caller's autocast, so the state of autocast is kept
        # here.
        self._autocast = lambda: torch.autocast(kind, dtype, enabled=is_on, cache_enabled=False)
        draws = any(layer.draws for layer in grid.layers)
        self._redraw = _redraw(device) if draws else contextlib.nullcontext

    def forward(self, x: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        """Compute the output of the last layer."""
        y: Any = None
        with torch.no_grad(), self._autocast():
            for tile in self._grid.tiles():
                part = self._compute(tile, x[tile.source], tensors)
                # The first tile determines the dtype and the memory format of the output.
                y = self._empty_output(part) if y is None else y
                y[tile.target] = part
                del part  # free memory before the next tile is computed
        return y

    def backward(
        self, tensors: Sequence[Tensor | None], grad: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of x (the first tensor) and of each weight that needs a gradient."""
        x: Any = tensors[0]
        # Detached, so that `torch.autograd.grad` on a tile ends here and calls no hooks of the parameters.
        leaves = [
            None if each is None else each.detach().requires_grad_(need)
            for each, need in zip(tensors[1:], needs[1:], strict=True)
        ]
        # Each tile adds to its part of x's gradient; a weight's sum starts with the first tile's gradient.
        sums: list[Tensor | None] = [torch.zeros_like(x) if needs[0] else None, *([None] * len(leaves))]
        with self._redraw():
            for tile in self._grid.tiles():
                self._add_gradients(tile, x, leaves, grad, sums)
        return [
            None if total is None or each is None else total.to(each.dtype)
            for total, each in zip(sums, tensors, strict=True)
        ]

    def _add_gradients(
        self,
        tile: Tile,
        x: Tensor,
        leaves: Sequence[Tensor | None],
        grad: Tensor,
        sums: list[Tensor | None],
    ) -> None:
        """Compute a tile again, and add its gradients with respect to x and the leaves to `sums`."""
        part = x[tile.source].detach().requires_grad_(sums[0] is not None)
        with torch.enable_grad(), self._autocast():
            y = self._compute(tile, part, leaves)
        needed = {i: t for i, t in enumerate((part, *leaves)) if t is not None and t.requires_grad}
        grads: Any = torch.autograd.grad(y, list(needed.values()), grad[tile.target], allow_unused=True)
        for index, each in zip(needed, grads, strict=True):
            total = sums[index]
            if each is None:
                continue
            if total is None:  # 16-bit gradients are added in float32
                sums[index] = each.to(torch.promote_types(each.dtype, torch.float32))
            elif index == 0:  # tiles of x overlap by their halos
                total[tile.source] += each
            else:
                total += each

    def _compute(self, tile: Tile, part: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        first = 0
        for layer, padding in zip(self._grid.layers, tile.padding, strict=True):
            end = first + len(layer.tensors)
            # `tensors` is one flat list of all layers' weights: each layer takes its own number of tensors.
            part, first = layer.compute(part, tensors[first:end], padding), end
        return part

    def _empty_output(self, part: Tensor) -> Tensor:
        """Return an empty output tensor, in the memory format of a tile."""
        shape = (self._grid.num_samples, self._grid.channels[-1], *self._grid.lengths[-1])
        last: Any = {4: torch.channels_last, 5: torch.channels_last_3d}.get(part.dim())
        # A tensor may be contiguous in both formats; then the default format is used.
        is_last = last is not None and part.is_contiguous(memory_format=last) and not part.is_contiguous()
        memory_format = last if is_last else torch.contiguous_format
        return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=memory_format)


def _redraw(device: torch.device) -> Callable[[], Any]:
    """Return a function that opens a context with the current random state, as torch's checkpoint does."""
    cpu = torch.get_rng_state()
    devices, states = get_device_states(torch.empty(0, device=device))
    # `fork_rng` needs a device type even without devices.
    kind = device.type if devices else "cuda"

    @contextlib.contextmanager
    def again() -> Generator[None]:
        with torch.random.fork_rng(devices, device_type=kind):  # restores the generators' state afterwards
            torch.set_rng_state(cpu)
            if devices:
                set_device_states(devices, states, device_type=kind)
            yield

    return again
