"""The GEMM as an operator of torch's: its shape for fake tensors and the compiler, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from lightning_eff.kernels.operands import Operands, batch_of
from lightning_eff.kernels.reference import activation_gradient

NAME = "lightning_eff::gemm"
_TENSORS = "Tensor a, Tensor b, Tensor? c, Tensor? bias, Tensor? scale_a, Tensor? scale_b, Tensor? at"
_REST = "float alpha, float beta, str? activation, ScalarType out_dtype"
_NUM_INPUTS = 7 + 4 + 1
NOTHING, PRE, LOGSUMEXP = "nothing", "pre", "logsumexp"
"""What the operator returns beside the result: nothing, what is before the activation, or sums of rows."""
PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that have nothing to say about what is done with them."""
Run = Callable[[Operands, Tensor, Tensor | None, Tensor | None], None]
"""Computes into memory that is there: operands, result, that before the activation, logsumexp of rows."""


class Operator:
    """Registers the operator under its name, and calls it with operands; there is one.

    Args:
        run: What computes, on tensors that are real.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._functional = torch.library.custom_op(
            NAME,
            self._compute,
            mutates_args=(),
            schema=f"({_TENSORS}, {_REST}, str returns) -> (Tensor, Tensor)",
        )
        self._functional.register_fake(_fake)
        self._functional.register_autograd(self._backward, setup_context=_save)
        register_flop_formula(torch.ops.lightning_eff.gemm)(_flop)
        self._into = torch.library.custom_op(
            f"{NAME}_into",
            self._compute_into,
            mutates_args=("out",),
            schema=f"(Tensor(a0!) out, {_TENSORS}, {_REST}) -> ()",
        )
        register_flop_formula(torch.ops.lightning_eff.gemm_into)(_flop_into)

    def __call__(self, given: Operands, *, out: Tensor | None = None) -> Tensor:
        """Compute `activation(alpha * A @ B + beta * C + bias)`.

        Raises:
            RuntimeError: In forward-mode differentiation, which the operator has none of.
        """
        if forward_ad._current_level >= 0:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            text = "our kernels have no forward-mode derivative (jvp, jacfwd): backend='torch' has"
            raise RuntimeError(text)
        if out is not None:
            self._write(given, out)
            return out
        needs = torch.is_grad_enabled() and any(each.requires_grad for each in given.tensors)
        return self._call(given, PRE if needs and given.activation is not None else NOTHING)[0]

    def with_pre(self, given: Operands) -> tuple[Tensor, Tensor | None]:
        """Compute the same, and return what is before the activation, if there is one."""
        if given.activation is None:
            return self._call(given, NOTHING)[0], None
        return self._call(given, PRE)

    def with_logsumexp(self, given: Operands) -> tuple[Tensor, Tensor]:
        """Compute the same, and return the logsumexp of each row."""
        return self._call(given, LOGSUMEXP)

    def _call(self, given: Operands, returns: str) -> tuple[Tensor, Tensor]:
        """Go through torch's dispatcher where somebody looks on; it costs more than the rest of a call."""
        if not _unseen(given):
            return self._functional(*_arguments(given), returns)
        return self._compute_beside(given, returns)

    def _compute(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return self._compute_beside(_operands(*arguments), arguments[-1])

    def _compute_beside(self, given: Operands, returns: str) -> tuple[Tensor, Tensor]:
        d, beside = _allocate(given, returns)
        if returns == LOGSUMEXP and not given.N:
            beside.fill_(-math.inf)
        if given.batch_size * given.M * given.N:
            pre = beside if returns == PRE else None
            self._run(given, d, pre, beside if returns == LOGSUMEXP else None)
        return d, beside

    def _write(self, given: Operands, out: Tensor) -> None:
        if not _unseen(given) or type(out) not in PLAIN:
            self._into(out, *_arguments(given))
        elif out.numel():
            self._run(given, out, None, None)
            torch.autograd.graph.increment_version(out)

    def _compute_into(self, out: Tensor, *arguments: Any) -> None:
        if out.numel():
            self._run(_operands(*arguments), out, None, None)

    def _backward(self, ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        """Return alpha * G @ B^T, alpha * A^T @ G, beta * G, and G summed over rows."""
        if grad is None:
            return (None,) * _NUM_INPUTS
        if ctx.activation is not None and not ctx.has_pre:
            text = (
                f"{NAME}(returns='nothing') keeps nothing to differentiate {ctx.activation} by: returns='pre'"
            )
            raise RuntimeError(text)
        if ctx.scaled:
            text = "gemm with scales has no gradient: a float8 layer computes its own from what it has scaled"
            raise RuntimeError(text)
        a, b, pre = ctx.saved_tensors
        if ctx.activation not in (None, "relu") and torch.is_grad_enabled():
            text = (
                f"our kernels have no second derivative through activation={ctx.activation!r}: "
                "apply it apart, or use backend='torch'"
            )
            raise RuntimeError(text)
        if ctx.activation is not None:
            grad = activation_gradient(grad, pre, ctx.activation)
        factor = grad.to(a.dtype)
        needs_a, needs_b, needs_c, needs_bias = ctx.needs_input_grad[:4]
        return (
            self._product(factor, b.mT, ctx.alpha, a) if needs_a else None,
            self._product(a.mT, factor, ctx.alpha, b) if needs_b else None,
            (grad * ctx.beta).sum_to_size(ctx.c[1]).to(ctx.c[0]) if needs_c else None,
            grad.sum_to_size(ctx.bias[1]).to(ctx.bias[0]) if needs_bias else None,
            *(None,) * (_NUM_INPUTS - 4),
        )

    def _product(self, a: Tensor, b: Tensor, alpha: float, like: Tensor) -> Tensor:
        nothing = dict.fromkeys(("c", "bias", "scale_a", "scale_b"))
        given = Operands(a=a, b=b, alpha=alpha, out_dtype=like.dtype, batch=batch_of(a, b), **nothing)
        return self(given).sum_to_size(like.shape)


def _arguments(given: Operands) -> tuple[Any, ...]:
    """Return operands as the operator takes them; `_operands` is the way back."""
    tensors = (given.a, given.b, given.c, given.bias, given.scale_a, given.scale_b, given.at)
    return (*tensors, given.alpha, given.beta, given.activation, given.out_dtype)


def _operands(*arguments: Any) -> Operands:
    a, b, c, bias, scale_a, scale_b, at, alpha, beta, activation, out_dtype = arguments[:11]
    return Operands(
        a=a, b=b, c=c, bias=bias, scale_a=scale_a, scale_b=scale_b, at=at, alpha=alpha, beta=beta,
        activation=activation, out_dtype=out_dtype, batch=batch_of(a, b),
    )  # fmt: skip


def _unseen(given: Operands) -> bool:
    """Say whether nobody has to see the operator: no gradient, mode, transform, tracing or other tensors."""
    tensors = given.tensors
    if any(type(each) not in PLAIN or each.is_meta for each in tensors) or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return False
    modes = torch._C._len_torch_dispatch_stack()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return not modes and not in_transform()


def in_transform() -> bool:
    """Say whether a transform of torch.func is at work: grad, vmap, jvp."""
    return torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _allocate(_operands(*arguments), arguments[-1])


def _allocate(given: Operands, returns: str) -> tuple[Tensor, Tensor]:
    """Return memory for the result and for what is returned beside it, which is empty if that is nothing."""
    if returns == PRE:
        return given.empty(), given.empty(given.N)
    sums = (*given.batch, given.M) if returns == LOGSUMEXP else (0,)
    return given.empty(), torch.empty(sums, dtype=torch.float32, device=given.a.device)


def _flop(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return the operations of a product from the shapes of its operands, for torch's counter."""
    batch = torch.broadcast_shapes(a[:-2], b[:-2])
    return 2 * math.prod(batch) * a[-2] * a[-1] * b[-1]


def _flop_into(_: Any, *shapes: Any, **__: Any) -> int:
    return _flop(*shapes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, b, c, bias, scale_a, scale_b, _, ctx.alpha, ctx.beta, ctx.activation, _, _ = inputs
    ctx.save_for_backward(a, b, output[1])
    ctx.has_pre = inputs[-1] == PRE
    ctx.scaled = scale_a is not None or scale_b is not None
    ctx.c, ctx.bias = (None if each is None else (each.dtype, each.shape) for each in (c, bias))
    ctx.set_materialize_grads(False)
