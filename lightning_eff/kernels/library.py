"""The GEMM by torch's own library: the CPU's path, and on a GPU whatever our kernels do not beat."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_eff.kernels.operands import FLOAT8, Operands
from lightning_eff.kernels.reference import ACTIVATIONS, activation_gradient

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


def gemm(given: Operands, *, out: Tensor | None = None) -> Tensor:
    """Compute `activation(alpha * A @ B + beta * C + bias)`; what follows the product is rounded once."""
    with _plain(given):
        if _is_one_call(given):
            return _one_call(given, out)
        result = _finished(given, _wide(given)).to(given.out_dtype)
        return result if out is None else out.copy_(result)


def gemm_logsumexp(given: Operands) -> tuple[Tensor, Tensor]:
    """Compute the same without an activation, and the logsumexp of each row before it is rounded."""
    with _plain(given):
        result = _wide(given)
        wide = torch.float64 if given.a.dtype == torch.float64 else torch.float32
        return result.to(given.out_dtype), torch.logsumexp(result, -1).to(wide)


def _plain(given: Operands) -> AbstractContextManager[object]:
    """Switch autocast off: what is here has the format that it is to have."""
    kind = given.a.device.type
    return torch.autocast(kind, enabled=False) if _is_autocast(kind) else nullcontext()


def _is_one_call(given: Operands) -> bool:
    """Say whether torch has one call for it: no more than one addend, all of one format."""
    if given.activation is not None or given.scale_a is not None or given.scale_b is not None:
        return False
    if given.a.dtype in FLOAT8 or (given.c is not None and given.bias is not None):
        return False
    addend = given.c if given.c is not None else given.bias
    if addend is not None and given.batch:
        return False
    if addend is None:
        return given.alpha == 1.0 and given.out_dtype == given.a.dtype
    if given.out_dtype == addend.dtype == given.a.dtype:
        return True
    return addend is given.c and given.a.is_cuda and given.out_dtype == addend.dtype == torch.float32


def _one_call(given: Operands, out: Tensor | None) -> Tensor:
    a, b, c, alpha, beta = given.a, given.b, given.c, given.alpha, given.beta
    if c is not None and c.dtype != a.dtype:  # a float32 sum of low products, on CUDA only
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out_dtype=c.dtype, out=out)
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
    if given.bias is not None:
        return torch.addmm(given.bias, a, b, alpha=alpha, out=out)
    return torch.matmul(a, b, out=out) if given.batch else torch.mm(a, b, out=out)


def _wide(given: Operands) -> Tensor:
    """Compute what is before the activation, in float32 at least."""
    wide = torch.promote_types(torch.float32, given.out_dtype)
    wide = torch.promote_types(wide, given.a.dtype) if given.a.dtype not in FLOAT8 else wide
    result = _product(given, wide)
    if given.scale_a is not None:
        result = result * given.scale_a[:, None]
    if given.scale_b is not None:
        result = result * given.scale_b
    result = result * given.alpha if given.alpha != 1.0 else result
    if given.c is not None:
        result = result + given.beta * given.c.to(wide)
    return result if given.bias is None else result + given.bias.to(wide)


def _finished(given: Operands, result: Tensor) -> Tensor:
    if given.activation is None:
        return result
    if given.at is not None:
        return activation_gradient(result, given.at.to(result.dtype), given.activation)
    return ACTIVATIONS[given.activation](result)


def _product(given: Operands, wide: torch.dtype) -> Tensor:
    a, b = given.a, given.b
    half = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if half and a.is_cuda:
        if not given.batch:
            return torch.mm(a, b, out_dtype=wide)
        a, b = (each.expand(*given.batch, *each.shape[-2:]).flatten(0, -3) for each in (a, b))
        return torch.bmm(a, b, out_dtype=wide).view(*given.batch, given.M, given.N)
    return a.to(wide) @ b.to(wide)
