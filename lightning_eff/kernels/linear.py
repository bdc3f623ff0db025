"""A linear layer that our GEMM computes: an `nn.Linear` with a new class and with the same parameters.

    y = x @ weight.T + bias

`callbacks/triton_gemm` converts layers. The three GEMMs of a layer, for T rows of x, need no transposed copy:

    forward            Y [T, N] = X [T, K] @ W [N, K].T     nt
    input's gradient   X [T, K] = Y [T, N] @ W [N, K]       nn
    weight's gradient  W [N, K] = Y [T, N].T @ X [T, K]     tn

Inside the context of an `Accumulation`, the GEMM adds the weight's gradient to `weight.grad` (C = dW, beta =
1). So no second gradient of the weight's size is allocated. In the first micro-batch of a step, `weight.grad`
is None, and autograd stores the layer's gradient there (beta = 0).

Only the code that runs the backward passes should enter this context. A gradient that is added in place
bypasses autograd. A hook on the parameter, DDP's reducer or `torch.autograd.grad` would miss that gradient. A
layer therefore adds in place only if none of the three is in use.

The layer calls `F.linear` where our GEMM is not faster or not supported. Examples are CPUs and small products
(without accumulation), `torch.compile`, forward-mode derivatives, complex numbers and integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary
from typing_extensions import override

from lightning_eff.kernels import dispatch, matmul
from lightning_eff.kernels.operands import DTYPES, Operands


@dataclass(eq=False)
class Accumulation:
    """Allow layers to add gradients in place inside a `with` block, and count these additions.

    The block may contain only backward passes in which DDP does not reduce gradients.

    Args:
        is_expected: Whether a step may have several backward passes; if False, layers do not prepare for
            accumulation.

    Example:
        >>> accumulation = Accumulation()
        >>> layer = TritonLinear(3, 2)
        >>> layer.accumulation = accumulation
        >>> for _ in range(2):
        ...     with accumulation:
        ...         layer(torch.ones(4, 3)).sum().backward()
        >>> layer.weight.grad
        tensor([[8., 8., 8.],
                [8., 8., 8.]])
        >>> accumulation.num_added
        1
    """

    is_expected: bool = True
    num_added: int = 0
    _depth: int = 0

    def __enter__(self) -> None:  # a generator-based context would take ten times as long
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def takes(self, weight: Tensor, node: Any) -> bool:
        """Return whether a gradient may bypass autograd: `weight.grad` exists, and no hook would be skipped.

        `node` is the graph node that accumulates the weight's gradient.
        """
        if not self._depth or weight.grad is None or weight.grad.layout != torch.strided:
            return False
        # A hook needs the gradient as a tensor, and adding in place never creates that tensor.
        has_hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
        is_plain = type(weight) in (nn.Parameter, Tensor) or is_fake(weight)  # fake if memory is predicted
        if has_hooks or not is_plain or not weight.is_leaf:
            return False
        # Only `backward` accumulates into .grad. `autograd.grad` returns the gradient instead; in its
        # backward pass, the next call raises an error.
        try:
            return torch._C._will_engine_execute_node(node)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        except RuntimeError:
            return False


class TritonLinear(nn.Linear):
    """An `nn.Linear` that our GEMM computes; to convert a layer, assign this class to its `__class__`.

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
        accumulation: If given, the weight's gradient may be added in place.

    Returns:
        Activations with `n` features, in the dtype of `x` or of autocast.

    Raises:
        ValueError: The backend is unknown.
        RuntimeError: The backend is `triton`, but the kernels cannot run on the device.
    """
    is_ours = dispatch.may_use_triton(backend, x.device, x.dtype)
    accumulates = (
        accumulation is not None
        and accumulation.is_expected
        and weight.requires_grad
        and torch.is_grad_enabled()
    )
    # Integers, complex numbers, and sparse or nested tensors are left to torch.
    is_dense = x.dtype in DTYPES and x.layout == torch.strided and not x.is_nested
    if not (is_ours or accumulates) or not is_dense:
        return F.linear(x, weight, bias)
    if matmul.is_traced() or matmul.in_forward_mode():
        if backend == "triton" and not matmul.in_forward_mode():  # torch.compile keeps the operator
            return matmul.gemm(x, weight.T, bias=bias, backend=backend)
        return F.linear(x, weight, bias)
    if is_ours and backend == "auto" and 2.0 * x.numel() * weight.shape[0] < dispatch.MIN_FLOP:
        is_ours = False
        if not accumulates:
            return F.linear(x, weight, bias)
    dtype = matmul.autocast_dtype(x.device.type, x.dtype, weight.dtype)
    if dtype is None:
        if x.dtype != weight.dtype:
            return F.linear(x, weight, bias)  # raises the error
        dtype = x.dtype
    # Autocast's own cache would keep a copy with a graph; this copy is detached.
    copy = None if dtype == weight.dtype else low_copy(weight, dtype)
    rows = x if dtype == x.dtype else x.to(dtype)  # recorded by autograd, like autocast's cast
    rows = rows if x.ndim == 2 else rows.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _Linear.apply(rows, weight, bias, copy, backend if is_ours else "torch", accumulation)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


# Weak keys and weak values: the cache keeps neither weights nor copies alive.
_low_copies: Any = WeakTensorKeyDictionary()


def low_copy(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of the weight in autocast's dtype; like autocast, reuse the copy while a graph holds it.

    A layer that is called a hundred times in a forward pass casts its weight once, and keeps one copy. A
    change through `weight.data` is not detected while a graph holds the copy, so `forget_copies` must be
    called after an optimizer step.
    """
    # `_version` counts in-place changes; the address changes if `weight.data` is assigned.
    version = (dtype, weight._version, weight.data_ptr())  # noqa: SLF001
    kept, reference = _low_copies.get(weight, (None, None))
    copy = reference() if kept == version else None
    if copy is None:
        copy = weight.detach().to(dtype)
        _low_copies[weight] = (version, TensorWeakRef(copy))
    return copy


