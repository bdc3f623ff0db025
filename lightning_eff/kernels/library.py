"""Compute the GEMM and the epilogues of MLPs with torch's own functions instead of our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.kernels.operands import ACTIVATIONS, Operands

aten: Any = torch.ops.aten
MLP_ACTIVATIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (F.relu, partial(aten.threshold_backward, threshold=0)),
    "silu": (F.silu, aten.silu_backward),
    "gelu": (F.gelu, partial(aten.gelu_backward, approximate="none")),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(aten.gelu_backward, approximate="tanh")),
}
"""For each activation, the function and its backward: (result's gradient, input) -> input's gradient."""


def by_library(operands: Operands, out: Tensor | None = None) -> Tensor:
    """Compute a GEMM with a few differentiable calls of torch's library, into `out` or a new tensor.

    Rounding follows torch: a 16-bit result is rounded before the activation. With C and a bias, the sum of
    the product and C is rounded before the bias is added.
    """
    a, b, c, bias, out_dtype = operands.a, operands.b, operands.c, operands.bias, operands.out_dtype
    batch, options = operands.batch, dict[str, Any]()
    wide = a.dtype
    if any(tensor.dtype != out_dtype for tensor in operands.tensors if tensor is not None):
        # Mixed dtypes are computed in float32 or wider, and rounded once at the end.
        wide = torch.promote_types(torch.promote_types(torch.float32, out_dtype), a.dtype)
        if a.is_cuda and a.dtype.itemsize == 2 and wide == torch.float32 and not operands.needs_gradient:
            options["out_dtype"] = wide  # CUDA multiplies 16-bit operands without a cast
        else:
            a, b = a.to(wide), b.to(wide)
        c, bias = (tensor.to(wide) if tensor is not None else None for tensor in (c, bias))
    # torch.addmm adds one tensor: C, or the bias if there is no C. With both, the bias is added below.
    addend, beta = (c, operands.beta) if c is not None else (bias, 1.0)
    if batch:  # torch.baddbmm has one batch axis
        a, b = (matrix.expand(*batch, *matrix.shape[-2:]).flatten(0, -3) for matrix in (a, b))
        addend = addend.flatten(0, -3) if addend is not None and addend.ndim > 1 else addend
    # torch can write to `out` directly if `out` has the product's dtype and at most one batch axis.
    direct = out if out_dtype == wide and operands.activation is None and len(batch) < 2 else None
    if direct is not None:
        options["out"] = direct
    if addend is None and operands.alpha == 1.0:
        result = (torch.bmm if batch else torch.mm)(a, b, **options)
    else:
        addend, beta = (a.new_empty(()), 0.0) if addend is None else (addend, beta)  # not read with beta = 0
        if "out_dtype" in options:  # the result then gets the addend's shape and dtype
            addend = addend.to(wide).expand(*a.shape[:-1], b.shape[-1])
        multiply = torch.baddbmm if batch else torch.addmm
        result = multiply(addend, a, b, beta=beta, alpha=operands.alpha, **options)
    if c is not None and bias is not None:
        result = result.add_(bias)
    if direct is not None:
        return direct
    if operands.activation is not None:
        result = ACTIVATIONS[operands.activation](result)
    result = result.view(operands.size).to(out_dtype)
    return result if out is None else out.copy_(result)


def mlp_by_library(operands: Operands, *, stores_pre: bool) -> list[Tensor]:
    """Compute a GEMM with an MLP's epilogue (epilogue.py); return `d`, then `pre` and `d2` if they exist."""
    gate, up, activation = cast("Any", operands.gate), operands.up, operands.activation or ""
    x = by_library(replace(operands, activation=None, gate=None, up=None, gradient=False))
    if not operands.gradient:
        return [activated(x, gate, activation), *([x] if stores_pre else [])]
    # Without `up`, `gate` holds H, the input of the activation.
    h, gate = (gate, None) if up is None else (up, gate)
    pre = [activated(h, gate, activation)] if stores_pre else []
    grad_h, grad_gate = input_gradients(x, h, gate, activation)
    # In the order d, pre, d2: with a gate, d is the gradient of the gate, and d2 of the up projection.
    return [grad_h, *pre] if grad_gate is None else [grad_gate, *pre, grad_h]


def activated(h: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """Compute the activations A [T, F] of an MLP: act(H), or act(G) * H with a gate G."""
    activate = MLP_ACTIVATIONS[activation][0]
    return activate(h) if gate is None else activate(gate) * h  # a checkpointing policy may save this factor


def input_gradients(
    grad_a: Tensor, h: Tensor, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of H and of the gate from `grad_a`, all [T, F]; `grad_a` may be overwritten."""
    activate, differentiate = MLP_ACTIVATIONS[activation]
    if gate is None:
        return differentiate(grad_a, h), None
    grad_gate = differentiate(grad_a * h, gate)
    return grad_a.mul_(activate(gate)), grad_gate
