"""Check the operands of a GEMM once, for all backends: shapes, dtypes, devices, and where the result goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lightning_eff.kernels.reference import ACTIVATIONS, GATED
from lightning_eff.kernels.tile_configs import TMA_BYTES, Shape

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RESULT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPERAND_DTYPES = (*RESULT_DTYPES, *FLOAT8)


@dataclass(kw_only=True, slots=True, eq=False)
class Operands:
    """The checked operands of D = activation(alpha * A @ B + beta * C + bias).

    Args:
        a: `[*batch, M, K]`.
        b: `[*batch, K, N]`.
        c: `[*batch, M, N]` after broadcasting, or None where it is not read.
        bias: `[N]`, or None.
        scale_a: One float32 per row of `a`, `[M]`; None for 1.
        scale_b: One float32 per column of `b`, `[N]`; None for 1.
        out_dtype: Of D.
        batch: Batch axes of D.
        alpha: Factor of the product.
        beta: Factor of `c`.
        activation: One of `reference.ACTIVATIONS`, or None.
        at: The input of `activation`, `[*batch, M, columns]`, whose gradient is computed instead; or None.

    Attributes:
        M: Rows of D.
        N: Columns of the product.
        K: Length of the sums.
        columns: Columns of D: N, N / 2 for SwiGLU, 2 N for its gradient.
        size: Shape of D.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None = None
    bias: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    out_dtype: torch.dtype
    batch: tuple[int, ...]
    alpha: float = 1.0
    beta: float = 0.0
    activation: str | None = None
    at: Tensor | None = None
    M: int = field(init=False)
    N: int = field(init=False)
    K: int = field(init=False)
    columns: int = field(init=False)
    size: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        (self.M, self.K), self.N = self.a.shape[-2:], self.b.shape[-1]  # pyright: ignore[reportConstantRedefinition]
        gated = self.N // 2 if self.at is None else self.N * 2
        self.columns = gated if self.activation in GATED else self.N
        self.size = (*self.batch, self.M, self.columns)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are not None."""
        tensors = (self.a, self.b, self.c, self.bias, self.scale_a, self.scale_b, self.at)
        return [tensor for tensor in tensors if tensor is not None]

    def shape(self, *, adds: bool = False) -> Shape:
        """Return what the choice of a config depends on.

        Args:
            adds: The result is added to C in C's own memory.
        """
        aligned = not self.batch and is_aligned(self.a) and is_aligned(self.b)
        aligned = aligned and self.columns * self.out_dtype.itemsize % TMA_BYTES == 0
        read = [tensor.element_size() for tensor in (self.c, self.at) if tensor is not None]
        return Shape(
            M=self.M, N=self.N, K=self.K, dtype=self.a.dtype, out_dtype=self.out_dtype,
            batch=math.prod(self.batch), aligned=aligned, reads_c=self.c is not None, adds=adds,
            layout="".join("n" if matrix.stride(-1) == 1 else "t" for matrix in (self.a, self.b)),
            # A bias costs neither backend a pass of its own.
            fused=any(part is not None for part in (self.scale_a, self.scale_b, self.activation)),
            columns_ratio=self.columns / max(self.N, 1),
            reads_at=self.at is not None, read_itemsize=max(read, default=0),
            tf32=float32_precision(self.a) == "tf32",
        )  # fmt: skip


def float32_precision(a: Tensor) -> str:
    """Return how float32 is multiplied: `tf32` where torch's own switch is on, else `ieee`."""
    tf32 = a.dtype == torch.float32 and a.is_cuda and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


