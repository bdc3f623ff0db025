"""The Triton kernels of the GEMM, D = activation(alpha * A @ B + beta * C + bias).

Each program computes tiles of D, BLOCK_M x BLOCK_N, with a float32 accumulator in registers, and walks
through K in steps of BLOCK_K:

                    N
              . . . b b . .          b  [BLOCK_K, BLOCK_N]
            K . . . b b . .
      K                              a  [BLOCK_M, BLOCK_K]
    . . . .   . . . . . . .
    a a a a   . . . D D . .          D  [BLOCK_M, BLOCK_N]
  M a a a a   . . . D D . .
    . . . .   . . . . . . .

`gemm_tma` is for Hopper and later: as many programs as SMs, each of which computes tile after tile; the
tensor memory accelerator (TMA) copies whole blocks and handles the edges. `gemm_pointers` is for everything
else: any strides, batch axes, older GPUs. `reduce_split_k` adds the partial sums where either has split K.
The epilogue (C, bias, activation) is computed on the accumulator, so that nothing is read twice.

Triton has wheels for Linux only: elsewhere launching a kernel raises an ImportError with the remedy.

Source: learned from Triton's tutorials 03 and 09, and from BLAS for the meaning of alpha and beta.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any

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
    """Replace `triton.jit` where Triton is not installed."""

    def __init__(self, function: Any) -> None:
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> Any:
        text = "backend=triton needs Triton, which is not installed: pip install triton, or use backend=torch"
        raise ImportError(text)


jit: Any = triton.jit if triton is not None else _MissingKernel
INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, also on a CPU: TRITON_INTERPRET=1 was set at import."""


