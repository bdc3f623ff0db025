"""Compute D = activation(alpha * A @ B + beta * C + bias), by our Triton kernels or by torch's library.

A call checks its operands (operands.py), looks up who computes (dispatch.py), and passes them on: to torch's
library (library.py), or through operator.py and launch.py to the kernels (gemm_kernels.py).

Example:
    >>> gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2), alpha=2.0, beta=-1.0)
    tensor([[5., 5.],
            [5., 5.]])
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_eff.kernels import operator
from lightning_eff.kernels.operands import check_operands, check_out, fold_batch, overlaps_operand

AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that autocast casts; float64 stays."""


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
    out: Float[Tensor, "*batch m n"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch m n"]:
    """Compute `activation(alpha * A @ B + beta * C + bias)`, accumulating in float32 (float64 for float64).

    Args:
        a: `[*batch, M, K]` of any strides, so that a transpose costs nothing.
        b: `[*batch, K, N]`; batch axes are broadcast as in `torch.matmul`.
        c: `[*batch, M, N]`, or what broadcasts to it, in any floating-point dtype.
        alpha: Factor of the product; with 0 `a` and `b` are not read, as in BLAS.
        beta: Factor of `c`; with 0 it is not read.
        bias: Added to every row, `[N]`.
        activation: `relu`, `silu`, `gelu_tanh`, or None.
        out_dtype: Of the result; None for that of `a`.
        out: Receives the result, which is then `out`; it may be `c`. Without gradients, as everywhere in
            torch. If it overlaps another operand, the result is computed in new memory and copied.
        backend: `torch`: its library; `triton`: our kernels; `auto`: what was measured to be faster.

    Raises:
        ValueError: Shapes, devices or names that do not fit.
        TypeError: A dtype that the kernels do not multiply, or a factor that is no number.
        RuntimeError: `triton` where its kernels cannot run, or gradients with `out`.
        ImportError: `triton`, which is not installed.

    Warns:
        UserWarning: A kernel cannot be compiled; torch's library computes such products from then on.
    """
    alpha, beta = float(alpha), float(beta)
    a, b = autocast(a, b)
    operands = check_operands(
        a, b, c if beta else None, alpha=alpha, beta=beta, bias=bias, out_dtype=out_dtype,
        activation=activation,
    )  # fmt: skip
    if out is not None:
        check_out(operands, out)
        if out.is_neg() or overlaps_operand(operands, out):
            return out.copy_(gemm(a, b, c, alpha=alpha, beta=beta, bias=bias, activation=activation,
                                  out_dtype=out_dtype, backend=backend))  # fmt: skip
    folded, folded_out = fold_batch(operands, out)
    device = a.device.type  # the operands have their dtypes already
    with torch.autocast(device, enabled=False) if _is_autocast(device) else nullcontext():
        result = operator.compute(folded, folded_out, backend)
    if out is not None:
        return out
    return result if folded is operands else result.view(operands.size)


def autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the dtype in which `torch.matmul` would multiply them under autocast."""
    dtype = autocast_dtype(a.device.type, a.dtype, b.dtype)
    return (a, b) if dtype is None else (a.to(dtype), b.to(dtype))


def autocast_dtype(device: str, *dtypes: torch.dtype) -> torch.dtype | None:
    """Return the dtype that autocast casts operands to; None where it leaves them."""
    if not _is_autocast(device) or not all(dtype in AUTOCAST_DTYPES for dtype in dtypes):
        return None
    return torch.get_autocast_dtype(device)


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
