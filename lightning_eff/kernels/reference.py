"""Compute what the kernels compute in plain PyTorch and float64, as the reference for their tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": lambda x: F.silu(x[..., 0::2]) * x[..., 1::2],
}
"""Activations that the kernels compute. Not the exact GELU: erf spills registers."""
GATED = ("swiglu",)
"""Activations that compute one column from two neighbours, gate and up."""


def gemm(
    a: Float[Tensor, "*batch m k"],
    b: Float[Tensor, "*batch k n"],
    c: Float[Tensor, "*batch m n"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Float[Tensor, " n"] | None = None,
    activation: str | None = None,
    scale_a: Float[Tensor, " *m"] | None = None,
    scale_b: Float[Tensor, " *n"] | None = None,
    gradient_at: Float[Tensor, "*batch m columns"] | None = None,
) -> Float[Tensor, "*batch m columns"]:
    """Compute `activation(alpha * (scale_a * a) @ (b * scale_b) + beta * c + bias)` in float64.

    With `gradient_at` the result is `(...) * activation'(gradient_at)` instead.

    As in BLAS, `a` and `b` are not read where `alpha` is 0, and `c` is not where `beta` is 0: NaN in them
    does not reach the result then.

    Example:
        >>> gemm(torch.ones(2, 3), torch.ones(3, 2), alpha=2.0, bias=torch.tensor([0.0, 1.0]))
        tensor([[6., 7.],
                [6., 7.]], dtype=torch.float64)
    """
    if alpha:
        product = torch.matmul(a.double(), b.double())
        product = product * (scale_a.double().reshape(-1, 1) if scale_a is not None else 1.0)
        product = product * (scale_b.double().reshape(1, -1) if scale_b is not None else 1.0)
        result = alpha * product
    else:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        result = torch.zeros(*batch, a.shape[-2], b.shape[-1], dtype=torch.float64, device=a.device)
    if c is not None and beta:
        result = result + beta * c.double()
    if bias is not None:
        result = result + bias.double()
    if activation and gradient_at is not None:
        return activation_gradient(result, gradient_at.double(), activation)
    return ACTIVATIONS[activation](result) if activation else result


def activation_gradient(grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    """Return `grad * activation'(pre)`.

    Args:
        grad: The gradient of the activation's result.
        pre: The activation's input; for `swiglu` it has twice the columns of `grad`, as the result has.
        activation: One of `ACTIVATIONS`.
    """
    if activation == "relu":
        return torch.where(pre <= 0, 0.0, grad)
    if activation == "silu":
        sigmoid = torch.sigmoid(pre)
        return grad * (sigmoid * (1.0 + pre * (1.0 - sigmoid)))
    if activation == "swiglu":
        gate, up = pre[..., 0::2], pre[..., 1::2]
        sigmoid = torch.sigmoid(gate)
        pairs = (grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), grad * gate * sigmoid)
        return torch.stack(pairs, dim=-1).flatten(-2)
    # x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3): (1 + tanh u) / 2 + x (1 - tanh^2 u) u' / 2
    inner = 0.7978845608028654 * pre * (1.0 + 0.044715 * pre * pre)
    tanh = torch.tanh(inner)
    slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * pre * pre)
    return grad * (0.5 * (1.0 + tanh) + 0.5 * pre * (1.0 - tanh * tanh) * slope)
