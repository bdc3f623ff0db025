"""Compute the GEMM by torch's own library: on the CPU, and on a GPU wherever our kernels are not faster."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_eff.kernels.operands import FLOAT8, Operands
from lightning_eff.kernels.reference import ACTIVATIONS, activation_gradient

AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that autocast casts; float64 and float8 stay."""


def autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the dtype in which `torch.matmul` would multiply them under autocast."""
    device = a.device.type
    if not _is_autocast(device) or a.dtype not in AUTOCAST_DTYPES or b.dtype not in AUTOCAST_DTYPES:
        return a, b
    dtype = torch.get_autocast_dtype(device)
    return a.to(dtype), b.to(dtype)


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def gemm(operands: Operands, *, out: Tensor | None = None) -> Tensor:
    """Compute `activation(alpha * A @ B + beta * C + bias)`; the epilogue is rounded once."""
    device = operands.a.device.type  # the operands have their dtypes already
    with torch.autocast(device, enabled=False) if _is_autocast(device) else nullcontext():
        result = _one_call(operands, out)
        if result is not None:
            return result
        result = _before_activation(operands)
        if operands.at is not None and operands.activation is not None:
            result = activation_gradient(result, operands.at.to(result.dtype), operands.activation)
        elif operands.activation is not None:
            result = ACTIVATIONS[operands.activation](result)
        result = result.to(operands.out_dtype)
        return result if out is None else out.copy_(result)


def gemm_logsumexp(operands: Operands) -> tuple[Tensor, Tensor]:
    """Compute the same without an activation, and the logsumexp of each row before it is rounded."""
    device = operands.a.device.type
    with torch.autocast(device, enabled=False) if _is_autocast(device) else nullcontext():
        result = _before_activation(operands)
        wide = torch.float64 if operands.a.dtype == torch.float64 else torch.float32
        return result.to(operands.out_dtype), torch.logsumexp(result, -1).to(wide)


def _one_call(operands: Operands, out: Tensor | None) -> Tensor | None:
    """Compute by one call of torch; None where it takes more: two addends, an activation, a scale."""
    a, b, c, out_dtype = operands.a, operands.b, operands.c, operands.out_dtype
    passes = (operands.activation, operands.scale_a, operands.scale_b)
    if a.dtype in FLOAT8 or any(operand is not None for operand in passes):
        return None
    addend = c if c is not None else operands.bias
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
    """Compute alpha * scale_a * (A @ B) * scale_b + beta * C + bias, in float32 at least."""
    a, b = operands.a, operands.b
    wide = torch.promote_types(torch.float32, operands.out_dtype)
    wide = torch.promote_types(wide, a.dtype) if a.dtype not in FLOAT8 else wide
    is_half = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if not (is_half and a.is_cuda):
        result = a.to(wide) @ b.to(wide)
    elif not operands.batch:  # on CUDA 16-bit operands are multiplied as they are
        result = torch.mm(a, b, out_dtype=wide)
    else:
        a, b = (matrix.expand(*operands.batch, *matrix.shape[-2:]).flatten(0, -3) for matrix in (a, b))
        result = torch.bmm(a, b, out_dtype=wide).view(*operands.batch, operands.M, operands.N)
    if operands.scale_a is not None:
        result = result * operands.scale_a[:, None]
    if operands.scale_b is not None:
        result = result * operands.scale_b
    result = result * operands.alpha if operands.alpha != 1.0 else result
    if operands.c is not None:
        result = result + operands.beta * operands.c.to(wide)
    return result if operands.bias is None else result + operands.bias.to(wide)