def batch_of(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return the batch axes of a product; two matrices skip `broadcast_shapes`, which takes microseconds."""
    return () if a.ndim == b.ndim == 2 else tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


def is_aligned(tensor: Tensor) -> bool:
    """Return whether TMA can copy a matrix: contiguous along one axis, its rows 16-byte aligned.

    Example:
        >>> is_aligned(torch.zeros(4, 8)), is_aligned(torch.zeros(4, 8).T), is_aligned(torch.zeros(4, 9))
        (True, True, False)
    """
    itemsize = tensor.element_size()
    if tensor.ndim != 2 or 1 not in tensor.stride() or tensor.storage_offset() * itemsize % TMA_BYTES:
        return False
    by_rows = tensor.stride(1) == 1
    pitch, length = tensor.stride(0 if by_rows else 1), tensor.shape[1 if by_rows else 0]
    return pitch >= length and pitch * itemsize % TMA_BYTES == 0


def check_operands(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    at: Tensor | None = None,
) -> Operands:
    """Check that operands fit together, broadcast them, and return them.

    Raises:
        ValueError: Shapes, devices, an activation or a scale do not fit.
        TypeError: A dtype that the kernels do not multiply, or two that differ.
    """
    batch = _check_product(a, b, out_dtype, activation, at)
    tensors = {"b": b, "c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "gradient_at": at}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != a.device:
            text = f"gemm: a is on {a.device} and {name} on {tensor.device}: expected one device"
            raise ValueError(text)
    M, N = a.shape[-2], b.shape[-1]
    if not alpha:  # as in BLAS: A and B are not read, and may hold NaN
        a, b = a[..., :0], b[..., :0, :]
    bias = _expanded("bias", bias, (N,))
    operands = Operands(
        a=a, b=b, alpha=alpha, beta=beta, activation=activation, at=at, batch=batch,
        c=_expanded("c", c, (*batch, M, N)),
        bias=bias.contiguous() if bias is not None else None,
        scale_a=_expanded_scale("scale_a", scale_a, M),
        scale_b=_expanded_scale("scale_b", scale_b, N),
        out_dtype=out_dtype or (torch.bfloat16 if a.dtype in FLOAT8 else a.dtype),
    )  # fmt: skip
    if at is not None:
        operands.at = _expanded("gradient_at", at, operands.size)
        check_no_gradient(operands, "gemm(gradient_at=...)")
    return operands


def _check_product(
    a: Tensor, b: Tensor, out_dtype: torch.dtype | None, activation: str | None, at: Tensor | None
) -> tuple[int, ...]:
    """Check the shapes of A and B, the dtypes and the activation, and return the batch axes."""
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        text = f"gemm of a {list(a.shape)} and b {list(b.shape)}: expected [*batch, M, K] and [*batch, K, N]"
        raise ValueError(text)
    if a.dtype not in OPERAND_DTYPES or b.dtype not in OPERAND_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in OPERAND_DTYPES)
        text = f"gemm of a {a.dtype} and b {b.dtype}: expected {names}"
        raise TypeError(text)
    if out_dtype not in (None, *RESULT_DTYPES):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in RESULT_DTYPES)
        text = f"out_dtype={out_dtype}: expected {names}, or None"
        raise TypeError(text)
    if a.dtype != b.dtype and not (a.dtype in FLOAT8 and b.dtype in FLOAT8):
        text = f"gemm of a {a.dtype} and b {b.dtype}: expected one dtype for both, or two float8 dtypes"
        raise TypeError(text)
    if activation is not None and activation not in ACTIVATIONS:
        text = f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}, or None"
        raise ValueError(text)
    if at is not None and activation is None:
        text = "gradient_at without an activation: pass activation= as well, whose gradient to compute"
        raise ValueError(text)
    if activation in GATED and at is None and b.shape[-1] % 2:
        text = (
            f"activation={activation} of a {list(a.shape)} and b {list(b.shape)}: expected an even number "
            "of columns of b, a gate and an up for each column of the result"
        )
        raise ValueError(text)
    try:
        return batch_of(a, b)
    except RuntimeError:
        text = f"gemm of a {list(a.shape)} and b {list(b.shape)}: their batch axes cannot be broadcast"
        raise ValueError(text) from None


def _expanded(name: str, tensor: Tensor | None, size: tuple[int, ...]) -> Tensor | None:
    if tensor is None:
        return None
    if not tensor.is_floating_point():
        text = f"{name} is {tensor.dtype}: expected a floating-point dtype"
        raise TypeError(text)
    try:
        return tensor if tensor.shape == size else tensor.expand(size)
    except RuntimeError:
        text = f"{name} is {list(tensor.shape)}: expected {list(size)}, or what broadcasts to it"
        raise ValueError(text) from None


def _expanded_scale(name: str, scale: Tensor | None, length: int) -> Tensor | None:
    if scale is None:
        return None
    if scale.dtype != torch.float32 or scale.numel() not in (1, length):
        text = f"{name} is {scale.dtype} {list(scale.shape)}: expected float32, one value or [{length}]"
        raise ValueError(text)
    return scale.reshape(-1).expand(length).contiguous()


def check_no_gradient(operands: Operands, what: str) -> None:
    """Raise a RuntimeError if an operand needs a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands.tensors):
        text = f"{what} has no gradient, but an operand requires one: detach it, or use torch.no_grad()"
        raise RuntimeError(text)


