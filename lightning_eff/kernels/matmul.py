"""Compute D = activation(alpha * A @ B + beta * C + bias), by our Triton kernels or by torch's library.

A call checks its operands once (operands.py), decides once who computes (dispatch.py), and passes that
decision on: to library.py, or through operator.py and launch.py to the kernels (gemm_kernels.py).

Example:
    >>> gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2), alpha=2.0, beta=-1.0)
    tensor([[5., 5.],
            [5., 5.]])
"""

# pyright: basic
from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_eff.kernels import dispatch, library, operator
from lightning_eff.kernels.operands import (
    Operands,
    check_no_gradient,
    check_operands,
    check_out,
    fold_batch,
    overlaps_operand,
)


def gemm(
    a: Float[Tensor, "*batch_a m k"],
    b: Float[Tensor, "*batch_b k n"],
    c: Float[Tensor, "*batch_c m n"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Float[Tensor, " n"] | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: Float[Tensor, "*batch m columns"] | None = None,
    scale_a: Float[Tensor, " m"] | None = None,
    scale_b: Float[Tensor, " n"] | None = None,
    gradient_at: Float[Tensor, "*batch m columns"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch m columns"]:
    """Compute `activation(alpha * A @ B + beta * C + bias)`, accumulating in float32 (float64 for float64).

    Args:
        a: `[*batch, M, K]` of any strides, so that a transpose costs nothing.
        b: `[*batch, K, N]`; batch axes are broadcast as in `torch.matmul`.
        c: `[*batch, M, N]`, or what broadcasts to it, in any floating-point dtype.
        alpha: Factor of the product; with 0 `a` and `b` are not read, as in BLAS.
        beta: Factor of `c`; with 0 it is not read.
        bias: Added to every row, `[N]`.
        activation: `relu`, `silu`, `gelu_tanh`, or None; or `swiglu`, `silu(gate) * up` with gates in even
            and ups in odd columns, so that the result has N / 2.
        out_dtype: Of the result; None for that of `a`, or bfloat16 for float8.
        out: Receives the result, which is then `out`; it may be `c`. Without gradients, as everywhere in
            torch. If it overlaps another operand, the result is computed in new memory and copied.
        scale_a: Factor of each row of `a`, float32 `[M]` or one value; for float8.
        scale_b: Factor of each column of `b`, `[N]`.
        gradient_at: Input of `activation`. The result is then the gradient there, `(...) *
            activation'(gradient_at)`, with 2 N columns for `swiglu`; it has no gradient of its own.
        backend: `torch`: its library; `triton`: our kernels; `auto`: what was measured to be faster.

    Raises:
        ValueError: Shapes, devices, names or scales that do not fit.
        TypeError: A dtype that the kernels do not multiply, or a factor that is no number.
        RuntimeError: `triton` where its kernels cannot run, or gradients with `out` or `gradient_at`.
        ImportError: `triton`, which is not installed.
    """
    alpha, beta = float(alpha), float(beta)
    a, b = library.autocast(a, b)
    operands = check_operands(
        a, b, c if beta else None, alpha=alpha, beta=beta, bias=bias, scale_a=scale_a, scale_b=scale_b,
        out_dtype=out_dtype, activation=activation, at=gradient_at,
    )  # fmt: skip
    return _compute(operands, out, backend)


def _compute(operands: Operands, out: Tensor | None, backend: str) -> Tensor:
    if out is not None:
        check_out(operands, out)
        if overlaps_operand(operands, out):
            return out.copy_(_compute(operands, None, backend))
    folded, folded_out = fold_batch(operands, out)
    decision = dispatch.decide(folded, backend, out=folded_out)
    result = library.gemm(folded, out=folded_out) if decision is None else operator.compute(decision)
    if out is not None:
        return out
    return result if folded is operands else result.view(operands.size)


def gemm_logsumexp(
    a: Float[Tensor, "*batch_a m k"],
    b: Float[Tensor, "*batch_b k n"],
    *,
    alpha: float = 1.0,
    bias: Float[Tensor, " n"] | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch m n"], Float[Tensor, "*batch m"]]:
    """Compute `D = alpha * A @ B + bias`, and the logarithm of the sum of the exponentials of each row.

    A cross-entropy needs both of its logits. The sums are computed from the accumulators, before they are
    rounded to the dtype of D, which is not read again.

    Args:
        a: `[*batch, M, K]` of any strides: hidden states.
        b: `[*batch, K, N]`: the transposed weight of a vocabulary projection.
        alpha: Factor of the product.
        bias: Added to every row, `[N]`.
        out_dtype: Of D; None for that of `a`.
        backend: As in `gemm`; `auto` is torch's library, since `bench` does not measure this.

    Returns:
        D, and float32 `[*batch, M]` (float64 for float64). Neither has a gradient.

    Raises:
        ValueError: As `gemm`.
        TypeError: As `gemm`.
        RuntimeError: As `gemm`, or an operand that needs a gradient.

    Example:
        >>> gemm_logsumexp(torch.ones(1, 2), torch.zeros(2, 8))[1]
        tensor([2.0794])
    """
    a, b = library.autocast(a, b)
    operands = check_operands(a, b, None, alpha=float(alpha), bias=bias, out_dtype=out_dtype)
    check_no_gradient(operands, "gemm_logsumexp")
    folded, _ = fold_batch(operands, None)
    decision = dispatch.decide(folded, "torch" if backend == "auto" else backend)
    if decision is None:
        d, sums = library.gemm_logsumexp(folded)
    else:
        d, sums = operator.compute_with(decision, operator.LOGSUMEXP)
    return d.view(operands.size), sums.view(operands.size[:-1])
