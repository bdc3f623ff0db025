"""The GEMM by torch's own library: the CPU's path, and on a GPU whatever our kernels do not beat."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_eff.kernels.operands import FLOAT8, Operands
from lightning_eff.kernels.reference import ACTIVATIONS

AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
"""What autocast casts."""


def autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as `torch.matmul` would compute with them under autocast."""
    kind = a.device.type
    if not _is_autocast(kind) or a.dtype not in AUTOCAST or b.dtype not in AUTOCAST:
        return a, b
    dtype = torch.get_autocast_dtype(kind)
    return a.to(dtype), b.to(dtype)


def _is_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def gemm(
    given: Operands, *, alpha: float, beta: float, activation: str | None, out: Tensor | None = None
) -> Tensor:
    """Compute `activation(alpha * A @ B + beta * C + bias)`; what follows the product is rounded once."""
    if _is_autocast(given.a.device.type):  # what is here has the format that it is to have
        with torch.autocast(given.a.device.type, enabled=False):
            return _gemm(given, alpha, beta, activation, out)
    return _gemm(given, alpha, beta, activation, out)


def _gemm(given: Operands, alpha: float, beta: float, activation: str | None, out: Tensor | None) -> Tensor:
    if _is_one_call(given, alpha, activation):
        return _one_call(given, alpha, beta, out)
    result = _wide(given, alpha, beta, activation)
    return result if out is None else out.copy_(result)


def _is_one_call(given: Operands, alpha: float, activation: str | None) -> bool:
    """Say whether torch has one call for it: no more than one addend, all of one format."""
    if activation is not None or given.scale_a is not None or given.scale_b is not None or given.batch:
        return False
    if given.a.dtype in FLOAT8 or (given.c is not None and given.bias is not None):
        return False
    addend = given.c if given.c is not None else given.bias
    if addend is None:
        return alpha == 1.0 and given.out_dtype == given.a.dtype
    if given.out_dtype == addend.dtype == given.a.dtype:
        return True
    return addend is given.c and given.a.is_cuda and given.out_dtype == addend.dtype == torch.float32


def _one_call(given: Operands, alpha: float, beta: float, out: Tensor | None) -> Tensor:
    a, b, c = given.a, given.b, given.c
    if c is not None and c.dtype != a.dtype:  # a float32 sum of low products, on CUDA only
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out_dtype=c.dtype, out=out)
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
    if given.bias is not None:
        return torch.addmm(given.bias, a, b, alpha=alpha, out=out)
    return torch.mm(a, b, out=out)


def _wide(given: Operands, alpha: float, beta: float, activation: str | None) -> Tensor:
    """Compute in float32 at least, and round at the end."""
    wide = torch.promote_types(torch.float32, given.out_dtype)
    wide = torch.promote_types(wide, given.a.dtype) if given.a.dtype not in FLOAT8 else wide
    result = _product(given, wide)
    if given.scale_a is not None:
        result = result * given.scale_a[:, None]
    if given.scale_b is not None:
        result = result * given.scale_b
    result = result * alpha if alpha != 1.0 else result
    if given.c is not None:
        result = result + beta * given.c.to(wide)
    if given.bias is not None:
        result = result + given.bias.to(wide)
    result = ACTIVATIONS[activation](result) if activation else result
    return result.to(given.out_dtype)


def _product(given: Operands, wide: torch.dtype) -> Tensor:
    a, b = given.a, given.b
    half = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if half and a.is_cuda and not given.batch:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)
