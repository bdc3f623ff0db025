"""What a GEMM is given: shapes, formats and places that fit each other, checked once for all backends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lightning_eff.kernels.reference import ACTIVATIONS, GATED
from lightning_eff.kernels.tile_configs import Shape

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8)


RESULTS = FORMATS[:4]


@dataclass(kw_only=True, slots=True, eq=False)
class Operands:
    """The tensors of a GEMM, of which `check` has seen that they fit.

    Args:
        a: `[*batch, M, K]`.
        b: `[*batch, K, N]`.
        c: `[*batch, M, N]` after broadcasting, or None where it is not read.
        bias: `[N]`, or None.
        scale_a: One float32 a row of `a`, `[M]`; None for 1.
        scale_b: One float32 a column of `b`, `[N]`; None for 1.
        out_dtype: Of the result.
        batch: Batch axes of the result.
        alpha: Factor of the product.
        beta: Factor of `c`.
        activation: What follows, or None.
        at: What it was applied to, `[*batch, M, columns]`, where its gradient follows instead.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None
    bias: Tensor | None
    scale_a: Tensor | None
    scale_b: Tensor | None
    out_dtype: torch.dtype
    batch: tuple[int, ...]
    alpha: float = 1.0
    beta: float = 0.0
    activation: str | None = None
    at: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        every = (self.a, self.b, self.c, self.bias, self.scale_a, self.scale_b, self.at)
        return [each for each in every if each is not None]

    @property
    def M(self) -> int:  # noqa: N802 - its name in the field
        """Rows of the result."""
        return self.a.shape[-2]

    @property
    def N(self) -> int:  # noqa: N802 - its name in the field
        """Columns of the product."""
        return self.b.shape[-1]

    @property
    def K(self) -> int:  # noqa: N802 - its name in the field
        """What is summed over."""
        return self.a.shape[-1]

    @property
    def columns(self) -> int:
        """Columns of the result."""
        if self.activation not in GATED:
            return self.N
        return self.N // 2 if self.at is None else self.N * 2

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.batch, self.M, self.columns)

    def empty(self, columns: int | None = None) -> Tensor:
        """Return memory for the result, or for one of so many columns."""
        size = (*self.batch, self.M, self.columns if columns is None else columns)
        return torch.empty(size, dtype=self.out_dtype, device=self.a.device)

    @property
    def batch_size(self) -> int:
        """Independent products."""
        return math.prod(self.batch)

    def product(self) -> Operands:
        """Return A and B alone, for a float32 product."""
        nothing = dict.fromkeys(("c", "bias", "scale_a", "scale_b"))
        return Operands(a=self.a, b=self.b, out_dtype=torch.float32, batch=self.batch, **nothing)

    def shape(self, *, adds: bool = False, saves_pre: bool = False) -> Shape:
        """Return what the choice of a tile depends on.

        Args:
            adds: The result is added to C where that lies.
            saves_pre: What is before the activation is written too.
        """
        aligned = not self.batch and is_aligned(self.a) and is_aligned(self.b)
        aligned = aligned and self.columns * self.out_dtype.itemsize % 16 == 0
        follows = (self.scale_a, self.scale_b, self.activation)  # a bias costs neither of us a pass
        read = [each.element_size() for each in (self.c, self.at) if each is not None]
        return Shape(
            M=self.M, N=self.N, K=self.K, dtype=self.a.dtype, out_dtype=self.out_dtype,
            batch=self.batch_size, aligned=aligned, reads_c=self.c is not None, adds=adds,
            layout="".join("n" if each.stride(-1) == 1 else "t" for each in (self.a, self.b)),
            fused=any(each is not None for each in follows), columns_ratio=self.columns / max(self.N, 1),
            reads_at=self.at is not None, read_itemsize=max(read, default=0), saves_pre=saves_pre,
            tf32=float32_precision(self.a) == "tf32",
        )  # fmt: skip


