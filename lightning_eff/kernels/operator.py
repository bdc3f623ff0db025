"""Register the GEMM of our kernels as a torch operator: its shape, its FLOPs, and its gradient.

Autograd, torch.compile, checkpointing and fake tensors then see one opaque operation. Where none of them is
active, a call skips torch's dispatcher, which costs more than the rest of the call, and launches directly
with the decision that its caller made; through the dispatcher only tensors pass, so that the operator's
implementation chooses its config from the real tensors that it receives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from lightning_eff.kernels.dispatch import Decision
from lightning_eff.kernels.launch import launch
from lightning_eff.kernels.operands import Operands, batch_of
from lightning_eff.kernels.reference import ACTIVATION_GRADIENTS

OPERATOR_NAME = "lightning_eff::gemm"
_INPUTS = (
    "Tensor a, Tensor b, Tensor? c, Tensor? bias, float alpha, float beta, str? activation, "
    "ScalarType out_dtype"
)
_NUM_INPUTS = 8 + 1
PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Tensor types without a `__torch_dispatch__` or `__torch_function__` of their own."""


def compute(decision: Decision) -> Tensor:
    """Compute `activation(alpha * A @ B + beta * C + bias)` by our kernels, into `decision.out` if it is set.

    Raises:
        RuntimeError: In forward-mode differentiation, which the operator does not have.
    """
    operands, out = decision.operands, decision.out
    if forward_ad._current_level >= 0:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        text = "our kernels have no forward-mode derivative (jvp, jacfwd): use backend='torch'"
        raise RuntimeError(text)
    if out is None:
        saves_pre = operands.needs_gradient and operands.activation is not None
        if can_bypass_dispatcher(operands):
            return _allocate_and_launch(decision, saves_pre)[0]
        return _operator(*_arguments(operands), saves_pre)[0]
    if not can_bypass_dispatcher(operands) or type(out) not in PLAIN_TENSORS:
        _operator_into(out, *_arguments(operands))
    elif out.numel():
        launch(operands, decision.config(out), out)
        torch.autograd.graph.increment_version(out)
    return out


def can_bypass_dispatcher(operands: Operands) -> bool:
    """Return whether no autograd, mode, transform, tracing or tensor subclass needs the operator."""
    if torch.compiler.is_compiling() or operands.needs_gradient:
        return False
    if any(type(tensor) not in PLAIN_TENSORS or tensor.is_meta for tensor in operands.tensors):
        return False
    modes = torch._C._len_torch_dispatch_stack()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return not modes and not in_transform()


def in_transform() -> bool:
    """Return whether a transform of torch.func is active: grad, vmap, jvp."""
    return torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def _allocate_and_launch(decision: Decision, saves_pre: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    d, pre = _allocate(decision.operands, saves_pre)
    if d.numel():
        launched = pre if saves_pre else None
        launch(decision.operands, decision.config(d, launched), d, pre=launched)
    return d, pre


def _allocate(operands: Operands, saves_pre: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    d, pre = (
        torch.empty(size, dtype=operands.out_dtype, device=operands.a.device)
        for size in (operands.size, operands.size if saves_pre else (0,))
    )
    return d, pre


def _arguments(operands: Operands) -> tuple[Any, ...]:
    """Return operands as the operator takes them; `_operands` is the inverse."""
    tensors = (operands.a, operands.b, operands.c, operands.bias)
    return (*tensors, operands.alpha, operands.beta, operands.activation, operands.out_dtype)


def _operands(*arguments: Any) -> Operands:
    a, b, c, bias, alpha, beta, activation, out_dtype = arguments
    return Operands(
        a=a, b=b, c=c, bias=bias, alpha=alpha, beta=beta, activation=activation, out_dtype=out_dtype,
        batch=batch_of(a, b),
    )  # fmt: skip


@torch.library.custom_op(
    OPERATOR_NAME, mutates_args=(), schema=f"({_INPUTS}, bool saves_pre) -> (Tensor, Tensor)"
)
def _operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _allocate_and_launch(Decision(_operands(*arguments[:-1])), arguments[-1])


@torch.library.custom_op(
    f"{OPERATOR_NAME}_into", mutates_args=("out",), schema=f"(Tensor(a0!) out, {_INPUTS}) -> ()"
)
def _operator_into(out: Tensor, *arguments: Any) -> None:
    if out.numel():
        operands = _operands(*arguments)
        launch(operands, Decision(operands, out).config(out), out)


def _flop(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return 2 * batch * M * K * N from the shapes of A and B, for torch's FlopCounterMode."""
    batch = torch.broadcast_shapes(a[:-2], b[:-2])
    return 2 * math.prod(batch) * a[-2] * a[-1] * b[-1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, b, c, bias, ctx.alpha, ctx.beta, ctx.activation, _, _ = inputs
    ctx.save_for_backward(a, b, output[1])
    ctx.c, ctx.bias = (None if t is None else (t.dtype, t.shape) for t in (c, bias))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of A, B, C and the bias from that of D.

    G = grad * activation'(pre) [*batch, M, N].
    """
    if grad is None:
        return (None,) * _NUM_INPUTS
    if ctx.activation not in (None, "relu") and torch.is_grad_enabled():
        text = (
            f"our kernels have no second derivative through activation={ctx.activation!r}: "
            "apply the activation separately, or use backend='torch'"
        )
        raise RuntimeError(text)
    a, b, pre = ctx.saved_tensors
    if ctx.activation is not None:
        grad = ACTIVATION_GRADIENTS[ctx.activation](grad, pre)
    factor = grad.to(a.dtype)
    needs_a, needs_b, needs_c, needs_bias = ctx.needs_input_grad[:4]
    return (
        # Gradient of A: dA [*batch, M, K] = alpha * G [*batch, M, N] @ B^T [*batch, N, K]
        _product(factor, b.mT, ctx.alpha, a) if needs_a else None,
        # Gradient of B: dB [*batch, K, N] = alpha * A^T [*batch, K, M] @ G [*batch, M, N]
        _product(a.mT, factor, ctx.alpha, b) if needs_b else None,
        # Gradients of C, beta * G, and of the bias [N], G summed over rows; both over broadcast axes too
        (grad * ctx.beta).sum_to_size(ctx.c[1]).to(ctx.c[0]) if needs_c else None,
        grad.sum_to_size(ctx.bias[1]).to(ctx.bias[0]) if needs_bias else None,
        *(None,) * (_NUM_INPUTS - 4),
    )


def _product(a: Tensor, b: Tensor, alpha: float, like: Tensor) -> Tensor:
    """Return alpha * a @ b by our kernels, as in the forward pass, summed to the shape of `like`."""
    operands = Operands(a=a, b=b, alpha=alpha, out_dtype=like.dtype, batch=batch_of(a, b))
    return compute(Decision(operands)).sum_to_size(like.shape)


_operator.register_fake(lambda *arguments: _allocate(_operands(*arguments[:-1]), arguments[-1]))
_operator.register_autograd(_backward, setup_context=_setup_context)
register_flop_formula(torch.ops.lightning_eff.gemm)(_flop)
register_flop_formula(torch.ops.lightning_eff.gemm_into)(lambda _, *shapes, **__: _flop(*shapes))
