"""A linear layer of our GEMM: `nn.Linear` with another class, the same parameters, names and state.

    y = activation(x @ weight.T + bias)

Forward is a product of layout nt, the gradient of the input nn, that of the weight tn: no transposes.
While an `Accumulation` is open, a weight's gradient is added by the GEMM to the one that is there, C = dW
and beta = 1: no gradient of the size of the weight is made only to be added. The first micro-batch of a step
finds none, and its gradient becomes the one that is there (beta = 0).

Only somebody who drives the backward passes can open one. The gradient goes past autograd for it: a hook on
the parameter, DDP's reducer or `torch.autograd.grad` would not see it, so a layer adds where nobody listens.

Under `torch.compile` and where the backend is torch's library without accumulation, the layer is `F.linear`.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.kernels import dispatch, library, matmul, operands
from lightning_eff.kernels.operands import Operands
from lightning_eff.kernels.operator import in_transform
from lightning_eff.kernels.reference import ACTIVATIONS, GATED, activation_gradient


class Accumulation:
    """Says when layers may add to gradients that are there, and how often they did.

    Example:
        >>> accumulation = Accumulation()
        >>> layer = TritonLinear(3, 2)
        >>> layer.accumulation = accumulation
        >>> for _ in range(2):
        ...     with accumulation.open():
        ...         layer(torch.ones(4, 3)).sum().backward()
        >>> layer.weight.grad
        tensor([[8., 8., 8.],
                [8., 8., 8.]])
        >>> accumulation.num_added
        1
    """

    def __init__(self) -> None:
        self.is_open = False
        self.num_added = 0

    @contextmanager
    def open(self) -> Generator[None]:
        """Let layers add while a backward pass runs; nobody may wait for its gradients in hooks of DDP's."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    def takes(self, weight: Tensor) -> bool:
        """Say whether a gradient may go past autograd: there is one to add to, and nobody listens."""
        if not self.is_open or weight.grad is None or weight.grad.layout != torch.strided:
            return False
        listens = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
        plain = type(weight) in (nn.Parameter, Tensor) and weight.is_leaf
        return plain and not listens and _is_accumulated(weight)


