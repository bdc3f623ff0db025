"""Compute D = activation(alpha * A @ B + beta * C + bias), by our Triton kernels or by torch's library.

A call checks its operands (operands.py) and looks up the backend (dispatch.py). Then library.py calls cuBLAS
or the CPU's library through torch, or launch.py starts our kernels (gemm_kernels.py). Layers call `compute`,
since their operands need no check.

The kernels are registered as a torch operator, with functions for its shape, FLOPs and gradient. Autograd,
torch.compile, checkpointing and fake tensors thus see one opaque operation. If none of these four is active,
a call launches the kernels directly, because torch's dispatcher costs more than the rest of the call. The
dispatcher cannot pass a `Launch`, so the operator's implementation looks up the launch again.

Example:
    >>> gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2), alpha=2.0, beta=-1.0)
    tensor([[5., 5.],
            [5., 5.]])
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from lightning_eff.kernels import dispatch
from lightning_eff.kernels.launch import CannotCompileError, Launch
from lightning_eff.kernels.library import by_library
from lightning_eff.kernels.operands import (
    ACTIVATIONS,
    Operands,
    batch_of,
    check_operands,
    check_out,
    fold_batch,
    overlaps_operand,
)

AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that autocast casts; autocast leaves float64 unchanged."""
OPERATOR_NAME = "lightning_eff::gemm"
_INPUTS = "Tensor a, Tensor b, Tensor? c, Tensor? bias, float alpha, float beta, ScalarType out_dtype"
_NUM_INPUTS = 7
PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Tensor types without a custom `__torch_dispatch__` or `__torch_function__`."""


def gemm(
    a: Float[Tensor, "*batch_a m k"],
    b: Float[Tensor, "*batch_b k n"],
    c: Float[Tensor, "*batch_c m n"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float | None = None,
    bias: Float[Tensor, " n"] | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: Float[Tensor, "*batch m n"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch m n"]:
    """Compute `activation(alpha * A @ B + beta * C + bias)`, accumulating in float32 (float64 for float64).

    Args:
        a: Left matrix, `[*batch, M, K]`, of any strides, so a transpose costs nothing.
        b: Right matrix, `[*batch, K, N]`; batch axes are broadcast as in `torch.matmul`.
        c: Matrix to add, `[*batch, M, N]` or a shape that can be broadcast to that, in any floating-point
            dtype.
        alpha: Factor of the product; with `alpha=0.0`, `a` and `b` are not read, as in BLAS.
        beta: Factor of `c`, required with `c`; with `beta=0.0`, `c` is not read.
        bias: Vector `[N]` that is added to every row.
        activation: `relu`, `silu`, `gelu_tanh`, or None.
        out_dtype: Dtype of the result; None for the dtype of `a`.
        out: Tensor for the result, which is returned; it may be `c`. A call with `out` does not support
            autograd, as with torch's functions. If `out` overlaps another operand, the result is computed in
            new memory and copied.
        backend: `triton` for our kernels, `torch` for torch's library. `auto` chooses the faster backend, as
            measured in the first call of a shape on a CUDA GPU (dispatch.py). Calls that autograd records use
            the library.

    Raises:
        ValueError: Shapes or devices do not match, a name is unknown, or `beta` and `c` are not given
            together.
        TypeError: The kernels do not support a dtype, or a factor is not a number.
        RuntimeError: A shape cannot be broadcast, the kernels cannot run, or a call with `out` needs
            gradients.
        ImportError: The backend is `triton`, and Triton is not installed.

    Warns:
        UserWarning: A kernel cannot be compiled; torch's library then computes such products.
    """
    # `beta` without `c`, or `c` without `beta`.
    if beta if c is None else beta is None:
        remedy = "c=out adds to out" if c is None else "beta=1.0 adds c, and with 0.0 it is not read"
        raise ValueError(
            f"gemm: beta={beta}, the factor of c, {'without' if c is None else 'with'} c: {remedy}"
        )
    alpha, beta = float(alpha), float(beta or 0.0)
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
    # One large product is faster than a batch of small products.
    folded, folded_out = fold_batch(operands, out)
    device = a.device.type  # the operands have their final dtypes already
    with torch.autocast(device, enabled=False) if _is_autocast(device) else nullcontext():
        result = compute(folded, folded_out, backend)
    if out is not None:
        return out
    return result if folded is operands else result.view(operands.size)


def autocast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands in the dtype that `torch.matmul` would use under autocast."""
    dtype = autocast_dtype(a.device.type, a.dtype, b.dtype)
    return (a, b) if dtype is None else (a.to(dtype), b.to(dtype))


