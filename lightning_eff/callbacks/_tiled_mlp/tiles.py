"""A module's forward in tiles of its tokens, each under a non-reentrant checkpoint.

    y = cat(f(x[0:n]), f(x[n:2n]), ...)        x [*batch, T, C] as [T, C], n tokens a tile

The forward pass keeps x alone; the backward pass computes one tile at a time again. Autograd adds the tiles'
gradients of a weight before its hooks run, so DDP, FSDP2, ZeRO and an optimizer in the backward pass see one.

Within a block that is recomputed itself, a tile would be computed three times: by the block's forward, by its
recomputation, and by the tile's own. So the inputs of all tiles are saved before the first tile is computed:
a recomputation of the block ends when it has computed the last tensor that it saved, which is then the MLP's
input, and no tile runs in it. What a block saves after its MLP (the mask of a dropout, the input of a norm)
still makes it run the tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_eff.core.call_state import CallState, stops_early
from lightning_eff.core.shards import GatheredAtOnce

NUM_WIDE = 5
"""Tensors of tokens x widest in the backward pass of a gated MLP: two products, an activation, their product,
and a gradient."""
MIN_BUDGET_BYTES = 64 << 20


def split(x: Tensor, tile_tokens: int) -> tuple[Tensor, ...]:
    """Return the tiles of an input; they have as many axes as it has, since a forward may count them.

    Example:
        >>> [list(tile.shape) for tile in split(torch.ones(3, 5, 2), 7)]
        [[1, 7, 2], [1, 7, 2], [1, 1, 2]]
    """
    return x.reshape(*([1] * (x.dim() - 2)), -1, x.shape[-1]).split(tile_tokens, dim=-2)


def join(outputs: list[Tensor], x: Tensor) -> Tensor:
    """Return the outputs of the tiles of `x` as one tensor with its samples."""
    return torch.cat(outputs, dim=-2).reshape(*x.shape[:-1], -1)


class TiledForward:
    """Replaces the forward of a token-wise module: it is assigned to the attribute `forward`.

    Args:
        module: The module.
        widest: Features of its widest activation.
        ranks: Numbers of axes of inputs that are tiled; others are computed in one piece.
        budget_bytes: Bytes that the wide activations of one tile may take; None for the larger of 64 MiB and
            the input's own.
        min_tokens: Inputs with fewer tokens are not tiled.
    """

    def __init__(
        self,
        module: nn.Module,
        widest: int,
        ranks: tuple[int, ...],
        *,
        budget_bytes: int | None,
        min_tokens: int,
    ) -> None:
        self.module, self.widest, self.ranks = module, widest, ranks
        self.budget_bytes, self.min_tokens = budget_bytes, min_tokens
        self._stops_early = stops_early(module)
        self._gathered: GatheredAtOnce | None = None
        self.max_tokens = 0
        self.max_tiles = 0
        self.largest = (0, 0)
        """Wide activations of the largest input, and its budget, in bytes."""
        self.not_held_bytes = 0
        self.recomputed_tokens = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module; in one piece where it is called with more than one tensor."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or torch.compiler.is_compiling():
            return self._compute(*args, **kwargs)
        num_tiles = self.num_tiles(x) if x.dim() in self.ranks else 1
        return self._compute(x) if num_tiles == 1 else self._tiled(x, num_tiles)

    def num_tiles(self, x: Tensor) -> int:
        """Return the number of tiles for an input, and note it for the report."""
        num_tokens = math.prod(x.shape[:-1])
        device = x.device.type
        is_cast = torch.is_autocast_enabled(device) and x.dtype == torch.float32
        itemsize = torch.get_autocast_dtype(device).itemsize if is_cast else x.itemsize
        wide_bytes = num_tokens * self.widest * NUM_WIDE * itemsize
        budget_bytes = self.budget_bytes or max(MIN_BUDGET_BYTES, x.nbytes)
        num_tiles = min(-(-wide_bytes // budget_bytes), num_tokens) if num_tokens >= self.min_tokens else 1
        self.largest = max(self.largest, (wide_bytes, budget_bytes))
        self.max_tokens, num_tiles = max(self.max_tokens, num_tokens), max(num_tiles, 1)
        self.max_tiles = max(self.max_tiles, num_tiles)
        self.not_held_bytes = max(self.not_held_bytes, wide_bytes - wide_bytes // num_tiles)
        return num_tiles

    def attach(self) -> None:
        """Replace the module's forward, and let its weights be gathered once for all tiles.

        Stage 3 of ZeRO would gather them in every tile otherwise, and ranks may have other numbers of tiles.
        """
        self.module.forward = self
        self._gathered = GatheredAtOnce(self.module)

    def restore(self) -> None:
        """Give the module its own forward back; a second call does nothing."""
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._gathered is not None:
                self._gathered.undo()

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def _tiled(self, x: Tensor, num_tiles: int) -> Tensor:
        tiles = split(x, -(-math.prod(x.shape[:-1]) // num_tiles))
        if not torch.is_grad_enabled():
            outputs = [self._compute(tile) for tile in tiles]
        else:
            saved = [_save(tile) for tile in tiles]  # before any tile runs
            state = CallState(self.module)
            with saved_tensors_hooks(_same, _same):  # what the tiles save is no block's to recompute
                outputs = [self._checkpointed(*each, state) for each in zip(tiles, saved, strict=True)]
            state.end_forward()
        return join(outputs, x)

    def _checkpointed(self, tile: Tensor, saved: Tensor, state: CallState) -> Tensor:
        first = [tile]  # taken by the first run, so that the checkpoint does not hold it
        run = functools.partial(self._run, first, state)
        # `saved` has no elements: it says of which device random numbers and autocast are restored.
        early: Any = {"early_stop": self._stops_early}
        return checkpoint(run, saved, use_reentrant=False, **early)  # pyright: ignore[reportReturnType]

    def _run(self, first: list[Tensor], state: CallState, saved: Tensor) -> Any:
        if first:
            return self._compute(first.pop())
        node: Any = saved.grad_fn
        (tile,) = node.saved_tensors
        self.recomputed_tokens += tile.shape[-2]
        with state.again("a tiled MLP"):
            return self._compute(tile)


class _Save(torch.autograd.Function):
    """Saves a tensor for whoever has the result, which has no elements."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, needs_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def _save(x: Tensor) -> Tensor:
    needs_grad = torch.empty(0, requires_grad=True)  # for a node also where x needs no gradient
    apply: Callable[..., Tensor] = _Save.apply  # pyright: ignore[reportAssignmentType]
    return apply(x, needs_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor
