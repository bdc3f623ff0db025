"""The tiled GEMM, D = activation(alpha * A @ B + beta * C + bias), by two Triton kernels or by torch.

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

`gemm_tma` is for Hopper and later: as many programs as SMs, each of which takes tile after tile, and the
tensor memory accelerator copies whole blocks and keeps within the edges by itself. `gemm_pointers` is for
everything else: any strides, batch axes, older GPUs. What comes after the product (scales, C, bias,
activation) is done on the accumulator, so that D is written once and nothing is read twice.

Why a custom operator: autograd, torch.compile, checkpointing and fake tensors see one opaque operation with
a shape and a gradient. Source: learned from Triton's tutorials 03 and 09, and from BLAS for the meaning of
alpha and beta.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_eff.kernels import dispatch, epilogue, library, operands
from lightning_eff.kernels.language import jit, tl
from lightning_eff.kernels.launch import Launcher
from lightning_eff.kernels.operands import Operands
from lightning_eff.kernels.operator import Operator


@jit
def _place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Number the tiles so that those computed at one time share rows of A and columns of B in the cache.

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
    if INTERPRETED and a.dtype == tl.bfloat16:  # the interpreter's products of it are wrong, in every release
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype.primitive_bitwidth == 8:  # of its sums Hopper keeps 14 bits: they go to acc after each step
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@jit
def _range_of_k(part, K, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Return where part number `part` of K begins and ends; all are whole steps but the last."""
    if SPLIT_K == 1:
        first, last = 0, K
    else:
        depth = tl.cdiv(K, BLOCK_K * SPLIT_K) * BLOCK_K
        first, last = part * depth, tl.minimum(part * depth + depth, K)
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
    """One tile of one of the products a[z] @ b[z]; what lies beyond an edge is read as 0 and not written."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = _place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    part = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    z = part // SPLIT_K
    first, last = _range_of_k((part % SPLIT_K).to(tl.int32), K, BLOCK_K, SPLIT_K)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = first + tl.arange(0, BLOCK_K)
    a_tile = a + z * stride_az + m[:, None] * stride_am + k[None, :].to(tl.int64) * stride_ak
    b_tile = b + z * stride_bz + k[:, None].to(tl.int64) * stride_bk + n[None, :] * stride_bn

    step = tl.full((), BLOCK_K, tl.int64)  # a step of a large stride does not fit 32 bits
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        inside = start + tl.arange(0, BLOCK_K) < K
        a_block = tl.load(a_tile, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        b_block = tl.load(b_tile, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = _multiply(a_block, b_block, acc, PRECISION, INTERPRETED)
        a_tile += step * stride_ak
        b_tile += step * stride_bk

    epilogue.write(
        acc, part, tile_m, tile_n, M, N, N_D,
        c, bias, scale_a, scale_b, at, pre, logsumexp, d,
        stride_cz, stride_cm, stride_cn, stride_xz, stride_xm, stride_xn, stride_dz, stride_dm, stride_dn,
        alpha, beta, ACTIVATION,
    )  # fmt: skip


@jit
def sum_parts(
    parts, c, bias, scale_a, scale_b, at, pre, logsumexp, d,
    M, N, N_D,
    stride_p, stride_pm,
    stride_cz, stride_cm, stride_cn,
    stride_xz, stride_xm, stride_xn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One tile of the sum of a product's parts, always in the same order, and what follows the product."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    z = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = parts + z * SPLIT_K * stride_p + m[:, None] * stride_pm + n[None, :]
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
def gemm_tma(
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
    """Tiles number program_id, program_id + NUM_SMS, ... of a @ b; rows of a and b along K or across it."""
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
    rows_d = M if SPLIT_K == 1 else SPLIT_K * tiles_m * BLOCK_M  # each part begins with a tile
    d_tiles = tl.make_tensor_descriptor(d, [rows_d, N_D], [stride_d, 1], [BLOCK_M, WIDTH_D])
    if pre is not None:
        pre_tiles = tl.make_tensor_descriptor(pre, [M, N], [stride_x, 1], [BLOCK_M, WIDTH])

    for number in tl.range(
        tl.program_id(0), tiles_m * tiles_n * SPLIT_K, NUM_SMS, flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        part = number // (tiles_m * tiles_n)
        tile_m, tile_n = _place(number % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        first, last = _range_of_k(part, K, BLOCK_K, SPLIT_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(first, last, BLOCK_K):
            a_block = a_tiles.load([first_m, start]) if A_BY_ROWS else a_tiles.load([start, first_m]).T
            b_block = b_tiles.load([start, first_n]) if B_BY_ROWS else b_tiles.load([first_n, start]).T
            acc = _multiply(a_block, b_block, acc, PRECISION, INTERPRETED)

        if SUBTILES == 1:  # noqa: SIM108 - no conditional expression: its two sides have other types
            halves = (acc,)
        else:  # left and right half: a smaller tile on its way out leaves room for one more stage
            halves = acc.reshape(BLOCK_M, 2, WIDTH).permute(0, 2, 1).split()
        m = first_m.to(tl.int64) + tl.arange(0, BLOCK_M)
        row_d = part * tiles_m * BLOCK_M + first_m
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
            if ADDS and INTERPRETED:  # which knows no reduction in memory; its programs run one by one
                d_tiles.store([row_d, column_d], d_tiles.load([row_d, column_d]) + x)
            elif ADDS:
                d_tiles.atomic_add([row_d, column_d], x)
            else:
                d_tiles.store([row_d, column_d], x)


launch = Launcher(pointers=gemm_pointers, tma=gemm_tma, sum_parts=sum_parts)
INTERPRETED = launch.interpreted
"""Whether Triton's interpreter runs the kernels, so that they run on a CPU too."""


