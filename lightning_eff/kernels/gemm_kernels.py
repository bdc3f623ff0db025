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
What follows the product (scales, C, bias, activation) is computed on the accumulator by epilogue.py.

Source: learned from Triton's tutorials 03 and 09, and from BLAS for the meaning of alpha and beta.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

from lightning_eff.kernels import epilogue
from lightning_eff.kernels.language import jit, tl


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
    if a.dtype.primitive_bitwidth == 8:  # Hopper sums float8 in 14 bits: add to acc after each step
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


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
def gemm_pointers(
    a, b, c, bias, scale_a, scale_b, at, pre, logsumexp, d,
    M, N, K, N_D,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_cz, stride_cm, stride_cn,
    stride_xz, stride_xm, stride_xn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of D[z] = activation(alpha * a[z] @ b[z] + beta * c[z] + bias).

    a [batch, M, K], b [batch, K, N], c [batch, M, N], d [batch, M, N_D] of any strides. Program number
    (z * SPLIT_K + split) * tiles + tile. Beyond an edge 0 is loaded, and nothing is stored. With SPLIT_K > 1
    d is the float32 scratch [batch * SPLIT_K, ...] of partial sums.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    z_split = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    z = z_split // SPLIT_K
    first, last = _range_of_k((z_split % SPLIT_K).to(tl.int32), K, BLOCK_K, SPLIT_K)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = first + tl.arange(0, BLOCK_K)
    a_tile = a + z * stride_az + m[:, None] * stride_am + k[None, :].to(tl.int64) * stride_ak
    b_tile = b + z * stride_bz + k[:, None].to(tl.int64) * stride_bk + n[None, :] * stride_bn

    step = tl.full((), BLOCK_K, tl.int64)  # a step of a large stride does not fit 32 bits
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        inside = start + tl.arange(0, BLOCK_K) < K
        # Shapes: a_block is [BLOCK_M, BLOCK_K], b_block is [BLOCK_K, BLOCK_N].
        a_block = tl.load(a_tile, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        b_block = tl.load(b_tile, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = _multiply(a_block, b_block, acc, PRECISION, INTERPRETED)
        a_tile += step * stride_ak
        b_tile += step * stride_bk

    epilogue.write(
        acc, z_split, tile_m, tile_n, M, N, N_D,
        c, bias, scale_a, scale_b, at, pre, logsumexp, d,
        stride_cz, stride_cm, stride_cn, stride_xz, stride_xm, stride_xn, stride_dz, stride_dm, stride_dn,
        alpha, beta, ACTIVATION,
    )  # fmt: skip


@jit
def reduce_split_k(
    partials, c, bias, scale_a, scale_b, at, pre, logsumexp, d,
    M, N, N_D,
    stride_p, stride_pm,
    stride_cz, stride_cm, stride_cn,
    stride_xz, stride_xm, stride_xn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of D[z] from the sum over s of partials[z * SPLIT_K + s], always in the same order.

    partials [batch * SPLIT_K, M or more, N or more] in float32, the tile [BLOCK_M, BLOCK_N]; the epilogue of
    a product whose K is split is computed here, once.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    z = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = partials + z * SPLIT_K * stride_p + m[:, None] * stride_pm + n[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(SPLIT_K):
        acc += tl.load(tile, mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        tile += stride_p
    epilogue.write(
        acc, z, tile_m, tile_n, M, N, N_D,
        c, bias, scale_a, scale_b, at, pre, logsumexp, d,
        stride_cz, stride_cm, stride_cn, stride_xz, stride_xm, stride_xn, stride_dz, stride_dm, stride_dn,
        alpha, beta, ACTIVATION,
    )  # fmt: skip


@jit
def gemm_tma(  # noqa: C901, PLR0912, PLR0915 - a kernel is one function
    a, b, c, bias, scale_a, scale_b, at, pre, logsumexp, d,
    M, N, K, N_D,
    stride_a, stride_b, stride_cm, stride_cn, stride_x, stride_d,
    alpha, beta,
    NUM_SMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr, SPLIT_K: tl.constexpr,
    SUBTILES: tl.constexpr, ADDS: tl.constexpr, FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute tiles number program_id, program_id + NUM_SMS, ... of D = activation(alpha * a @ b + ...).

    a [M, K] is contiguous along K (A_BY_ROWS) or along M, b [K, N] along N (B_BY_ROWS) or along K. A finished
    tile [BLOCK_M, BLOCK_N] is stored as SUBTILES tiles [BLOCK_M, WIDTH]. ADDS: d += tile, in memory.
    """
    if A_BY_ROWS:
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    else:
        a_tiles = tl.make_tensor_descriptor(a, [K, M], [stride_a, 1], [BLOCK_K, BLOCK_M])
    if B_BY_ROWS:
        b_tiles = tl.make_tensor_descriptor(b, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    else:
        b_tiles = tl.make_tensor_descriptor(b, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    WIDTH_D: tl.constexpr = WIDTH if ACTIVATION != "swiglu" else WIDTH // 2 if at is None else WIDTH * 2
    rows_d = M if SPLIT_K == 1 else SPLIT_K * tiles_m * BLOCK_M  # each split begins at a whole tile
    d_tiles = tl.make_tensor_descriptor(d, [rows_d, N_D], [stride_d, 1], [BLOCK_M, WIDTH_D])
    if pre is not None:
        pre_tiles = tl.make_tensor_descriptor(pre, [M, N], [stride_x, 1], [BLOCK_M, WIDTH])

    for number in tl.range(
        tl.program_id(0), tiles_m * tiles_n * SPLIT_K, NUM_SMS, flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
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
        m = first_m.to(tl.int64) + tl.arange(0, BLOCK_M)
        row_d = split * tiles_m * BLOCK_M + first_m
        for i in tl.static_range(SUBTILES):
            column = tile_n * SUBTILES + i
            n = column.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
            x = epilogue.finish(
                halves[i], m, n, M, N, c, stride_cm, stride_cn, bias, scale_a, scale_b, alpha, beta
            )
            if logsumexp is not None:
                tl.store(logsumexp + column * M + m, epilogue.log_sum_exp(x, N - column * WIDTH), mask=m < M)
            if pre is not None:
                pre_tiles.store([first_m, column * WIDTH], x.to(pre.dtype.element_ty))
            if at is not None:
                x = epilogue.gradient_at(x, at, m, column, M, N_D, stride_x, 1, ACTIVATION)
            else:
                x = epilogue.activate(x, ACTIVATION)
            x = x.to(d.dtype.element_ty)
            column_d = column * WIDTH_D
            if ADDS and INTERPRETED:  # the interpreter has no TMA reduction, and runs programs in sequence
                d_tiles.store([row_d, column_d], d_tiles.load([row_d, column_d]) + x)
            elif ADDS:
                d_tiles.atomic_add([row_d, column_d], x)
            else:
                d_tiles.store([row_d, column_d], x)
