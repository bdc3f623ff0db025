"""Compute D = activation(alpha * A @ B + beta * C + bias), by our Triton kernels or by torch's library.

A call checks its operands once (operands.py), decides once who computes (dispatch.py), and passes that
decision on: to torch's library, below, or through operator.py and launch.py to the kernels (gemm_kernels.py).

Example:
    >>> gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2), alpha=2.0, beta=-1.0)
    tensor([[5., 5.],
            [5., 5.]])
"""

# pyright: basic
from __future__ import annotations

from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_eff.kernels import dispatch, operator
from lightning_eff.kernels.operands import Operands, check_operands, check_out, fold_batch, overlaps_operand
from lightning_eff.kernels.reference import ACTIVATIONS

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
    """
    alpha, beta = float(alpha), float(beta)
    a, b = autocast(a, b)
    operands = check_operands(
        a, b, c if beta else None, alpha=alpha, beta=beta, bias=bias, out_dtype=out_dtype,
        activation=activation,
    )  # fmt: skip
    if out is None:
        return _compute(operands, None, backend)
    check_out(operands, out)
    if overlaps_operand(operands, out):
        return out.copy_(_compute(operands, None, backend))
    _compute(operands, out, backend)
    return out


def _compute(operands: Operands, out: Tensor | None, backend: str) -> Tensor:
    folded, folded_out = fold_batch(operands, out)
    decision = dispatch.decide(folded, backend, out=folded_out)
    result = _by_library(folded, folded_out) if decision is None else operator.compute(decision)
    return result if folded is operands else result.view(operands.size)


def autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the dtype in which `torch.matmul` would multiply them under autocast."""
    device = a.device.type
    if not _is_autocast(device) or a.dtype not in AUTOCAST_DTYPES or b.dtype not in AUTOCAST_DTYPES:
        return a, b
    dtype = torch.get_autocast_dtype(device)
    return a.to(dtype), b.to(dtype)


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _by_library(operands: Operands, out: Tensor | None) -> Tensor:
    """Compute by torch's library: on the CPU, and on a GPU wherever our kernels are not faster."""
    device = operands.a.device.type  # the operands have their dtypes already
    with torch.autocast(device, enabled=False) if _is_autocast(device) else nullcontext():
        result = _one_call(operands, out)
        if result is not None:
            return result
        result = _before_activation(operands)  # so that the epilogue is rounded once
        if operands.activation is not None:
            result = ACTIVATIONS[operands.activation](result)
        result = result.to(operands.out_dtype)
        return result if out is None else out.copy_(result)


def _one_call(operands: Operands, out: Tensor | None) -> Tensor | None:
    """Compute by one call of torch; None where it takes more: two addends, or an activation."""
    a, b, c, out_dtype = operands.a, operands.b, operands.c, operands.out_dtype
    addend = c if c is not None else operands.bias
    if operands.activation is not None:
        return None
    if addend is None and operands.alpha == 1.0 and out_dtype == a.dtype:
        return torch.matmul(a, b, out=out) if operands.batch else torch.mm(a, b, out=out)
    if addend is None or operands.batch or (c is not None and operands.bias is not None):
        return None
    alpha, beta = operands.alpha, operands.beta if c is not None else 1.0
    if out_dtype == addend.dtype == a.dtype:
        return torch.addmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    # addmm(out_dtype=) adds 16-bit products to a float32 C, on CUDA only.
    if addend is c and a.is_cuda and out_dtype == addend.dtype == torch.float32:
        return torch.addmm(addend, a, b, beta=beta, alpha=alpha, out_dtype=torch.float32, out=out)
    return None


def _before_activation(operands: Operands) -> Tensor:
    """Compute alpha * A @ B + beta * C + bias, in float32 at least."""
    a, b = operands.a, operands.b
    wide = torch.promote_types(torch.promote_types(torch.float32, operands.out_dtype), a.dtype)
    is_half = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if not (is_half and a.is_cuda):
        result = a.to(wide) @ b.to(wide)
    elif not operands.batch:  # on CUDA 16-bit operands are multiplied as they are
        result = torch.mm(a, b, out_dtype=wide)
    else:
        a, b = (matrix.expand(*operands.batch, *matrix.shape[-2:]).flatten(0, -3) for matrix in (a, b))
        result = torch.bmm(a, b, out_dtype=wide).view(*operands.batch, operands.M, operands.N)
    result = result * operands.alpha if operands.alpha != 1.0 else result
    if operands.c is not None:
        result = result + operands.beta * operands.c.to(wide)
    return result if operands.bias is None else result + operands.bias.to(wide)
