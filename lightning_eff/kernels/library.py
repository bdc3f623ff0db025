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
    with _without_autocast(operands):
        if _is_one_call(operands):
            return _one_call(operands, out)
        result = _before_activation(operands)
        if operands.at is not None and operands.activation is not None:
            result = activation_gradient(result, operands.at.to(result.dtype), operands.activation)
        elif operands.activation is not None:
            result = ACTIVATIONS[operands.activation](result)
        result = result.to(operands.out_dtype)
        return result if out is None else out.copy_(result)


def gemm_logsumexp(operands: Operands) -> tuple[Tensor, Tensor]:
    """Compute the same without an activation, and the logsumexp of each row before it is rounded."""
    with _without_autocast(operands):
        result = _before_activation(operands)
        wide = torch.float64 if operands.a.dtype == torch.float64 else torch.float32
        return result.to(operands.out_dtype), torch.logsumexp(result, -1).to(wide)


def _without_autocast(operands: Operands) -> torch.autocast | nullcontext[None]:
    """Disable autocast: the operands have their dtypes already."""
    device = operands.a.device.type
    return torch.autocast(device, enabled=False) if _is_autocast(device) else nullcontext()


def _is_one_call(operands: Operands) -> bool:
    """Return whether one call of torch computes it: at most one addend, one dtype, no activation or scale."""
    if operands.activation is not None or operands.scale_a is not None or operands.scale_b is not None:
        return False
    if operands.a.dtype in FLOAT8 or (operands.c is not None and operands.bias is not None):
        return False
    addend = operands.c if operands.c is not None else operands.bias
    if addend is None:
        return operands.alpha == 1.0 and operands.out_dtype == operands.a.dtype
    if operands.batch:
        return False
    if operands.out_dtype == addend.dtype == operands.a.dtype:
        return True
    # addmm(out_dtype=) adds 16-bit products to a float32 C, on CUDA only.
    return addend is operands.c and operands.a.is_cuda and operands.out_dtype == addend.dtype == torch.float32


def _one_call(operands: Operands, out: Tensor | None) -> Tensor:
    a, b, c, alpha, beta = operands.a, operands.b, operands.c, operands.alpha, operands.beta
    if c is not None and c.dtype != a.dtype:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out_dtype=c.dtype, out=out)
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
    if operands.bias is not None:
        return torch.addmm(operands.bias, a, b, alpha=alpha, out=out)
    return torch.matmul(a, b, out=out) if operands.batch else torch.mm(a, b, out=out)


def _before_activation(operands: Operands) -> Tensor:
    """Compute alpha * scale_a * (A @ B) * scale_b + beta * C + bias, in float32 at least."""
    wide = torch.promote_types(torch.float32, operands.out_dtype)
    wide = torch.promote_types(wide, operands.a.dtype) if operands.a.dtype not in FLOAT8 else wide
    result = _product(operands, wide)
    if operands.scale_a is not None:
        result = result * operands.scale_a[:, None]
    if operands.scale_b is not None:
        result = result * operands.scale_b
    result = result * operands.alpha if operands.alpha != 1.0 else result
    if operands.c is not None:
        result = result + operands.beta * operands.c.to(wide)
    return result if operands.bias is None else result + operands.bias.to(wide)


def _product(operands: Operands, wide: torch.dtype) -> Tensor:
    """Compute A @ B in a wide dtype; on CUDA 16-bit operands are multiplied as they are."""
    a, b = operands.a, operands.b
    is_half = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if not (is_half and a.is_cuda):
        return a.to(wide) @ b.to(wide)
    if not operands.batch:
        return torch.mm(a, b, out_dtype=wide)
    a, b = (matrix.expand(*operands.batch, *matrix.shape[-2:]).flatten(0, -3) for matrix in (a, b))
    return torch.bmm(a, b, out_dtype=wide).view(*operands.batch, operands.M, operands.N)