def _run(given: Operands, d: Tensor, pre: Tensor | None, logsumexp: Tensor | None) -> None:
    """Compute on the device as dispatch.py chose for this shape; torch's tensors are real by now."""
    tile = dispatch.choose(given, d, pre, adds=_adds(given, d))
    launch(given, tile, d, pre=pre, logsumexp=logsumexp)


def _adds(given: Operands, out: Tensor | None) -> bool:
    """Say whether a result may be added where C lies, without reading it: a float32 sum, and nothing else."""
    c = given.c
    if out is None or c is None or given.beta != 1.0 or given.activation or out.dtype != torch.float32:
        return False
    if not out.is_cuda and not INTERPRETED:  # the library's affair
        return False
    others = (given.bias, given.scale_a, given.scale_b)
    return operands.in_place(c, out) and all(each is None for each in others)


OPERATOR = Operator(_run)


def gemm(
    a: Float[Tensor, "*batch_a m k"],
    b: Float[Tensor, "*batch_b k n"],
    c: Float[Tensor, "*batch_c m n"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Float[Tensor, " n"] | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: Float[Tensor, "*batch m columns"] | None = None,
    scale_a: Float[Tensor, " m"] | None = None,
    scale_b: Float[Tensor, " n"] | None = None,
    gradient_at: Float[Tensor, "*batch m columns"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch m columns"]:
    """Compute `activation(alpha * A @ B + beta * C + bias)`, accumulating in float32 (float64 for float64).

    Args:
        a: `[*batch, M, K]` of any strides, so that a transpose costs nothing.
        b: `[*batch, K, N]`; batch axes are broadcast as in `torch.matmul`.
        c: `[*batch, M, N]`, or what broadcasts to it, in any floating-point format.
        alpha: Factor of the product; with 0 `a` and `b` are not read, as in BLAS.
        beta: Factor of `c`; with 0 it is not read.
        bias: Added to every row, `[N]`.
        activation: `relu`, `silu`, `gelu_tanh`, or None; or `swiglu`, `silu(gate) * up` of gates in even and
            ups in odd columns, so that the result has N / 2.
        out_dtype: Of the result; that of `a` unless given, bfloat16 for float8.
        out: Where the result goes; it may be `c`. Without gradients, as everywhere in torch. Where it
            overlaps an operand otherwise, the result is made elsewhere and copied.
        scale_a: What a row of `a` is multiplied by, float32 `[M]` or one value; for float8.
        scale_b: The same for columns of `b`, `[N]`.
        gradient_at: What `activation` was applied to. The result is then the gradient there, `(...) *
            activation'(gradient_at)`, with 2 N columns for `swiglu`; it has no gradient of its own.
        backend: `torch`: its library; `triton`: the kernels; `auto`: what was measured to be faster.

    Returns:
        The result, in `out` if that is given.

    Raises:
        ValueError: Shapes, devices, names or scales that do not fit.
        TypeError: A format that no kernel knows, or a factor that is no number.
        RuntimeError: `triton` where its kernels cannot run, or gradients with `out` or `gradient_at`.
        ImportError: `triton`, which is not installed.

    Example:
        >>> gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2), alpha=2.0, beta=-1.0)
        tensor([[5., 5.],
                [5., 5.]])
    """
    alpha, beta = float(alpha), float(beta)
    a, b = library.autocast(a, b)
    given = operands.check_operands(
        a, b, c if beta else None, alpha=alpha, beta=beta, bias=bias, scale_a=scale_a, scale_b=scale_b,
        out_dtype=out_dtype, activation=activation, at=gradient_at,
    )  # fmt: skip
    if out is None:
        return _compute(given, None, backend)
    operands.check_out(given, out)
    if operands.overlaps_operand(given, out):
        return out.copy_(_compute(given, None, backend))
    return _compute(given, out, backend)


def _compute(given: Operands, out: Tensor | None, backend: str) -> Tensor:
    flat, place = operands.fold_batch(given, out)
    adds = _adds(flat, place)
    ours = dispatch.uses_triton(flat, backend, interpreted=INTERPRETED, adds=adds, out=place)
    result = (OPERATOR if ours else library.gemm)(flat, out=place)
    return out if out is not None else result if flat is given else result.view(given.size)


def gemm_logsumexp(
    a: Float[Tensor, "*batch_a m k"],
    b: Float[Tensor, "*batch_b k n"],
    *,
    alpha: float = 1.0,
    bias: Float[Tensor, " n"] | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch m n"], Float[Tensor, "*batch m"]]:
    """Compute `D = alpha * A @ B + bias` and the logarithm of the sum of the exponentials of its rows.

    What a cross-entropy needs of its logits beside themselves. The sums are of what is in the accumulators,
    before it is rounded to the format of D, which is not read again.

    Args:
        a: `[*batch, M, K]` of any strides: hidden states.
        b: `[*batch, K, N]`: the transposed weight of a vocabulary projection.
        alpha: Factor of the product.
        bias: Added to every row, `[N]`.
        out_dtype: Of D; that of `a` unless given.
        backend: As in `gemm`.

    Returns:
        D, and float32 `[*batch, M]` (float64 for float64). Neither has a gradient.

    Raises:
        ValueError: As `gemm`.
        TypeError: As `gemm`.
        RuntimeError: As `gemm`, or an operand that needs a gradient.

    Example:
        >>> gemm_logsumexp(torch.ones(1, 2), torch.zeros(2, 8))[1]
        tensor([2.0794])
    """
    a, b = library.autocast(a, b)
    given = operands.check_operands(a, b, None, alpha=float(alpha), bias=bias, out_dtype=out_dtype)
    operands.check_no_gradient(given, "gemm_logsumexp")
    flat, _ = operands.fold_batch(given, None)
    # Nothing measures this, so `auto` is the library.
    ours = backend != "auto" and dispatch.uses_triton(flat, backend, interpreted=INTERPRETED)
    d, sums = (OPERATOR.with_logsumexp if ours else library.gemm_logsumexp)(flat)
    return d.view(given.size), sums.view(given.size[:-1])
