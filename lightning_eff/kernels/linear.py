"""A linear layer that computes by our GEMM: `nn.Linear` with another class, the same parameters and state.

    y = x @ weight.T + bias

The three GEMMs of a layer, for T rows of x, need no transposed copy:

    forward            Y [T, N] = X [T, K] @ W [N, K].T     nt
    input's gradient   X [T, K] = Y [T, N] @ W [N, K]       nn
    weight's gradient  W [N, K] = Y [T, N].T @ X [T, K]     tn

While an `Accumulation` is open, the GEMM adds a weight's gradient to `weight.grad`, C = dW and beta = 1: no
second gradient of the weight's size is allocated. The first micro-batch of a step finds no `weight.grad`, and
its gradient becomes it (beta = 0).

Only whoever runs the backward passes can open one: this gradient bypasses autograd, so that a hook on the
parameter, DDP's reducer or `torch.autograd.grad` would miss it. A layer therefore adds only where none of
them is present.

Under `torch.compile`, and where torch's library computes without accumulation, the layer is `F.linear`.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.kernels import dispatch, matmul, operator
from lightning_eff.kernels.dispatch import Decision
from lightning_eff.kernels.operands import check_operands


@dataclass(eq=False)
class Accumulation:
    """Controls when layers may add to gradients in place, and counts how often they did.

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

    is_open: bool = False
    num_added: int = 0

    @contextmanager
    def open(self) -> Generator[None]:
        """Allow layers to add while a backward pass runs in which DDP does not wait for gradients."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    def takes(self, weight: Tensor) -> bool:
        """Return whether a gradient may bypass autograd: `weight.grad` exists, and no hook would miss it."""
        if not self.is_open or weight.grad is None or weight.grad.layout != torch.strided:
            return False
        has_hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
        if has_hooks or type(weight) not in (nn.Parameter, Tensor) or not weight.is_leaf:
            return False
        # Only `backward` accumulates into .grad; `autograd.grad` returns the gradient, and raises here.
        node = torch.autograd.graph.get_gradient_edge(weight).node
        try:
            return torch._C._will_engine_execute_node(node)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        except RuntimeError:
            return False


class TritonLinear(nn.Linear):
    """A linear layer by our GEMM, made as `nn.Linear` is; assigning it to `__class__` converts one.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> x, before = torch.ones(1, 3), layer.weight
        >>> y = layer(x)
        >>> layer.__class__ = TritonLinear
        >>> torch.equal(layer(x), y), layer.weight is before
        (True, True)
    """

    backend: str = "auto"
    """As in `matmul.gemm`."""
    accumulation: Accumulation | None = None

    @override
    def forward(self, input: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch n"]:
        """Compute the layer."""
        return linear(input, self.weight, self.bias, backend=self.backend, accumulation=self.accumulation)


def linear(
    x: Float[Tensor, "*batch k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, " n"] | None = None,
    *,
    backend: str = "auto",
    accumulation: Accumulation | None = None,
) -> Float[Tensor, "*batch n"]:
    """Compute `x @ weight.T + bias`.

    Args:
        x: Activations; any number of leading batch axes, `k` input features last.
        weight: As `nn.Linear` stores it, `n` output features first.
        bias: One value per output feature, or None.
        backend: As in `matmul.gemm`.
        accumulation: Allows the weight's gradient to be added in place.

    Returns:
        Activations with `n` features, in the dtype of `x`, or in autocast's.

    Raises:
        ValueError: An unknown backend.
        RuntimeError: In a second derivative, where a gradient is accumulated or our kernels run.
    """
    dispatch.check_backend(backend)
    is_dense = x.layout == torch.strided and not x.is_nested
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or operator.in_transform()  # pyright: ignore[reportPrivateImportUsage]
    is_eager = is_dense and not is_traced
    may_be_ours = is_eager and dispatch.may_use_triton(backend, x.device, x.dtype)
    if backend == "triton" and not may_be_ours:  # traced: the operator; else this raises why it cannot run
        return matmul.gemm(x, weight.T, bias=bias, backend=backend)
    accumulates = is_eager and accumulation is not None and torch.is_grad_enabled()
    if may_be_ours or accumulates:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim != 2 else x
        decision = _decide(rows, weight, bias, backend) if may_be_ours else None
        if decision is not None or accumulates:
            backend = "torch" if decision is None else backend
            y = _Linear.apply(rows, weight, bias, backend, accumulation, decision)
            return y.reshape(*x.shape[:-1], y.shape[-1]) if x.ndim != 2 else y
    return F.linear(x, weight, bias)


def _decide(rows: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Decision | None:
    """Decide who computes the forward pass, by the operands that it is then computed with.

    Without gradients: `_Linear` has the casts in its own backward pass.
    """
    with torch.no_grad():
        a, b = matmul.autocast(rows, weight.T)
        low_bias = bias.to(a.dtype) if bias is not None else None
        return dispatch.decide(check_operands(a, b, None, bias=low_bias), backend)


class _Linear(torch.autograd.Function):
    """The three GEMMs of a layer; each decides once who computes it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, backend: str,
        accumulation: Accumulation | None, decision: Decision | None,
    ) -> Tensor:  # fmt: skip
        if decision is not None:  # its operands are x [T, K] and weight.T [K, N], cast by autocast
            rows, low_weight = decision.operands.a, decision.operands.b.T
            y = operator.compute(decision)
        else:
            rows, low_weight = matmul.autocast(x, weight)
            y = F.linear(rows, low_weight, bias.to(rows.dtype) if bias is not None else None)
        ctx.save_for_backward(rows, low_weight.detach())
        ctx.weight = weight  # receives the gradient; a saved tensor need not be the same object
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.x_dtype = x.dtype
        ctx.backend, ctx.accumulation = backend, accumulation
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            text = (
                "TritonLinear has no second derivative (create_graph=True, for example a gradient penalty): "
                "keep this layer an nn.Linear, or set its backend to 'torch' and its accumulation to None"
            )
            raise RuntimeError(text)
        rows, low_weight = ctx.saved_tensors
        grad = grads[0].to(rows.dtype)  # [T, N]
        weight, total, accumulation = ctx.weight, ctx.weight.grad, ctx.accumulation
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:  # dX [T, K] = dY [T, N] @ W [N, K]
            grad_x = matmul.gemm(grad, low_weight, backend=ctx.backend).to(ctx.x_dtype)
        is_ours = ctx.backend != "torch"
        # On a CPU torch's library adds in the dtype of its operands only; elsewhere autograd adds.
        takes = needs_weight and accumulation is not None and accumulation.takes(weight)
        if takes and (is_ours or rows.is_cuda or total.dtype == rows.dtype):
            # In memory: weight.grad [N, K] = 1 * dY.T [N, T] @ X [T, K] + 1 * weight.grad
            ctx.accumulation.num_added += 1
            matmul.gemm(grad.T, rows, total, beta=1.0, out=total, out_dtype=total.dtype, backend=ctx.backend)
        elif needs_weight:  # dW [N, K] = dY.T [N, T] @ X [T, K]
            dtype = weight.dtype if is_ours else None
            grad_weight = matmul.gemm(grad.T, rows, out_dtype=dtype, backend=ctx.backend).to(weight.dtype)
        if needs_bias:  # db [N] = dY summed over T
            wide = torch.promote_types(grad.dtype, ctx.bias_dtype) if is_ours else grad.dtype
            grad_bias = grad.sum(0, dtype=wide).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None
