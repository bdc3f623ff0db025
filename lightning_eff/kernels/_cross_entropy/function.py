"""The autograd function of a loss in tiles, in its two modes.

*In forward* (a scalar, whose gradient is known but for a factor): the three GEMMs run in the forward pass,
and the backward pass multiplies by the factor. *In backward* (values of rows; float16, whose gradients would
underflow without the loss scale; a recomputed block, which would compute them twice): the forward pass keeps
nothing but its inputs, and the backward pass computes the logits again, a fourth GEMM.

Gradients are returned through the function's own inputs, so that hooks, DDP, FSDP2, tied weights and
optimizers in the backward pass see one gradient of a weight.

Why not an inner `backward()` of each tile: hooks fire once a tile, and DDP rejects the second. Why not a
checkpoint of each tile: autograd adds each tile's dW [V, D] to the last one, which takes its memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels._cross_entropy.tiles import Projection, RowLoss, gradients_of, values_of


@dataclass(frozen=True, eq=False)
class Plan:
    """How a loss is computed.

    Args:
        loss: What is made of the logits.
        dtype: In which they are multiplied.
        index: The rows that have a loss; None for all.
        tile_rows: Rows of a tile.
        factor: Of the sum of the values, a scalar whose gradients are formed in forward; None for values.
    """

    loss: RowLoss
    dtype: torch.dtype
    index: Tensor | None
    tile_rows: int
    factor: Tensor | None = None

    def projection(self, bias: Tensor | None, pairs: Sequence[Tensor]) -> Projection:
        """Return the projection in the dtype of its products."""
        cast = [each.detach().to(self.dtype) for each in pairs]
        low_bias = None if bias is None else bias.detach()
        return Projection(list(zip(cast[::2], cast[1::2], strict=True)), low_bias, self.index, self.tile_rows)

    def gradients(
        self, grad: Tensor, needs: Sequence[bool], bias: Tensor | None, pairs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return what `gradients_of` does, of the inputs that need a gradient.

        Args:
            grad: Gradients of the values [N, k]; with a factor, that of the scalar.
            needs: Whether bias and pairs need one.
            bias: [V], or None.
            pairs: Rows and weight of each product.
        """
        grads = grad
        if self.factor is not None:
            grads = (grad * self.factor).expand(len(pairs[0]), self.loss.num_values)
        receivers = [each if needed else None for each, needed in zip((bias, *pairs), needs, strict=True)]
        with torch.autocast(pairs[0].device.type, enabled=False):
            return gradients_of(self.projection(bias, pairs), self.loss, grads, receivers)


class TiledLoss(torch.autograd.Function):
    """The values of rows [N, k], or with a factor their sum times it."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, bias: Tensor | None, *pairs: Tensor) -> Tensor:
        """Compute values, and with a factor the gradients too."""
        ctx.save_for_backward(bias, *pairs)
        ctx.plan, ctx.gradients = plan, None
        if plan.factor is None:
            with torch.autocast(pairs[0].device.type, enabled=False):
                return values_of(plan.projection(bias, pairs), plan.loss)
        one = torch.ones_like(plan.factor)
        values, ctx.gradients = plan.gradients(one, ctx.needs_input_grad[1:], bias, pairs)
        return values.sum() * plan.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients that forward has formed, times `grad`; else form them.

        Raises:
            RuntimeError: A second derivative is prepared.
        """
        if torch.is_grad_enabled():  # torch would take these gradients for constants
            raise RuntimeError(
                "a loss in tiles has no second derivative: compute whole logits for gradient penalties"
            )
        bias, *pairs = ctx.saved_tensors  # raises where the graph was freed
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None:
            return None, *(None if each is None else each.mul_(grad) for each in gradients)
        # Also the second backward pass of a graph that was retained.
        return None, *ctx.plan.gradients(grad, ctx.needs_input_grad[1:], bias, pairs)[1]