def forget_copies() -> None:
    """Drop the cached casts of weights."""
    _low_copies.clear()


class _Linear(torch.autograd.Function):
    """The three GEMMs of a layer; the forward pass saves only operands that the requested gradients need."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor | None, backend: str,
        accumulation: Accumulation | None,
    ) -> Tensor:  # fmt: skip
        # Detached, so that assigning to `weight.data` before the backward pass does not change this weight.
        used = weight.detach() if copy is None else copy
        low_bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        # dX needs W, and dW needs X.
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, used if needs_x else None)
        ctx.weight = weight  # receives the gradient; a saved tensor may be another object
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.backend, ctx.accumulation = backend, accumulation
        if backend == "torch":
            return F.linear(x, used, low_bias)
        return product(x, used.T, backend, bias=low_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, weight, backend, accumulation = grads[0], ctx.weight, ctx.backend, ctx.accumulation
        x, used = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: torch's functions are differentiable
            return _differentiable(ctx, grad, x, used)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:  # dX [T, K] = dY [T, N] @ W [N, K]
            grad_x = product(grad, used, backend)
        if needs_weight:
            # Entry 1 is the node of the weight, the second argument of `forward`.
            node = ctx.next_functions[1][0]
            grad_weight = weight_gradient(grad, x, weight, node, backend, accumulation)
        if needs_bias:
            grad_bias = bias_gradient(grad, ctx.bias_dtype, backend)
        return grad_x, grad_weight, grad_bias, None, None, None


def weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, node: Any, backend: str, accumulation: Accumulation | None
) -> Tensor | None:
    """Return dW [N, K] = dY.T [N, T] @ X [T, K] in the weight's dtype; None if `weight.grad` has received it.

    `node` is the graph node that accumulates the weight's gradient.
    """
    is_ours = backend != "torch"
    # On a CPU, torch's library adds a product only to a tensor of the operands' dtype; otherwise autograd
    # adds.
    may_add = is_ours or x.is_cuda or weight.dtype == x.dtype
    if may_add and accumulation is not None and accumulation.takes(weight, node):
        # In memory: weight.grad [N, K] = 1 * dY.T [N, T] @ X [T, K] + 1 * weight.grad
        product(grad.t(), x, backend, total=weight.grad)
        accumulation.num_added += 1
        return None
    made = product(grad.t(), x, backend, out_dtype=weight.dtype if is_ours else x.dtype)
    return made if made.dtype == weight.dtype else made.to(weight.dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Return db [N], the sum of dY over T; our backend sums in the dtype of the bias."""
    total = grad.sum(0) if backend == "torch" or grad.dtype == dtype else grad.sum(0, dtype=dtype)
    return total if total.dtype == dtype else total.to(dtype)


def product(
    a: Tensor, b: Tensor, backend: str, *, bias: Tensor | None = None, total: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return `a @ b + bias` or `total += a @ b`; operands are not checked."""
    if backend == "torch" and (total is None or total.dtype == a.dtype):
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    dtype = total.dtype if total is not None else out_dtype or a.dtype
    operands = Operands(
        a=a, b=b, c=total, beta=0.0 if total is None else 1.0, bias=bias, out_dtype=dtype, batch=()
    )  # fmt: skip
    return matmul.compute(operands, total, backend)


def _differentiable(ctx: Any, grad: Tensor, x: Tensor | None, used: Tensor | None) -> tuple[Any, ...]:
    """Return differentiable gradients, which torch's own functions compute."""
    weight, bias_dtype = ctx.weight, ctx.bias_dtype
    grad_x = grad @ weight.to(grad.dtype) if used is not None else None
    grad_weight = (grad.T @ x).to(weight.dtype) if x is not None else None
    grad_bias = grad.sum(0).to(bias_dtype) if ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias, None, None, None