def _is_accumulated(weight: Tensor) -> bool:
    """Say whether the backward pass at hand will add to a parameter's gradient; `autograd.grad` does not."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    except RuntimeError:  # autograd.grad, which returns this very gradient
        return False


class TritonLinear(nn.Linear):
    """A linear layer; a swap of the class makes one of an `nn.Linear`.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        bias: Add a bias.
        device: Where the parameters are made.
        dtype: Their format.
        activation: `relu`, `silu`, `gelu_tanh`, or None; computed with the product where our kernels run. Or
            `swiglu`: of `out_features`, even ones are gates, odd ones what they let through; half come out.
        backend: As in `matmul.gemm`.

    Raises:
        ValueError: An activation or a backend that nobody knows, or a gate without its partner.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> x, before = torch.ones(1, 3), layer.weight
        >>> y = layer(x)
        >>> layer.__class__ = TritonLinear
        >>> torch.equal(layer(x), y), layer.weight is before
        (True, True)
    """

    activation: str | None = None
    backend: str = "auto"
    accumulation: Accumulation | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001, FBT002 - as nn.Linear has it
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if activation is not None and activation not in ACTIVATIONS:
            text = f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}, or None"
            raise ValueError(text)
        if activation in GATED and out_features % 2:
            text = f"out_features={out_features}: expected an even number with activation={activation}"
            raise ValueError(text)
        if backend not in dispatch.BACKENDS:
            text = f"backend={backend!r}: expected one of {', '.join(dispatch.BACKENDS)}"
            raise ValueError(text)
        self.activation, self.backend = activation, backend

    @override
    def forward(self, input: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """Compute the layer."""
        return linear(
            input,
            self.weight,
            self.bias,
            activation=self.activation,
            backend=self.backend,
            accumulation=self.accumulation,
        )

    @override
    def extra_repr(self) -> str:
        """Show what is not the default beside the sizes."""
        own = {"activation": self.activation, "backend": self.backend if self.backend != "auto" else None}
        return ", ".join([super().extra_repr(), *(f"{key}={value}" for key, value in own.items() if value)])


def linear(
    x: Float[Tensor, "*batch k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, " n"] | None = None,
    *,
    activation: str | None = None,
    backend: str = "auto",
    accumulation: Accumulation | None = None,
) -> Float[Tensor, "*batch n"]:
    """Compute `activation(x @ weight.T + bias)`.

    Args:
        x: Activations; any number of leading batch axes, `k` input features last.
        weight: As `nn.Linear` stores it, `n` output features first.
        bias: One value per output feature, or None.
        activation: One of `reference.ACTIVATIONS`, or None.
        backend: As in `matmul.gemm`.
        accumulation: Lets the weight's gradient be added where it belongs.

    Returns:
        Activations with `n` features, or `n / 2` behind `swiglu`, in the format of `x`, or in autocast's.

    Raises:
        ValueError: An activation or a backend that nobody knows.
        RuntimeError: In a second derivative, where a gradient is accumulated or our kernels run.
    """
    if backend not in dispatch.BACKENDS or (activation is not None and activation not in ACTIVATIONS):
        text = (
            f"linear(backend={backend!r}, activation={activation!r}): expected a backend of "
            f"{', '.join(dispatch.BACKENDS)}, and an activation of {', '.join(ACTIVATIONS)}, or None"
        )
        raise ValueError(text)
    if activation in GATED and weight.shape[0] % 2:
        text = f"linear of a weight {list(weight.shape)}: expected even rows with activation={activation}"
        raise ValueError(text)
    dense = x.layout == torch.strided and not x.is_nested
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or not dense  # pyright: ignore[reportPrivateImportUsage]
    traced = traced or in_transform()
    ours = not traced and _is_ours(x, weight, backend, activation)
    if backend == "triton" and not ours:
        return matmul.gemm(x, weight.T, bias=bias, activation=activation, backend=backend)
    if ours or (accumulation is not None and not traced and torch.is_grad_enabled()):
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim != 2 else x
        y = _Linear.apply(rows, weight, bias, activation, backend if ours else "torch", accumulation)
        return y.reshape(*x.shape[:-1], y.shape[-1]) if x.ndim != 2 else y
    y = F.linear(x, weight, bias)
    return ACTIVATIONS[activation](y) if activation else y


def _is_ours(x: Tensor, weight: Tensor, backend: str, activation: str | None) -> bool:
    """Say whether our kernels compute a layer; an error is left to who asks for them in vain."""
    if backend == "torch" or not (x.is_cuda or matmul.INTERPRETED) or x.dtype == torch.float64:
        return False
    given = _operands(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, activation=activation)
    return dispatch.uses_triton(given, backend, interpreted=matmul.INTERPRETED)


def _operands(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Operands:
    a, b = library.autocast(x, weight.T)
    return operands.check_operands(a, b, None, bias=bias, activation=activation)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, backend: str
) -> tuple[Tensor, Tensor | None]:
    """Return `activation(x @ weight.T + bias)`, and what is before the activation if there is one."""
    if backend == "torch":
        before = F.linear(x, weight, bias)
        return (ACTIVATIONS[activation](before), before) if activation else (before, None)
    return matmul.OPERATOR.with_pre(_operands(x, weight, bias, activation))


class _Linear(torch.autograd.Function):
    """The three products of a layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        backend: str,
        accumulation: Accumulation | None,
    ) -> Tensor:
        rows, low_weight = library.autocast(x, weight)
        low_bias = bias.to(rows.dtype) if bias is not None else None
        y, pre = _forward(rows, low_weight, low_bias, activation, backend)
        ctx.save_for_backward(rows, low_weight.detach(), pre)
        ctx.weight = weight  # whose gradient it is: a saved tensor need not be the same object
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.x_dtype = x.dtype
        ctx.activation, ctx.backend, ctx.accumulation = activation, backend, accumulation
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            text = (
                "TritonLinear has no second derivative (create_graph=True, a gradient penalty say): "
                "leave the layer out of the swap, or set its backend to 'torch' and accumulate without it"
            )
            raise RuntimeError(text)
        rows, low_weight, pre = ctx.saved_tensors
        grad = grads[0]
        if ctx.activation is not None:
            grad = activation_gradient(grad, pre, ctx.activation)
        grad = grad.to(rows.dtype)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = matmul.gemm(grad, low_weight, backend=ctx.backend).to(ctx.x_dtype)
        if needs_weight:
            grad_weight = _weight_gradient(ctx, grad.T, rows)
        if needs_bias:
            wide = grad.dtype if ctx.backend == "torch" else torch.promote_types(grad.dtype, ctx.bias_dtype)
            grad_bias = grad.sum(0, dtype=wide).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _weight_gradient(ctx: Any, grad: Tensor, rows: Tensor) -> Tensor | None:
    """Return the gradient of the weight, or None where it was added to the one that is there."""
    weight, place = ctx.weight, ctx.weight.grad
    ours, accumulation = ctx.backend != "torch", ctx.accumulation
    if accumulation is not None and accumulation.takes(weight):
        # On a CPU torch's library adds in the format of its operands only: then autograd does it.
        can_add = ours or rows.is_cuda or place.dtype == rows.dtype
        accumulation.num_added += can_add
        if can_add:
            matmul.gemm(grad, rows, place, beta=1.0, out=place, out_dtype=place.dtype, backend=ctx.backend)
            return None
    dtype = weight.dtype if ours else None
    return matmul.gemm(grad, rows, out_dtype=dtype, backend=ctx.backend).to(weight.dtype)
