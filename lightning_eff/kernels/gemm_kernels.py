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

`gemm_tma` is for Hopper and later GPUs. One program per SM computes tile after tile; the tensor memory
accelerator (TMA) copies whole blocks and handles the edges. `gemm_pointers` supports any strides, batch axes
and older GPUs. With split K, `reduce_split_k` adds the partial sums of either kernel. The epilogue
(epilogue.py) adds C and the bias, and applies the activation and the gate of an MLP. The epilogue works on
the accumulator, so no operand is read twice. launch.py launches these kernels.

Source: learned from Triton's tutorials 03 and 09, and from BLAS for the meaning of alpha and beta.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

from lightning_eff.kernels.epilogue import INTERPRETED, address, finish, indices, jit, tl, triton

__all__ = ["INTERPRETED", "gemm_pointers", "gemm_tma", "reduce_split_k", "triton"]


@jit
def _tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return a tile's row and column, in an order in which concurrent tiles share A and B in the L2 cache.

    Tiles are numbered down a column of GROUP_M tiles, then down the next column, along a band of GROUP_M
    rows:

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
    if INTERPRETED and a.dtype == tl.bfloat16:  # the interpreter gets bfloat16 wrong, in every release
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@jit
def _range_of_k(split, K, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Return start and end of range number `split` of K; only the last range may have an incomplete step."""
    if SPLIT_K == 1:
        first, last = 0, K
    else:
        # Full steps in each range, so that only the last range has an incomplete step.
        depth = tl.cdiv(K, BLOCK_K * SPLIT_K) * BLOCK_K
        first, last = split * depth, tl.minimum(split * depth + depth, K)
    return first, last


@jit
def _write(
    acc, z, first_m, first_n, M, N, c, bias, gate, up, pre, d2, d,
    stride_cz, stride_cm, stride_cn, stride_dz, stride_dm, stride_dn,
    alpha, beta, ACTIVATION: tl.constexpr, GRADIENT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to product z's tile at (first_m, first_n), and store elements inside D [M, N]."""
    m, n = indices(acc.shape[0], WIDE), indices(acc.shape[1], WIDE)
    inside_m, inside_n = m < M - first_m, n < N - first_n
    inside = inside_m[:, None] & inside_n[None, :]
    if c is not None:
        c = address(c + z * stride_cz, first_m, first_n, stride_cm, stride_cn)
    # gate, up, pre and d2 are contiguous [batch, M, N], so that one offset serves all four.
    packed = address(z * M * N, first_m, first_n, N, 1)
    saved, x2, x = finish(
        acc, m, n, inside_m, inside_n, N, c, stride_cm, stride_cn, bias, gate, up, first_n, packed,
        alpha, beta, ACTIVATION, GRADIENT,
    )  # fmt: skip
    if pre is not None:
        tl.store(pre + packed + (m[:, None] * N + n[None, :]), saved.to(pre.dtype.element_ty), mask=inside)
    if d2 is not None:
        tl.store(d2 + packed + (m[:, None] * N + n[None, :]), x2.to(d2.dtype.element_ty), mask=inside)
    d = address(d + z * stride_dz, first_m, first_n, stride_dm, stride_dn)
    tl.store(d + (m[:, None] * stride_dm + n[None, :] * stride_dn), x.to(d.dtype.element_ty), mask=inside)


@jit
def gemm_pointers(
    a, b, c, bias, gate, up, pre, d2, d,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_cz, stride_cm, stride_cn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ACTIVATION: tl.constexpr, GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of D[z] = activation(alpha * a[z] @ b[z] + beta * c[z] + bias).

    a [batch, M, K], b [batch, K, N], c and d [batch, M, N] have any strides; gate, up, pre and d2 [batch, M,
    N] are contiguous (epilogue.py). The program number is (z * SPLIT_K + split) * tiles + tile. Loads beyond
    an edge return 0, and nothing is stored there. With SPLIT_K > 1, d is float32 scratch memory [batch *
    SPLIT_K, ...] for partial sums.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    # In 64 bits, because z * stride may exceed 32 bits.
    z_split = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    z = z_split // SPLIT_K
    first, last = _range_of_k((z_split % SPLIT_K).to(tl.int32), K, BLOCK_K, SPLIT_K)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    m, n, k = indices(BLOCK_M, WIDE), indices(BLOCK_N, WIDE), indices(BLOCK_K, WIDE)
    # Only the base address changes per step, because constant offsets inside a step need half as many
    # registers.
    a = address(a + z * stride_az, first_m, first, stride_am, stride_ak)
    b = address(b + z * stride_bz, first, first_n, stride_bk, stride_bn)
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
        acc, z_split, first_m, first_n, M, N, c, bias, gate, up, pre, d2, d,
        stride_cz, stride_cm, stride_cn, stride_dz, stride_dm, stride_dn, alpha, beta,
        ACTIVATION, GRADIENT, WIDE,
    )  # fmt: skip


@jit
def reduce_split_k(
    partials, c, bias, gate, up, pre, d2, d,
    M, N,
    stride_p, stride_pm,
    stride_cz, stride_cm, stride_cn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
    ACTIVATION: tl.constexpr, GRADIENT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of D[z] as the sum over s of partials[z * SPLIT_K + s], always in the same order.

    partials [batch * SPLIT_K, >= M, >= N] are in float32, and the tile is [BLOCK_M, BLOCK_N]. With split K,
    only this kernel computes the epilogue.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    z = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    m, n = indices(BLOCK_M, WIDE), indices(BLOCK_N, WIDE)
    tile = address(partials + z * SPLIT_K * stride_p, first_m, first_n, stride_pm, 1)
    offsets, inside = (
        m[:, None] * stride_pm + n[None, :],
        (m < M - first_m)[:, None] & (n < N - first_n)[None, :],
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Always from split 0 up, so that the rounding does not depend on the order of programs.
    for _ in range(SPLIT_K):
        acc += tl.load(tile + offsets, mask=inside, other=0.0)
        tile += tl.cast(stride_p, tl.int64)
    _write(
        acc, z, first_m, first_n, M, N, c, bias, gate, up, pre, d2, d,
        stride_cz, stride_cm, stride_cn, stride_dz, stride_dm, stride_dn, alpha, beta,
        ACTIVATION, GRADIENT, WIDE,
    )  # fmt: skip


@jit
def gemm_tma(  # noqa: C901, PLR0912, PLR0915 - a kernel is one function
    a, b, c, bias, gate, up, pre, d2, d,
    M, N, K,
    stride_a, stride_b, stride_cm, stride_d,
    alpha, beta,
    NUM_SMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr, SPLIT_K: tl.constexpr,
    SUBTILES: tl.constexpr, ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr, GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute tiles program_id, program_id + NUM_SMS, ... of D = activation(alpha * a @ b + ...).

    a [M, K] is contiguous along K if A_BY_ROWS, otherwise along M. b [K, N] is contiguous along N if
    B_BY_ROWS, otherwise along K. c [M, N] is contiguous along N, and gate, up, pre and d2 are contiguous. N
    and stride_cm are multiples of 16 bytes, counted in elements of D. A finished tile [BLOCK_M, BLOCK_N] is
    stored as SUBTILES tiles [BLOCK_M, WIDTH]. With ADDS, the tile is added to d in memory.
    """
    if A_BY_ROWS:
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    else:
        a_tiles = tl.make_tensor_descriptor(a, [K, M], [stride_a, 1], [BLOCK_K, BLOCK_M])
    if B_BY_ROWS:
        b_tiles = tl.make_tensor_descriptor(b, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    else:
        b_tiles = tl.make_tensor_descriptor(b, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    # The values stay the same, but the compiler sees multiples, and so reads C, gate and up in vectors.
    ALIGNED: tl.constexpr = 128 // d.dtype.element_ty.primitive_bitwidth
    N, stride_cm = N // ALIGNED * ALIGNED, stride_cm // ALIGNED * ALIGNED
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    rows_d = M if SPLIT_K == 1 else SPLIT_K * tiles_m * BLOCK_M  # each split begins at a whole tile
    d_tiles = tl.make_tensor_descriptor(d, [rows_d, N], [stride_d, 1], [BLOCK_M, WIDTH])
    if pre is not None:
        pre_tiles = tl.make_tensor_descriptor(pre, [M, N], [N, 1], [BLOCK_M, WIDTH])
    if d2 is not None:
        d2_tiles = tl.make_tensor_descriptor(d2, [M, N], [N, 1], [BLOCK_M, WIDTH])

    # `flatten` lets the loads of the next tile overlap with the epilogue of this tile.
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
        else:  # left and right half [BLOCK_M, WIDTH]: a smaller store tile leaves room for one more stage
            halves = acc.reshape(BLOCK_M, 2, WIDTH).permute(0, 2, 1).split()
        m, n = indices(BLOCK_M, WIDE), indices(WIDTH, WIDE)
        # With split K, each split has its own rows of the scratch memory; otherwise `split` is 0.
        row_d = split * tiles_m * BLOCK_M + first_m
        for i in tl.static_range(SUBTILES):
            column = (tile_n * SUBTILES + i) * WIDTH
            c_tile = address(c, first_m, column, stride_cm, 1) if c is not None else None
            saved, x2, x = finish(
                halves[i], m, n, m < M - first_m, n < N - column, N, c_tile, stride_cm, 1, bias, gate, up,
                column, address(0, first_m, column, N, 1), alpha, beta, ACTIVATION, GRADIENT,
            )  # fmt: skip
            if pre is not None:
                pre_tiles.store([first_m, column], saved.to(pre.dtype.element_ty))
            if d2 is not None:
                d2_tiles.store([first_m, column], x2.to(d2.dtype.element_ty))
            # Stores need no mask, because TMA drops elements beyond the edge.
            x = x.to(d.dtype.element_ty)
            if ADDS and INTERPRETED:  # the interpreter has no TMA reduction, and runs programs in sequence
                d_tiles.store([row_d, column], d_tiles.load([row_d, column]) + x)
            elif ADDS:
                d_tiles.atomic_add([row_d, column], x)
            else:
                d_tiles.store([row_d, column], x)
