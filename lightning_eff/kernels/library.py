"""The GEMM by torch's own library: the CPU's path, and on a GPU whatever our kernels do not beat."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_eff.kernels.operands import FLOAT8, Operands
from lightning_eff.kernels.reference import ACTIVATIONS


def autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as `torch.matmul` would compute with them under autocast."""
    kind = a.device.type
    if not torch.is_autocast_enabled(kind) or a.dtype == torch.float64 or a.dtype in FLOAT8:
        return a, b
    dtype = torch.get_autocast_dtype(kind)
    return a.to(dtype), b.to(dtype)


def float32_precision(a: Tensor) -> str:
    """Return how float32 is multiplied: `tf32` where torch's own switch says so, else `ieee`."""
    tf32 = a.dtype == torch.float32 and a.is_cuda and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


def gemm(
    given: Operands, *, alpha: float, beta: float, activation: str | None, out: Tensor | None = None
) -> Tensor:
    """Compute `activation(alpha * A @ B + beta * C + bias)`; what follows the product is rounded once."""
    with torch.autocast(given.a.device.type, enabled=False):
        if out is not None and out is given.c and _is_one_call(given, activation) and given.bias is None:
            return torch.addmm(out, given.a, given.b, beta=beta, alpha=alpha, out=out)
        result = _one_call(given, alpha, beta) if _is_one_call(given, activation) else None
        if result is None:
            result = _wide(given, alpha, beta, activation)
    return result if out is None else out.copy_(result)


def _is_one_call(given: Operands, activation: str | None) -> bool:
    """Say whether torch has one call for it: no more than one addend, all of one format."""
    plain = activation is None and given.scale_a is None and given.scale_b is None and not given.batch
    addends = [each for each in (given.c, given.bias) if each is not None]
    same = all(each.dtype == given.a.dtype == given.out_dtype for each in addends)
    return plain and same and len(addends) <= 1 and given.out_dtype == given.a.dtype not in FLOAT8


def _one_call(given: Operands, alpha: float, beta: float) -> Tensor:
    if given.c is not None:
        return torch.addmm(given.c, given.a, given.b, beta=beta, alpha=alpha)
    if given.bias is not None:
        return torch.addmm(given.bias, given.a, given.b, alpha=alpha)
    product = given.a @ given.b
    return product if alpha == 1.0 else product * alpha


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