@jit
def _tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return row and column of a tile, in an order in which concurrent tiles share A and B in the L2 cache.

    Down a column of GROUP_M tiles, then the next column, through a band of GROUP_M rows:

        0 2 4 6      (GROUP_M = 2)
        1 3 5 7
        8 ...
    """
    band = GROUP_M * tiles_n
    first = tile // band * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % band % rows, tile % band // rows


@jit
def _multiply(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return acc [BLOCK_M, BLOCK_N] + a [BLOCK_M, BLOCK_K] @ b [BLOCK_K, BLOCK_N] in float32."""
    if INTERPRETED and a.dtype == tl.bfloat16:  # the interpreter multiplies it wrongly, in every release
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@jit
def _range_of_k(split, K, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Return where split number `split` of K begins and ends; only the last has an incomplete step."""
    if SPLIT_K == 1:
        first, last = 0, K
    else:
        depth = tl.cdiv(K, BLOCK_K * SPLIT_K) * BLOCK_K
        first, last = split * depth, tl.minimum(split * depth + depth, K)
    return first, last


@jit
def _first(matrix, row, column, stride_m, stride_n):
    """Return the address of an element of a matrix, which may have more elements than 32 bits count."""
    return matrix + tl.cast(row, tl.int64) * stride_m + tl.cast(column, tl.int64) * stride_n


@jit
def _indices(LENGTH: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows or columns of a tile: 0, 1, ... WIDE: their offsets may not fit in 32 bits."""
    return tl.arange(0, LENGTH).to(tl.int64 if WIDE else tl.int32)


@jit
def _finish(acc, m, n, inside_m, inside_n, c, stride_cm, stride_cn, bias, alpha, beta):
    """Return alpha * acc + beta * c + bias [BLOCK_M, WIDTH] in float32; c and bias begin at the tile."""
    acc *= alpha
    if c is not None:
        c_tile = c + (m[:, None] * stride_cm + n[None, :] * stride_cn)
        acc += beta * tl.load(c_tile, mask=inside_m[:, None] & inside_n[None, :], other=0.0).to(tl.float32)
    if bias is not None:
        acc += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    return acc


@jit
def _activate(x, ACTIVATION: tl.constexpr):
    """Return activation(x), with exp(x) = exp2(log2(e) x)."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp2(-1.4426950408889634 * x))
    if ACTIVATION == "gelu_tanh":
        # x (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        x = x / (1.0 + tl.exp2(-2.8853900817779268 * u))
    return x


@jit
def _write(
    acc, z, first_m, first_n, M, N, c, bias, pre, d,
    stride_cz, stride_cm, stride_cn, stride_dz, stride_dm, stride_dn,
    alpha, beta, ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Finish the tile of product z that begins at (first_m, first_n), and store what is inside D [M, N]."""
    m, n = _indices(acc.shape[0], WIDE), _indices(acc.shape[1], WIDE)
    inside_m, inside_n = m < M - first_m, n < N - first_n
    inside = inside_m[:, None] & inside_n[None, :]
    if c is not None:
        c = _first(c + z * stride_cz, first_m, first_n, stride_cm, stride_cn)
    if bias is not None:
        bias += first_n
    x = _finish(acc, m, n, inside_m, inside_n, c, stride_cm, stride_cn, bias, alpha, beta)
    if pre is not None:
        pre = _first(pre + z * M * N, first_m, first_n, N, 1)
        tl.store(pre + (m[:, None] * N + n[None, :]), x.to(pre.dtype.element_ty), mask=inside)
    d = _first(d + z * stride_dz, first_m, first_n, stride_dm, stride_dn)
    d_tile = d + (m[:, None] * stride_dm + n[None, :] * stride_dn)
    tl.store(d_tile, _activate(x, ACTIVATION).to(d.dtype.element_ty), mask=inside)


@jit
def gemm_pointers(
    a, b, c, bias, pre, d,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_cz, stride_cm, stride_cn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of D[z] = activation(alpha * a[z] @ b[z] + beta * c[z] + bias).

    a [batch, M, K], b [batch, K, N], c and d [batch, M, N] of any strides; pre [batch, M, N], contiguous,
    receives the input of the activation. Program number (z * SPLIT_K + split) * tiles + tile. Beyond an edge
    0 is loaded, and nothing is stored. With SPLIT_K > 1 d is the float32 scratch [batch * SPLIT_K, ...] of
    partial sums.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    z_split = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    z = z_split // SPLIT_K
    first, last = _range_of_k((z_split % SPLIT_K).to(tl.int32), K, BLOCK_K, SPLIT_K)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    m, n, k = _indices(BLOCK_M, WIDE), _indices(BLOCK_N, WIDE), _indices(BLOCK_K, WIDE)
    # Only the addresses of whole steps move: the offsets inside a step stay, in half of the registers.
    a = _first(a + z * stride_az, first_m, first, stride_am, stride_ak)
    b = _first(b + z * stride_bz, first, first_n, stride_bk, stride_bn)
    a_offsets = m[:, None] * stride_am + k[None, :] * stride_ak
    b_offsets = k[:, None] * stride_bk + n[None, :] * stride_bn

    step = tl.full((), BLOCK_K, tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        inside = k < K - start
        # Shapes: a_block is [BLOCK_M, BLOCK_K], b_block is [BLOCK_K, BLOCK_N].
        a_block = tl.load(a + a_offsets, mask=(m < M - first_m)[:, None] & inside[None, :], other=0.0)
        b_block = tl.load(b + b_offsets, mask=inside[:, None] & (n < N - first_n)[None, :], other=0.0)
        acc = _multiply(a_block, b_block, acc, PRECISION, INTERPRETED)
        a += step * stride_ak
        b += step * stride_bk

    _write(
        acc, z_split, first_m, first_n, M, N, c, bias, pre, d,
        stride_cz, stride_cm, stride_cn, stride_dz, stride_dm, stride_dn, alpha, beta, ACTIVATION, WIDE,
    )  # fmt: skip


@jit
def reduce_split_k(
    partials, c, bias, pre, d,
    M, N,
    stride_p, stride_pm,
    stride_cz, stride_cm, stride_cn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of D[z] from the sum over s of partials[z * SPLIT_K + s], always in the same order.

    partials [batch * SPLIT_K, M or more, N or more] in float32, the tile [BLOCK_M, BLOCK_N]; the epilogue of
    a product whose K is split is computed here, once.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    z = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    m, n = _indices(BLOCK_M, WIDE), _indices(BLOCK_N, WIDE)
    tile = _first(partials + z * SPLIT_K * stride_p, first_m, first_n, stride_pm, 1)
    offsets, inside = (
        m[:, None] * stride_pm + n[None, :],
        (m < M - first_m)[:, None] & (n < N - first_n)[None, :],
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(SPLIT_K):
        acc += tl.load(tile + offsets, mask=inside, other=0.0)
        tile += tl.cast(stride_p, tl.int64)
    _write(
        acc, z, first_m, first_n, M, N, c, bias, pre, d,
        stride_cz, stride_cm, stride_cn, stride_dz, stride_dm, stride_dn, alpha, beta, ACTIVATION, WIDE,
    )  # fmt: skip


@jit
def gemm_tma(  # noqa: C901, PLR0912, PLR0915 - a kernel is one function
    a, b, c, bias, pre, d,
    M, N, K,
    stride_a, stride_b, stride_cm, stride_d,
    alpha, beta,
    NUM_SMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr, SPLIT_K: tl.constexpr,
    SUBTILES: tl.constexpr, ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute tiles number program_id, program_id + NUM_SMS, ... of D = activation(alpha * a @ b + ...).

    a [M, K] is contiguous along K (A_BY_ROWS) or along M, b [K, N] along N (B_BY_ROWS) or along K, c and pre
    [M, N] along N; 16 bytes of D have as many elements as divide N and stride_cm. A finished tile [BLOCK_M,
    BLOCK_N] is stored as SUBTILES tiles [BLOCK_M, WIDTH]. ADDS: d += tile, in memory.
    """
    if A_BY_ROWS:
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    else:
        a_tiles = tl.make_tensor_descriptor(a, [K, M], [stride_a, 1], [BLOCK_K, BLOCK_M])
    if B_BY_ROWS:
        b_tiles = tl.make_tensor_descriptor(b, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    else:
        b_tiles = tl.make_tensor_descriptor(b, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    # No change of values: the compiler sees that they are multiples, and reads C in vectors.
    ALIGNED: tl.constexpr = 128 // d.dtype.element_ty.primitive_bitwidth
    N, stride_cm = N // ALIGNED * ALIGNED, stride_cm // ALIGNED * ALIGNED
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    rows_d = M if SPLIT_K == 1 else SPLIT_K * tiles_m * BLOCK_M  # each split begins at a whole tile
    d_tiles = tl.make_tensor_descriptor(d, [rows_d, N], [stride_d, 1], [BLOCK_M, WIDTH])
    if pre is not None:
        pre_tiles = tl.make_tensor_descriptor(pre, [M, N], [N, 1], [BLOCK_M, WIDTH])

    for number in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLIT_K, NUM_SMS, flatten=True):
        split = number // (tiles_m * tiles_n)
        tile_m, tile_n = _tile_of(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        first, last = _range_of_k(split, K, BLOCK_K, SPLIT_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(first, last, BLOCK_K):
            a_block = a_tiles.load([first_m, start]) if A_BY_ROWS else a_tiles.load([start, first_m]).T
            b_block = b_tiles.load([start, first_n]) if B_BY_ROWS else b_tiles.load([first_n, start]).T
            acc = _multiply(a_block, b_block, acc, PRECISION, INTERPRETED)

        if SUBTILES == 1:  # noqa: SIM108 - no conditional expression: its two sides have other types
            halves = (acc,)
        else:  # left and right half [BLOCK_M, WIDTH]: a smaller tile to store leaves room for one more stage
            halves = acc.reshape(BLOCK_M, 2, WIDTH).permute(0, 2, 1).split()
        m, n = _indices(BLOCK_M, WIDE), _indices(WIDTH, WIDE)
        row_d = split * tiles_m * BLOCK_M + first_m
        for i in tl.static_range(SUBTILES):
            column = (tile_n * SUBTILES + i) * WIDTH
            c_tile = _first(c, first_m, column, stride_cm, 1) if c is not None else None
            bias_tile = bias + column if bias is not None else None
            x = _finish(
                halves[i], m, n, m < M - first_m, n < N - column, c_tile, stride_cm, 1, bias_tile, alpha, beta
            )
            if pre is not None:
                pre_tiles.store([first_m, column], x.to(pre.dtype.element_ty))
            x = _activate(x, ACTIVATION).to(d.dtype.element_ty)
            if ADDS and INTERPRETED:  # the interpreter has no TMA reduction, and runs programs in sequence
                d_tiles.store([row_d, column], d_tiles.load([row_d, column]) + x)
            elif ADDS:
                d_tiles.atomic_add([row_d, column], x)
            else:
                d_tiles.store([row_d, column], x)
