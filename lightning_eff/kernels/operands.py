"""Check the operands of a GEMM once for all backends: shapes, dtypes, devices, and the result's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lightning_eff.kernels import devices
from lightning_eff.kernels.tile_configs import TMA_BYTES, Shape

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of operands and results."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations that the kernels compute. The exact GELU is missing, because erf spills registers."""


@dataclass(kw_only=True, slots=True, eq=False)
class Operands:
    """The checked operands of D = activation(alpha * A @ B + beta * C + bias).

    Args:
        a: Left matrix, `[*batch, M, K]`.
        b: Right matrix, `[*batch, K, N]`.
        c: Matrix to add, `[*batch, M, N]` after broadcasting; None if there is none, or `beta` is 0.
        bias: Bias, `[N]`, or None.
        out_dtype: Dtype of D.
        batch: Batch axes of D.
        alpha: Factor of the product.
        beta: Factor of `c`.
        activation: One of `ACTIVATIONS`, or None.
        gate: Gate of an MLP (epilogue.py), `[*batch, M, N]`, contiguous; the activation is applied to the
            gate instead of the product. None without a gate.
        up: Up projection of a gated MLP, `[*batch, M, N]`, contiguous, for the gradient of the activation; or
            None.
        gradient: Whether the product is the gradient of the activation's result, and D the gradient of its
            input.

    Attributes:
        M: Rows of D.
        N: Columns of D.
        K: Length of the dot products.
        size: Shape of D.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None = None
    bias: Tensor | None = None
    out_dtype: torch.dtype
    batch: tuple[int, ...]
    alpha: float = 1.0
    beta: float = 0.0
    activation: str | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    gradient: bool = False
    M: int = field(init=False)
    N: int = field(init=False)
    K: int = field(init=False)
    size: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        (self.M, self.K), self.N = self.a.shape[-2:], self.b.shape[-1]  # pyright: ignore[reportConstantRedefinition]
        self.size = (*self.batch, self.M, self.N)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """A, B, C and the bias."""
        return self.a, self.b, self.c, self.bias

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd records operations on these tensors."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor is not None and tensor.requires_grad for tensor in self.tensors)

    def shape(self, *, adds: bool = False, writes: int = 0) -> Shape:
        """Return the properties of the GEMM that the choice of a config depends on.

        Args:
            adds: Whether the result is added to C in memory.
            writes: Number of matrices that the epilogue stores in addition to the result (`pre` and `d2` of
                `Launch`).
        """
        # TMA configs compute single products, so a batch counts as unaligned.
        aligned = not self.batch and is_aligned(self.a) and is_aligned(self.b)
        return Shape(
            M=self.M, N=self.N, K=self.K, dtype=self.a.dtype, out_dtype=self.out_dtype,
            batch=math.prod(self.batch),
            aligned=aligned and self.N * self.out_dtype.itemsize % TMA_BYTES == 0,
            c_itemsize=self.c.element_size() if self.c is not None else 0, adds=adds,
            layout="".join("n" if matrix.stride(-1) == 1 else "t" for matrix in (self.a, self.b)),
            # The bias is left out, because neither backend needs a separate pass for it
            epilogue=f"{self.activation or ''}{' gradient' if self.gradient else ''}",
            epilogue_reads=(self.gate is not None) + (self.up is not None), epilogue_writes=writes,
            tf32=float32_precision(self.a) == "tf32",
        )  # fmt: skip


def float32_precision(a: Tensor) -> str:
    """Return how the kernels multiply float32: `tf32` if torch's own switch is on, else `ieee`."""
    return devices.float32_precision() if a.dtype == torch.float32 and a.is_cuda else "ieee"