def autocast_dtype(device: str, *dtypes: torch.dtype) -> torch.dtype | None:
    """Return the dtype that autocast casts operands to; None if autocast does not cast these dtypes."""
    if not _is_autocast(device) or not all(dtype in AUTOCAST_DTYPES for dtype in dtypes):
        return None
    return torch.get_autocast_dtype(device)


def _is_autocast(device: str) -> bool:
    # Not `torch.amp.is_autocast_available`, which the compiler of torch 2.11 cannot trace.
    return device != "meta" and torch.is_autocast_enabled(device)


def compute(operands: Operands, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Compute a GEMM of checked operands, into `out` or a new tensor; dispatch.py chooses the backend.

    Raises:
        ValueError: The backend is unknown.
        RuntimeError: The backend is `triton`, but the kernels cannot run on the device.
    """
    if not dispatch.may_use_triton(backend, operands.a.device, operands.a.dtype) or in_forward_mode():
        return by_library(operands, out)
    # The operator is for traced, fake and wrapped tensors; plain tensors do not need the dispatcher.
    is_real = not is_traced() and are_plain(operands, out)
    if is_real and not operands.needs_gradient and not _has_mode():
        return _run(operands, out, backend)
    if backend == "auto":  # our operator would cost more than a kernel gains
        return by_library(operands, out)
    product = operands if operands.activation is None else replace(operands, activation=None)
    arguments = (*operands.tensors, operands.alpha, operands.beta, operands.out_dtype)
    if out is None or product is not operands:
        # The operator computes no activation: torch applies and differentiates the activation.
        result = _operator(*arguments)
        result = result if product is operands else ACTIVATIONS[operands.activation or ""](result)
        return result if out is None else out.copy_(result)
    _operator_into(out, *arguments)
    return out


def compute_fused(
    operands: Operands, backend: str, *, stores_pre: bool, stores_d2: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Compute a GEMM with an MLP's epilogue (epilogue.py), or return None to leave it to torch's library.

    Returns:
        `d`, `pre` and `d2`, with None for `pre` or `d2` if not stored.
    """
    tensors = (operands.gate, operands.up)
    if not dispatch.may_use_triton(backend, operands.a.device, operands.a.dtype) or is_traced():
        return None
    if in_forward_mode() or _has_mode() or not are_plain(operands, *tensors) or 0 in operands.size:
        return None
    launch = dispatch.find(operands, backend=backend, writes=stores_pre + stores_d2)
    if launch is None or not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return None
    pre, d2 = (_allocate(operands) if stored else None for stored in (stores_pre, stores_d2))
    d = _launched(launch, operands, _allocate(operands), pre, d2)
    return None if d is None else (d, pre, d2)


def is_traced() -> bool:
    """Return whether torch.compile, torch.jit or torch.func records calls instead of running them."""
    transform = torch._C._functorch.maybe_current_level()  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    is_tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return torch.compiler.is_compiling() or is_tracing or transform is not None


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives (jvp, jacfwd) are active, which our operator cannot compute."""
    return forward_ad._current_level >= 0  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def are_plain(operands: Operands, *others: Tensor | None) -> bool:
    """Return whether kernels can read all tensors directly: types are plain, and no negation is pending."""
    return all(
        tensor is None or (type(tensor) in PLAIN_TENSORS and not tensor.is_meta and not tensor.is_neg())
        for tensor in (*operands.tensors, *others)
    )


def _has_mode() -> bool:
    return bool(torch._C._len_torch_dispatch_stack())  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _run(operands: Operands, out: Tensor | None, backend: str = "triton") -> Tensor:
    """Launch the kernels, or call the library if that is faster or the kernels cannot be compiled."""
    # A grid without programs cannot be launched.
    is_empty = 0 in operands.size
    launch = dispatch.find(operands, out, backend=backend) if not is_empty else None
    if launch is None:
        return by_library(operands, out)
    d = _launched(launch, operands, _allocate(operands) if out is None else out)
    if d is None:
        return by_library(operands, out)
    if out is not None:
        # torch does not see what kernels write: without this call, autograd would miss the change of `out`.
        torch.autograd.graph.increment_version(out)
    return d


def _launched(
    launch: Launch, operands: Operands, d: Tensor, pre: Tensor | None = None, d2: Tensor | None = None
) -> Tensor | None:
    """Launch the kernels; warn and return None if a kernel cannot be compiled."""
    try:
        return launch(operands, d, pre, d2)
    except CannotCompileError as error:
        dispatch.drop(launch.config)
        size = f"{operands.M} x {operands.N} x {operands.K}"
        text = f"{error}; torch's library computes {size} in {operands.a.dtype} instead"
        warnings.warn(text, UserWarning, stacklevel=2)
        return None


def _allocate(operands: Operands) -> Tensor:
    return torch.empty(operands.size, dtype=operands.out_dtype, device=operands.a.device)


def _operands(*arguments: Any) -> Operands:
    a, b, c, bias, alpha, beta, out_dtype = arguments
    return Operands(
        a=a, b=b, c=c, bias=bias, alpha=alpha, beta=beta, out_dtype=out_dtype, batch=batch_of(a, b)
    )  # fmt: skip


@torch.library.custom_op(OPERATOR_NAME, mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
def _operator(*arguments: Any) -> Tensor:
    return _run(_operands(*arguments), None)


@torch.library.custom_op(
    f"{OPERATOR_NAME}_into", mutates_args=("out",), schema=f"(Tensor(a0!) out, {_INPUTS}) -> ()"
)
def _operator_into(out: Tensor, *arguments: Any) -> None:
    _run(_operands(*arguments), out)


def _flop(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return 2 * batch * M * K * N from the shapes of A and B, for torch's FlopCounterMode."""
    batch = torch.broadcast_shapes(a[:-2], b[:-2])
    return 2 * math.prod(batch) * a[-2] * a[-1] * b[-1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    a, b, c, bias, ctx.alpha, ctx.beta, _ = inputs
    needs_a, needs_b = ctx.needs_input_grad[:2]
    # The gradient of A needs B, and the gradient of B needs A.
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
    ctx.likes = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in (a, b, c, bias)]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of A, B, C and the bias from the gradient of D, `[*batch, M, N]`."""
    a, b = ctx.saved_tensors
    like_a, like_b, like_c, like_bias = ctx.likes
    needs_a, needs_b, needs_c, needs_bias = ctx.needs_input_grad[:4]
    # In the dtype of A, because both operands of a product must have the same dtype.
    factor = grad.to(like_a[0])
    return (
        # Gradient of A: dA [*batch, M, K] = alpha * dD [*batch, M, N] @ B^T [*batch, N, K]
        _product(factor, b.mT, ctx.alpha, like_a) if needs_a else None,
        # Gradient of B: dB [*batch, K, N] = alpha * A^T [*batch, K, M] @ dD [*batch, M, N]
        _product(a.mT, factor, ctx.alpha, like_b) if needs_b else None,
        # dC = beta * dD, and db [N] is dD summed over rows; both are also summed over broadcast axes
        (grad * ctx.beta).sum_to_size(like_c[1]).to(like_c[0]) if needs_c else None,
        grad.sum_to_size(like_bias[1]).to(like_bias[0]) if needs_bias else None,
        *(None,) * (_NUM_INPUTS - 4),
    )


def _product(a: Tensor, b: Tensor, alpha: float, like: tuple[torch.dtype, torch.Size]) -> Tensor:
    """Compute alpha * a @ b with our kernels, like the forward pass, and sum over broadcast axes."""
    operands = Operands(a=a, b=b, alpha=alpha, out_dtype=like[0], batch=batch_of(a, b))
    return compute(operands, backend="triton").sum_to_size(like[1])


_operator.register_fake(lambda *arguments: _allocate(_operands(*arguments)))
_operator.register_autograd(_backward, setup_context=_setup_context)
register_flop_formula(torch.ops.lightning_eff.gemm)(_flop)
register_flop_formula(torch.ops.lightning_eff.gemm_into)(lambda _, *shapes, **__: _flop(*shapes))
