"""The epilogue of the GEMM kernels: operations on a finished tile, between its last product and its stores.

A tile x = alpha * A @ B + beta * C + bias [BLOCK_M, BLOCK_N] is in registers, in float32, and every other
operand is read once. MLPs of Transformers use the cases in the table below, with g for `gate`, u for `up`,
and f for the activation. gemm_kernels.py calls `finish`:

    GRADIENT  gate  up    d                pre        d2
    no        None        f(x)             x
    no        g           f(g) * x         x                     SwiGLU; x is the up projection
    yes       g     None  x * f'(g)        f(g)                  x is the gradient of f(g)
    yes       g     u     x * u * f'(g)    f(g) * u   x * f(g)   x is the gradient of f(g) * u

`pre` and `d2` are stored if the caller passes tensors for them. In a gradient, `pre` is d of the forward
pass, computed again. The next GEMM of the backward pass reads this `pre`, so the forward pass does not have
to save d.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any

# Triton has wheels for Linux only. Elsewhere, launching a kernel raises an ImportError with the remedy.
triton: Any = None
tl: Any = None
try:
    import triton as _triton
    import triton.language as _tl
except ImportError:
    pass
else:
    triton, tl = _triton, _tl


class _MissingKernel:
    """Stand in for `triton.jit` if Triton is not installed."""

    def __init__(self, function: Any) -> None:
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError(
            "backend=triton needs Triton, which is not installed: pip install triton, or use backend=torch"
        )


jit: Any = triton.jit if triton is not None else _MissingKernel
INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, even on a CPU (TRITON_INTERPRET=1 was set at import)."""


@jit
def address(matrix, row, column, stride_m, stride_n):
    """Return the 64-bit address of an element, because a matrix may have more than 2**31 elements."""
    return matrix + tl.cast(row, tl.int64) * stride_m + tl.cast(column, tl.int64) * stride_n


@jit
def indices(LENGTH: tl.constexpr, WIDE: tl.constexpr):
    """Return the row or column numbers of a tile, starting at 0; with WIDE in 64 bits, for long strides."""
    return tl.arange(0, LENGTH).to(tl.int64 if WIDE else tl.int32)


@jit
def finish(
    acc, m, n, inside_m, inside_n, N, c, stride_cm, stride_cn, bias, gate, up, column, packed, alpha, beta,
    ACTIVATION: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Return the values of `pre`, `d2` and `d` for the tile acc [BLOCK_M, WIDTH], in float32.

    c points to the start of the tile, and bias [N] to column 0. gate and up [batch, M, N] are contiguous, and
    the tile starts at element `packed` of both.
    """
    inside = inside_m[:, None] & inside_n[None, :]
    x = acc * alpha
    if c is not None:
        c_tile = c + (m[:, None] * stride_cm + n[None, :] * stride_cn)
        x += beta * tl.load(c_tile, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    offsets = m[:, None] * N + n[None, :]
    if gate is not None:
        g = tl.load(gate + packed + offsets, mask=inside, other=0.0).to(tl.float32)
    # Without a gradient, `pre` is the value before the activation, or the up projection.
    saved, x2 = x, x
    if GRADIENT:
        # x is the gradient of f(g), or of f(g) * u; here `saved` recomputes the forward pass's result.
        saved = _activate(g, ACTIVATION)
        if up is not None:
            u = tl.load(up + packed + offsets, mask=inside, other=0.0).to(tl.float32)
            x2 = x * saved
            saved *= u
            x *= u
        x = _times_slope(x, g, ACTIVATION)
    elif gate is None:
        x = _activate(x, ACTIVATION)
    else:
        x *= _activate(g, ACTIVATION)
    return saved, x2, x


@jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)), with exp(x) = exp2(log2(e) x)."""
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@jit
def _activate(x, ACTIVATION: tl.constexpr):
    """Return activation(x)."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    if ACTIVATION == "silu":
        x = x * _sigmoid(x)
    if ACTIVATION == "gelu_tanh":
        # x (1 + tanh(v)) / 2 = x * sigmoid(2 v) with v = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x * _sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    return x


@jit
def _times_slope(x, g, ACTIVATION: tl.constexpr):
    """Return x * activation'(g)."""
    if ACTIVATION == "relu":
        x = tl.where(g <= 0.0, 0.0, x)
    if ACTIVATION == "silu":
        s = _sigmoid(g)
        x = x * s * (1.0 + g * (1.0 - s))
    if ACTIVATION == "gelu_tanh":
        s = _sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))
        x = x * s * (1.0 + g * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g))
    return x