def fold_batch(operands: Operands, out: Tensor | None) -> tuple[Operands, Tensor | None]:
    """Return the same GEMM as one product, [batch * M, K] @ [K, N], if B is one matrix and no copy is needed.

    Args:
        operands: Of any batch axes.
        out: Where the result goes, or None.
    """
    if not operands.batch or operands.b.ndim > 2 or operands.scale_a is not None:
        return operands, out
    rows = math.prod(operands.batch) * operands.M
    try:
        a, c, at, out_rows = (
            tensor.view(rows, tensor.shape[-1]) if tensor is not None else None
            for tensor in (operands.a, operands.c, operands.at, out)
        )
    except RuntimeError:  # no single stride leads from row to row
        return operands, out
    return replace(operands, a=a, c=c, at=at, batch=()), out_rows


def check_out(operands: Operands, out: Tensor) -> None:
    """Check that the result can be written to a tensor.

    Raises:
        ValueError: Its shape, dtype or device differs, or several of its elements share memory.
        RuntimeError: An operand or `out` needs a gradient, which cannot pass through `out`.
    """
    if out.shape != operands.size or out.dtype != operands.out_dtype or out.device != operands.a.device:
        text = (
            f"out is {out.dtype} {list(out.shape)} on {out.device}: "
            f"expected {operands.out_dtype} {list(operands.size)} on {operands.a.device}"
        )
        raise ValueError(text)
    reached = 0  # the last offset that axes of smaller strides reach: the next stride must exceed it
    for stride, length in sorted(zip(out.stride(), out.shape, strict=True)) if out.numel() else ():
        if length > 1 and stride <= reached:
            text = f"out has strides {out.stride()}: expected that no two elements share memory"
            raise ValueError(text)
        reached += stride * (length - 1)
    if torch.is_grad_enabled() and out.requires_grad:
        text = "gemm(out=...) has no gradient, but out requires one: omit out, or use torch.no_grad()"
        raise RuntimeError(text)
    check_no_gradient(operands, "gemm(out=...)")


def in_place(c: Tensor, out: Tensor) -> bool:
    """Return whether both are the same elements of the same memory."""
    if c is out:
        return True
    same = (c.dtype, c.shape, c.stride()) == (out.dtype, out.shape, out.stride())
    return same and not is_fake(out) and c.data_ptr() == out.data_ptr()


def overlaps_operand(operands: Operands, out: Tensor) -> bool:
    """Return whether writing `out` may overwrite an operand that is still read; C in place is fine."""
    if torch.compiler.is_compiling() or out.is_meta or is_fake(out):
        return False
    c = None if operands.c is None or in_place(operands.c, out) else operands.c
    read = (operands.a, operands.b, c, operands.bias, operands.scale_a, operands.scale_b, operands.at)
    spans: list[tuple[int, int]] = []  # the first address of a tensor's elements, and the one after the last
    for tensor in (out, *(tensor for tensor in read if tensor is not None and tensor.numel())):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = 1 + sum((length - 1) * stride for length, stride in steps)
        spans.append((tensor.data_ptr(), tensor.data_ptr() + num_elements * tensor.element_size()))
    begin, end = spans[0]
    return any(first < end and begin < last for first, last in spans[1:])