def _check_formats(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> bool:
    """Return whether both are of float8.

    Raises:
        TypeError: A format that no kernel knows, or two that do not go together.
    """
    if a.dtype not in FORMATS or b.dtype not in FORMATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)
        text = f"gemm of a {a.dtype} and b {b.dtype}: expected {names}"
        raise TypeError(text)
    if out_dtype not in (None, *RESULTS):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in RESULTS)
        text = f"out_dtype={out_dtype}: expected {names}, or None"
        raise TypeError(text)
    low = a.dtype in FLOAT8 and b.dtype in FLOAT8
    if a.dtype != b.dtype and not low:
        text = f"gemm of a {a.dtype} and b {b.dtype}: expected one format, or two of float8"
        raise TypeError(text)
    return low


def float32_precision(a: Tensor) -> str:
    """Return how float32 is multiplied: `tf32` where torch's own switch says so, else `ieee`."""
    tf32 = a.dtype == torch.float32 and a.is_cuda and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


def batch_of(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return the batch axes of a product; without any in no time, since torch takes microseconds."""
    return () if a.ndim == b.ndim == 2 else tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


def is_aligned(tensor: Tensor) -> bool:
    """Say whether TMA can copy a matrix: neighbours along one axis, and 16 bytes from row to row.

    Example:
        >>> is_aligned(torch.zeros(4, 8)), is_aligned(torch.zeros(4, 8).T), is_aligned(torch.zeros(4, 9))
        (True, True, False)
    """
    if tensor.ndim != 2 or 1 not in tensor.stride() or tensor.storage_offset() * tensor.element_size() % 16:
        return False
    far = tensor.stride(0) if tensor.stride(1) == 1 else tensor.stride(1)
    near = tensor.shape[1] if tensor.stride(1) == 1 else tensor.shape[0]
    return far >= near and far * tensor.element_size() % 16 == 0


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
    """Hold what was given against each other.

    Raises:
        ValueError: Shapes, devices, an activation or a scale do not fit.
        TypeError: A format that no kernel knows, or two that do not go together.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        text = f"gemm of a {list(a.shape)} and b {list(b.shape)}: expected [*batch, M, K] and [*batch, K, N]"
        raise ValueError(text)
    low = _check_formats(a, b, out_dtype)
    _check_activation(activation, a, b, at)
    try:
        batch = batch_of(a, b)
    except RuntimeError:
        text = f"gemm of a {list(a.shape)} and b {list(b.shape)}: their batch axes cannot be broadcast"
        raise ValueError(text) from None
    size = (*batch, a.shape[-2], b.shape[-1])
    others = {"b": b, "c": c, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "gradient_at": at}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != a.device:
            text = f"gemm: a is on {a.device} and {name} on {tensor.device}: expected one device"
            raise ValueError(text)
    given = Operands(
        a=a,
        b=b,
        alpha=alpha,
        beta=beta,
        activation=activation,
        at=at,
        c=_expanded("c", c, size),
        bias=expanded.contiguous() if (expanded := _expanded("bias", bias, size[-1:])) is not None else None,
        scale_a=_scale("scale_a", scale_a, size[-2]),
        scale_b=_scale("scale_b", scale_b, size[-1]),
        out_dtype=out_dtype or (torch.bfloat16 if low else a.dtype),
        batch=batch,
    )
    if at is not None:
        given.at = _expanded("gradient_at", at, given.size)
        check_no_gradient(given, "gemm(gradient_at=...)")
    if not alpha:  # as in BLAS: A and B are not read, and may hold anything
        given.a, given.b = a[..., :0], b[..., :0, :]
    return given


def _check_activation(activation: str | None, a: Tensor, b: Tensor, at: Tensor | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        text = f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}, or None"
        raise ValueError(text)
    if at is not None and activation is None:
        text = "gradient_at without an activation: expected the one whose gradient is meant"
        raise ValueError(text)
    if activation in GATED and at is None and b.shape[-1] % 2:
        text = (
            f"activation={activation} of a {list(a.shape)} and b {list(b.shape)}: expected an even number "
            "of columns of b, a gate and an up for each of the result"
        )
        raise ValueError(text)


def check_no_gradient(given: Operands, what: str) -> None:
    """Refuse operands that need a gradient.

    Raises:
        RuntimeError: One does.
    """
    if torch.is_grad_enabled() and any(each.requires_grad for each in given.tensors):
        text = f"{what} has no gradient, and an operand here needs one: detach it, or torch.no_grad()"
        raise RuntimeError(text)


def fold_batch(given: Operands, out: Tensor | None) -> tuple[Operands, Tensor | None]:
    """Return the same as one product where B is one matrix, so that batch axes are rows; without a copy.

    Args:
        given: The operands.
        out: Where the result goes, or None.
    """
    if not given.batch or given.b.ndim > 2 or given.scale_a is not None:
        return given, out
    rows = given.batch_size * given.M
    try:
        a, c, at, place = (
            each.view(rows, each.shape[-1]) if each is not None else None
            for each in (given.a, given.c, given.at, out)
        )
    except RuntimeError:  # no single stride leads from row to row
        return given, out
    return replace(given, a=a, c=c, at=at, batch=()), place


def check_out(given: Operands, out: Tensor) -> None:
    """Say whether a result can go to a place.

    Raises:
        ValueError: Its shape, format or device is another, or several of its elements share a place.
        RuntimeError: Something needs a gradient, which cannot go through it.
    """
    if out.shape != given.size or out.dtype != given.out_dtype or out.device != given.a.device:
        text = (
            f"out is {out.dtype} {list(out.shape)} on {out.device}: "
            f"expected {given.out_dtype} {list(given.size)} on {given.a.device}"
        )
        raise ValueError(text)
    reached = 0  # by the axes of smaller strides
    for step, length in sorted(zip(out.stride(), out.shape, strict=True)) if out.numel() else ():
        if length == 1:
            continue
        if step > reached:
            reached += step * (length - 1)
            continue
        text = f"out has strides {out.stride()}: expected a place of its own for each element"
        raise ValueError(text)
    if torch.is_grad_enabled() and out.requires_grad:
        text = "gemm(out=...) has no gradient, and out needs one: no out, or torch.no_grad()"
        raise RuntimeError(text)
    check_no_gradient(given, "gemm(out=...)")


def in_place(c: Tensor, out: Tensor) -> bool:
    """Say whether both are the same elements in the same places."""
    if c is out:
        return True
    same = (c.dtype, c.shape, c.stride()) == (out.dtype, out.shape, out.stride())
    return same and not is_fake(out) and c.data_ptr() == out.data_ptr()


def overlaps_operand(given: Operands, out: Tensor) -> bool:
    """Say whether a result may lie where an operand is still read; C in its very place does no harm."""
    if torch.compiler.is_compiling() or out.is_meta or is_fake(out):
        return False
    c = given.c if given.c is not None and not in_place(given.c, out) else None
    others = (given.a, given.b, c, given.bias, given.scale_a, given.scale_b, given.at)
    begin, end = _span(out)
    spans = [_span(each) for each in others if each is not None and each.numel()]
    return any(first < end and begin < last for first, last in spans)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which all elements lie."""
    steps = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def _expanded(name: str, tensor: Tensor | None, size: tuple[int, ...]) -> Tensor | None:
    if tensor is None:
        return None
    if not tensor.is_floating_point():
        text = f"{name} is {tensor.dtype}: expected a floating-point format"
        raise TypeError(text)
    if tensor.shape == size:
        return tensor
    try:
        return tensor.expand(size)
    except RuntimeError:
        text = f"{name} is {list(tensor.shape)}: expected {list(size)}, or what broadcasts to it"
        raise ValueError(text) from None


def _scale(name: str, scale: Tensor | None, length: int) -> Tensor | None:
    if scale is None:
        return None
    if scale.dtype != torch.float32 or scale.numel() not in (1, length):
        text = f"{name} is {scale.dtype} {list(scale.shape)}: expected float32, one value or [{length}]"
        raise ValueError(text)
    return scale.reshape(-1).expand(length).contiguous()