def batch_of(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return the batch axes of a product: none for two matrices, otherwise the broadcast axes."""
    # For two matrices `broadcast_shapes` is not called, because a call takes microseconds.
    return () if a.ndim == b.ndim == 2 else tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


def is_aligned(tensor: Tensor) -> bool:
    """Return whether TMA can copy a matrix: contiguous along one axis, with rows aligned to 16 bytes.

    Example:
        >>> is_aligned(torch.zeros(4, 8)), is_aligned(torch.zeros(4, 8).T), is_aligned(torch.zeros(4, 9))
        (True, True, False)
    """
    itemsize = tensor.element_size()
    if tensor.ndim != 2 or 1 not in tensor.stride() or tensor.storage_offset() * itemsize % TMA_BYTES:
        return False
    # `pitch` is the distance between rows (or columns, if stored by columns), in elements.
    by_rows = tensor.stride(1) == 1
    pitch, length = tensor.stride(0 if by_rows else 1), tensor.shape[1 if by_rows else 0]
    return pitch >= length and pitch * itemsize % TMA_BYTES == 0


def _check_device_and_dtype(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"gemm: a is on {device} and {name} on {tensor.device}: expected one device")
    # A complex C would lose its imaginary part in the sum.
    if not tensor.is_floating_point():
        raise TypeError(f"{name} is {tensor.dtype}: expected a floating-point dtype")


def check_operands(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Operands:
    """Check that operands fit together, and return the broadcast operands.

    Raises:
        ValueError: Shapes or devices do not fit, or the activation is unknown.
        RuntimeError: A shape cannot be broadcast; torch raises this error.
        TypeError: The kernels do not support a dtype, or two dtypes differ.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"gemm of a {list(a.shape)} and b {list(b.shape)}: expected [*batch, M, K] and [*batch, K, N]"
        )
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise TypeError(f"gemm of a {a.dtype} and b {b.dtype}: expected one dtype for both, of {names}")
    if out_dtype not in (None, *DTYPES):
        raise TypeError(f"out_dtype={out_dtype}: expected {names}, or None")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}, or None")
    for name, tensor in {"b": b, "c": c, "bias": bias}.items():
        if tensor is not None:
            _check_device_and_dtype(name, tensor, a.device)
    batch, N = batch_of(a, b), b.shape[-1]
    size = (*batch, a.shape[-2], N)
    if c is not None and c.shape != size:  # otherwise C stays the same object, which may be `out`
        c = c.expand(size)
    if bias is not None:
        bias = bias.expand(N).contiguous()  # the kernels assume a stride of 1
    if not alpha:  # as in BLAS: A and B are not read, and may hold NaN
        a, b = a[..., :0], b[..., :0, :]
    return Operands(
        a=a, b=b, c=c, bias=bias, alpha=alpha, beta=beta, activation=activation, batch=batch,
        out_dtype=out_dtype or a.dtype,
    )  # fmt: skip


def fold_batch(operands: Operands, out: Tensor | None) -> tuple[Operands, Tensor | None]:
    """Return the GEMM as one product, [batch * M, K] @ [K, N], if B is a matrix and A needs no copy."""
    if not operands.batch or operands.b.ndim > 2:
        return operands, out
    rows = math.prod(operands.batch) * operands.M
    try:
        # `view` never copies: if the batch axes cannot be merged, `view` raises an error.
        a, c, out_rows = (
            tensor.view(rows, tensor.shape[-1]) if tensor is not None else None
            for tensor in (operands.a, operands.c, out)
        )
    except RuntimeError:  # no single stride leads from row to row
        return operands, out
    return replace(operands, a=a, c=c, batch=()), out_rows


def check_out(operands: Operands, out: Tensor) -> None:
    """Check that the result can be written to `out`.

    Raises:
        ValueError: `out` differs from the result in shape, dtype or device, or some of its elements share
            memory.
        RuntimeError: An operand or `out` needs a gradient, which `out` does not support.
    """
    if out.shape != operands.size or out.dtype != operands.out_dtype or out.device != operands.a.device:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}: "
            f"expected {operands.out_dtype} {list(operands.size)} on {operands.a.device}"
        )
    reached = 0  # last offset within axes of smaller strides: the next stride must be larger
    for stride, length in sorted(zip(out.stride(), out.shape, strict=True)) if out.numel() else ():
        if length > 1 and stride <= reached:
            raise ValueError(f"out has strides {out.stride()}: expected that no two elements share memory")
        reached += stride * (length - 1)
    if operands.needs_gradient or (torch.is_grad_enabled() and out.requires_grad):
        raise RuntimeError(
            "gemm(out=...) has no gradient, but out or an operand requires one: use torch.no_grad()"
        )


def in_place(c: Tensor, out: Tensor) -> bool:
    """Return whether both tensors have the same elements in the same memory."""
    if c is out:
        return True
    same = (c.dtype, c.shape, c.stride()) == (out.dtype, out.shape, out.stride())
    return same and not is_fake(out) and c.data_ptr() == out.data_ptr()


def overlaps_operand(operands: Operands, out: Tensor) -> bool:
    """Return whether writing `out` may overwrite an operand before kernels read it; `out` may be C itself."""
    if torch.compiler.is_compiling() or out.is_meta or is_fake(out):
        return False
    c = None if operands.c is None or in_place(operands.c, out) else operands.c
    spans: list[tuple[int, int]] = []  # per tensor: addresses of the first byte, and after the last
    read = (operands.a, operands.b, c, operands.bias)
    for tensor in (out, *(tensor for tensor in read if tensor is not None and tensor.numel())):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        # From the first to the last element; torch has no negative strides.
        num_elements = 1 + sum((length - 1) * stride for length, stride in steps)
        spans.append((tensor.data_ptr(), tensor.data_ptr() + num_elements * tensor.element_size()))
    begin, end = spans[0]
    return any(first < end and begin < last for first, last in spans[1:])
