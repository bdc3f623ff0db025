"""Finish a tile of the product before it is stored: on the accumulator, so that nothing is read twice.

    x = alpha * scale_a * (A @ B) * scale_b + beta * C + bias            `finish`
    D = activation(x)                                                    `activate`
    D = x * activation'(at)                                              `gradient_at`
    logsumexp of each row of x, one value for each row and tile          `log_sum_exp`

Shapes: `acc` and x are [BLOCK_M, WIDTH] in float32, where WIDTH is BLOCK_N, or BLOCK_N / SUBTILES in
`gemm_tma`. `m` [BLOCK_M] and `n` [WIDTH] are the rows and columns of the product that the tile covers.

SwiGLU takes gate and up from neighbouring columns, g0 u0 g1 u1 ...: both are registers of one thread, and
no value has to move. D then has half the columns of x, [BLOCK_M, WIDTH / 2]; its gradient has twice as many.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

from lightning_eff.kernels.language import jit, tl


@jit
def finish(
    acc, m, n, M, N,
    c, stride_cm, stride_cn, bias, scale_a, scale_b, alpha, beta,
):  # fmt: skip
    """Return alpha * scale_a * acc * scale_b + beta * c + bias, [BLOCK_M, WIDTH]."""
    acc *= alpha
    if scale_a is not None:
        acc *= tl.load(scale_a + m, mask=m < M, other=0.0)[:, None]
    if scale_b is not None:
        acc *= tl.load(scale_b + n, mask=n < N, other=0.0)[None, :]
    if c is not None:
        c_tile = c + m[:, None] * stride_cm + n[None, :] * stride_cn
        acc += beta * tl.load(c_tile, mask=(m < M)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))  # log2(e): exp(-x) = exp2(-log2(e) x)


@jit
def _pairs(x):
    """Return the even and the odd columns of x, each [BLOCK_M, WIDTH / 2]."""
    return x.reshape(x.shape[0], x.shape[1] // 2, 2).split()


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return activation(x): [BLOCK_M, WIDTH], or [BLOCK_M, WIDTH / 2] for SwiGLU."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp2(-1.4426950408889634 * x))
    if ACTIVATION == "gelu_tanh":
        # x (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        x = x / (1.0 + tl.exp2(-2.8853900817779268 * u))
    if ACTIVATION == "swiglu":
        gate, up = _pairs(x)
        x = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up
    return x


@jit
def gradient_at(grad, at, m, tile_n, M, N_D, stride_m, stride_n, ACTIVATION: tl.constexpr):
    """Return grad * activation'(at), where `at` [M, N_D] is read at rows m and at the columns of tile_n.

    For SwiGLU, `at` and the result have twice the columns of grad.
    """
    WIDTH: tl.constexpr = grad.shape[1] * 2 if ACTIVATION == "swiglu" else grad.shape[1]
    n = tile_n.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at_tile = at + m[:, None] * stride_m + n[None, :] * stride_n
    at = tl.load(at_tile, mask=(m < M)[:, None] & (n < N_D)[None, :], other=0.0).to(tl.float32)
    if ACTIVATION == "relu":
        grad = tl.where(at <= 0.0, 0.0, grad)  # where `at` is NaN the gradient passes, as in torch
    if ACTIVATION == "silu":  # s + x s (1 - s), s = sigmoid(x)
        sigmoid = _sigmoid(at)
        grad *= sigmoid * (1.0 + at * (1.0 - sigmoid))
    if ACTIVATION == "gelu_tanh":  # s + x s (1 - s) 2 u', s = sigmoid(2 u)
        sigmoid = _sigmoid(1.5957691216057308 * at * (1.0 + 0.044715 * at * at))
        slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * at * at)
        grad *= sigmoid + at * sigmoid * (1.0 - sigmoid) * slope
    if ACTIVATION == "swiglu":
        gate, up = _pairs(at)
        sigmoid = _sigmoid(gate)
        grad_gate = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
        grad_up = grad * gate * sigmoid
        grad = tl.join(grad_gate, grad_up).reshape(at.shape[0], at.shape[1])
    return grad


@jit
def log_sum_exp(x, width):
    """Return log(sum(exp(x))) over the first `width` columns of a tile, [BLOCK_M]."""
    x = tl.where((tl.arange(0, x.shape[1]) < width)[None, :], x, float("-inf"))
    most = tl.max(x, axis=1)
    shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    total = tl.sum(tl.exp2(1.4426950408889634 * (x - shift[:, None])), axis=1)
    return shift + 0.6931471805599453 * tl.log2(total)


@jit
def write(
    acc, z, tile_m, tile_n, M, N, N_D,
    c, bias, scale_a, scale_b, at, pre, logsumexp, d,
    stride_cz, stride_cm, stride_cn,
    stride_xz, stride_xm, stride_xn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Finish the tile (tile_m, tile_n) of product z, and store what is inside D [M, N_D].

    `at`, or `pre`, which receives x before the activation, has the strides stride_x.
    """
    m = tile_m.to(tl.int64) * acc.shape[0] + tl.arange(0, acc.shape[0])
    n = tile_n.to(tl.int64) * acc.shape[1] + tl.arange(0, acc.shape[1])
    if c is not None:
        c += z * stride_cz
    x = finish(acc, m, n, M, N, c, stride_cm, stride_cn, bias, scale_a, scale_b, alpha, beta)
    if logsumexp is not None:  # [batch, tiles along N, M]
        tiles_n = tl.cdiv(N, acc.shape[1])
        tl.store(
            logsumexp + (z * tiles_n + tile_n) * M + m, log_sum_exp(x, N - tile_n * acc.shape[1]), mask=m < M
        )
    if pre is not None:
        offsets = z * stride_xz + m[:, None] * stride_xm + n[None, :] * stride_xn
        tl.store(pre + offsets, x.to(pre.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
    if at is not None:
        x = gradient_at(x, at + z * stride_xz, m, tile_n, M, N_D, stride_xm, stride_xn, ACTIVATION)
    else:
        x = activate(x, ACTIVATION)
    n_d = tile_n.to(tl.int64) * x.shape[1] + tl.arange(0, x.shape[1])
    offsets = z * stride_dz + m[:, None] * stride_dm + n_d[None, :] * stride_dn
    tl.store(d + offsets, x.to(d.dtype.element_ty), mask=(m < M)[:, None] & (n_d < N_D)[None, :])
