"""The autograd function of a chain of layers in tiles.

The forward pass keeps the input and the weights alone. The backward pass computes one tile at a time again,
and adds its gradients into one tensor of the input's size, and one of each weight's. They are returned
through the function's own inputs, so that hooks, DDP, FSDP2 and optimizers in the backward pass see one.

Why not slices of x under autograd, each checkpointed: the backward pass of a slice makes a tensor of zeros as
large as x, for every tile.

Why `_Save`: what a surrounding checkpoint has to save is saved before any tile runs, so that its
recomputation of a block that ends here stops before the tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states
from typing_extensions import override

from lightning_eff.kernels._conv.grid import Grid, Tile


@dataclass(eq=False)
class Plan:
    """Tiles of a chain of layers, and what the computation of a tile has to find again.

    Args:
        grid: The tiles.
        device: Of the input.
    """

    grid: Grid
    device: torch.device
    _contexts: Callable[[], Any] = field(init=False)
    _random: _RandomState | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        kind = self.device.type
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Casts of weights are not cached: those without gradients would be found by the code around.
        self._contexts = lambda: torch.autocast(kind, dtype, enabled=is_on, cache_enabled=False)
        if any(layer.draws for layer in self.grid.chain.layers):
            self._random = _RandomState(self.device)

    def forward(self, x: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the output of the last layer, whose tiles are computed one after another."""
        y: Tensor | None = None
        with torch.no_grad(), self._contexts():
            for tile in self.grid.tiles():
                part = self._run(tile, x[tile.index(0)], tensors)
                y = self._output(part) if y is None else y
                y[tile.index(-1)] = part
                del part
        if y is None:
            raise RuntimeError("a grid without tiles")
        return y

    def backward(
        self, x: Tensor, tensors: Sequence[Tensor | None], grad: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of x and of the tensors, None for those that need none."""
        leaves = [
            None if each is None else each.detach().requires_grad_(need)
            for each, need in zip(tensors, needs[1:], strict=True)
        ]
        sums: list[Tensor | None] = [torch.zeros_like(x) if needs[0] else None, *([None] * len(leaves))]
        with contextlib.nullcontext() if self._random is None else self._random.again():
            for tile in self.grid.tiles():
                self._add_gradients(tile, x, leaves, grad, sums)
        return [
            None if total is None or each is None else total.to(each.dtype)
            for total, each in zip(sums, (x, *tensors), strict=True)
        ]

    def _add_gradients(
        self,
        tile: Tile,
        x: Tensor,
        leaves: Sequence[Tensor | None],
        grad: Tensor,
        sums: list[Tensor | None],
    ) -> None:
        part = x[tile.index(0)].detach().requires_grad_(sums[0] is not None)
        with torch.enable_grad(), self._contexts():
            y = self._run(tile, part, leaves)
        inputs = [(index, each) for index, each in enumerate((part, *leaves)) if each is not None]
        needed = {index: each for index, each in inputs if each.requires_grad}
        grads: Any = torch.autograd.grad(y, list(needed.values()), grad[tile.index(-1)], allow_unused=True)
        for index, each in zip(needed, grads, strict=True):
            total = sums[index]
            if each is None:
                continue
            if index == 0 and total is not None:
                total[tile.index(0)] += each
            elif total is None:  # of 16 bits are added in 32
                sums[index] = each.to(torch.promote_types(each.dtype, torch.float32))
            else:
                total += each

    def _run(self, tile: Tile, part: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        first = 0
        for layer, place in zip(self.grid.chain.layers, self.grid.places(tile), strict=True):
            end = first + len(layer.tensors)
            part, first = layer.compute(part, tensors[first:end], place), end
        return part

    def _output(self, part: Tensor) -> Tensor:
        """Return the memory of the output, in the memory format of a tile."""
        chain = self.grid.chain
        shape = (chain.samples, chain.channels[-1], *chain.lengths[-1])
        last: Any = {4: torch.channels_last, 5: torch.channels_last_3d}.get(part.dim())
        is_last = last is not None and part.is_contiguous(memory_format=last) and not part.is_contiguous()
        memory_format = last if is_last else torch.contiguous_format
        return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=memory_format)


class _RandomState:
    """Random numbers of the forward pass, to draw the same again; as torch's checkpoint does."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cpu = device, torch.get_rng_state()
        self._devices, self._states = get_device_states(torch.empty(0, device=device))

    @contextlib.contextmanager
    def again(self) -> Generator[None]:
        """Draw from the state of the forward pass, and go on afterwards as if nothing had been drawn."""
        kind = self._device.type if self._devices else "cuda"
        with torch.random.fork_rng(self._devices, device_type=kind):
            torch.set_rng_state(self._cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=kind)
            yield


class _Save(torch.autograd.Function):
    """Saves tensors for whoever has the result, which has no elements."""

    @staticmethod
    @override
    def forward(ctx: Any, needs_grad: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return needs_grad.new_empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Tiled(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, plan: Plan, saved: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.plan, ctx.saved = plan, saved.grad_fn
        x, *others = tensors
        return plan.forward(_given(x), others)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch would take these gradients for constants
            raise RuntimeError(
                "layers in tiles have no second derivative: compute them without tiles for gradient penalties"
            )
        x, *others = ctx.saved.saved_tensors  # raises where the graph was freed, or a weight has changed
        return None, None, *ctx.plan.backward(x, others, grads[0], ctx.needs_input_grad[2:])


def apply(grid: Grid, x: Tensor) -> Tensor:
    """Return the output of a chain of layers for x, computed in the tiles of a grid."""
    plan = Plan(grid, x.device)
    tensors = [each for layer in grid.chain.layers for each in layer.tensors]
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (x, *tensors)):
        return plan.forward(x, tensors)
    needs_grad = torch.empty(0, device=x.device, requires_grad=True)
    save: Callable[..., Tensor] = _Save.apply  # pyright: ignore[reportAssignmentType]
    run: Callable[..., Tensor] = _Tiled.apply  # pyright: ignore[reportAssignmentType]
    return run(plan, save(needs_grad, x, *tensors), x, *tensors)


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("no input")
    return tensor
