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
}
"""Activations that the kernels compute. Not the exact GELU: erf spills registers."""
ACTIVATION_GRADIENTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
"""From the gradient of an activation's result, and its input."""


def gemm(
    a: Float[Tensor, "*batch m k"],
    b: Float[Tensor, "*batch k n"],
    c: Float[Tensor, "*batch m n"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Float[Tensor, " n"] | None = None,
    activation: str | None = None,
) -> Float[Tensor, "*batch m n"]:
    """Compute `activation(alpha * a @ b + beta * c + bias)` in float64.

    As in BLAS, `a` and `b` are not read where `alpha` is 0, and `c` is not where `beta` is 0: NaN in them
    does not reach the result then.

    Example:
        >>> gemm(torch.ones(2, 3), torch.ones(3, 2), alpha=2.0, bias=torch.tensor([0.0, 1.0]))
        tensor([[6., 7.],
                [6., 7.]], dtype=torch.float64)
    """
    a, b = (a, b) if alpha else (torch.zeros_like(a), torch.zeros_like(b))
    result = alpha * (a.double() @ b.double())
    if c is not None and beta:
        result = result + beta * c.double()
    if bias is not None:
        result = result + bias.double()
    return ACTIVATIONS[activation](result) if activation else result
