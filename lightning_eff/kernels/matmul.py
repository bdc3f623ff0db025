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

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_eff.kernels import devices, dispatch, library, operands
from lightning_eff.kernels.language import is_interpreted, jit, tl, use_torch_allocator
from lightning_eff.kernels.operands import Operands
from lightning_eff.kernels.operator import Operator
from lightning_eff.kernels.table import Tile

GROUP_M = 8


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
    return tl.dot(a, b, acc, input_precision=PRECISION)


@jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # what is not a number stays so
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp2(-1.4426950408889634 * x))
    if ACTIVATION == "gelu_tanh":  # x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u))
        u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        x = x / (1.0 + tl.exp2(-2.8853900817779268 * u))
    return x


@jit
def _finish(
    acc, m, n, M, N,
    c, stride_cm, stride_cn, bias, scale_a, scale_b, alpha, beta,
):  # fmt: skip
    """Return alpha * scale_a * acc * scale_b + beta * c + bias for rows m and columns n of D."""
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
def gemm_pointers(
    a, b, c, bias, scale_a, scale_b, pre, d,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_cz, stride_cm, stride_cn,
    stride_dz, stride_dm, stride_dn,
    alpha, beta,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of one of the products a[z] @ b[z]; what lies beyond an edge is read as 0 and not written."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    z = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_tile = a + z * stride_az + m[:, None] * stride_am + k[None, :].to(tl.int64) * stride_ak
    b_tile = b + z * stride_bz + k[:, None].to(tl.int64) * stride_bk + n[None, :] * stride_bn

    step = tl.full((), BLOCK_K, tl.int64)  # a step of a large stride does not fit 32 bits
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        a_block = tl.load(a_tile, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        b_block = tl.load(b_tile, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = _multiply(a_block, b_block, acc, PRECISION, INTERPRETED)
        a_tile += step * stride_ak
        b_tile += step * stride_bk

    if c is not None:
        c += z * stride_cz
    acc = _finish(acc, m, n, M, N, c, stride_cm, stride_cn, bias, scale_a, scale_b, alpha, beta)
    inside_d = (m < M)[:, None] & (n < N)[None, :]
    d_tile = z * stride_dz + m[:, None] * stride_dm + n[None, :] * stride_dn
    if pre is not None:
        tl.store(pre + d_tile, acc.to(pre.dtype.element_ty), mask=inside_d)
    tl.store(d + d_tile, _activate(acc, ACTIVATION).to(d.dtype.element_ty), mask=inside_d)


@jit
def gemm_tma(
    a, b, c, bias, scale_a, scale_b, pre, d,
    M, N, K,
    stride_a, stride_b, stride_cm, stride_cn, stride_d,
    alpha, beta,
    NUM_SMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr,
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
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    d_tiles = tl.make_tensor_descriptor(d, [M, N], [stride_d, 1], [BLOCK_M, WIDTH])
    if pre is not None:
        pre_tiles = tl.make_tensor_descriptor(pre, [M, N], [stride_d, 1], [BLOCK_M, WIDTH])
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)

    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, NUM_SMS, flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            a_block = a_tiles.load([first_m, start]) if A_BY_ROWS else a_tiles.load([start, first_m]).T
            b_block = b_tiles.load([start, first_n]) if B_BY_ROWS else b_tiles.load([first_n, start]).T
            acc = _multiply(a_block, b_block, acc, PRECISION, INTERPRETED)

        if SUBTILES == 1:  # noqa: SIM108 - no conditional expression: its two sides have other types
            parts = (acc,)
        else:  # left and right half: a smaller tile on its way out leaves room for one more stage
            parts = acc.reshape(BLOCK_M, 2, WIDTH).permute(0, 2, 1).split()
        m = first_m.to(tl.int64) + tl.arange(0, BLOCK_M)
        for i in tl.static_range(SUBTILES):
            here = first_n + i * WIDTH
            n = here.to(tl.int64) + tl.arange(0, WIDTH)
            part = _finish(parts[i], m, n, M, N, c, stride_cm, stride_cn, bias, scale_a, scale_b, alpha, beta)
            if pre is not None:
                pre_tiles.store([first_m, here], part.to(pre.dtype.element_ty))
            part = _activate(part, ACTIVATION).to(d.dtype.element_ty)
            if ADDS and INTERPRETED:  # which knows no reduction in memory; its programs run one by one
                d_tiles.store([first_m, here], d_tiles.load([first_m, here]) + part)
            elif ADDS:
                d_tiles.atomic_add([first_m, here], part)
            else:
                d_tiles.store([first_m, here], part)


def launch(
    given: Operands,
    tile: Tile,
    d: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str | None = None,
    pre: Tensor | None = None,
) -> None:
    """Run one row of the table.

    Args:
        given: The operands.
        tile: The row; it must fit them (`tiles.fitting`).
        d: Where the result goes, `[*batch, M, N]` of any strides; a row that adds adds to it.
        alpha: Factor of the product.
        beta: Factor of C.
        activation: What is applied to the result.
        pre: Where the result goes before the activation, laid out as `d`; None to forget it.
    """
    a, b, c = given.a, given.b, None if tile.adds else given.c
    place, before = d, pre
    tiles = -(-given.M // tile.block_m) * -(-given.N // tile.block_n)
    if tile.kernel == "tma":
        num_sms, by_rows = devices.of(a.device).num_sms, (a.stride(1) == 1, b.stride(1) == 1)
        strides = [a.stride(1 - by_rows[0]), b.stride(1 - by_rows[1]), *_strides(c, 2), d.stride(0)]
        kernel, grid = gemm_tma, min(num_sms, tiles)
        own = {"NUM_SMS": num_sms, "A_BY_ROWS": by_rows[0], "B_BY_ROWS": by_rows[1], **tile.constants}
        use_torch_allocator(a.device)
    else:
        a, b, c, place, before = (_one_batch_axis(each, given.batch) for each in (a, b, c, d, pre))
        strides = [stride for each in (a, b, c, place) for stride in _strides(each, 3)]
        kernel, grid, own = gemm_pointers, tiles * a.shape[0], {}
    kernel[(grid,)](
        a, b, c, given.bias, given.scale_a, given.scale_b, before, place,
        given.M, given.N, given.K, *strides, float(alpha), float(beta),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k(a.element_size()), GROUP_M=GROUP_M,
        ACTIVATION=activation, PRECISION=operands.float32_precision(a), INTERPRETED=INTERPRETED,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **own,
    )  # fmt: skip
    if place.data_ptr() != d.data_ptr():  # batch axes that no single stride describes
        d.copy_(place.reshape(d.shape))


def _one_batch_axis(tensor: Tensor | None, batch: tuple[int, ...]) -> Any:
    """Return `[batch, rows, columns]`; what was broadcast has a stride of 0."""
    if tensor is None:
        return None
    matrix = tensor.shape[-2:]
    return tensor.expand(*batch, *matrix).reshape(math.prod(batch), *matrix)


def _strides(tensor: Tensor | None, num_axes: int) -> tuple[int, ...]:
    return (0,) * num_axes if tensor is None else tensor.stride()


def _run(
    given: Operands, d: Tensor, pre: Tensor | None, alpha: float, beta: float, activation: str | None
) -> None:
    """Compute on the device as dispatch.py chose for this shape; torch's tensors are real by now."""
    adds = _adds(given, d, beta, activation)
    tile = dispatch.choose(given, d, pre, adds=adds, activation=activation)
    launch(given, tile, d, alpha=alpha, beta=beta, activation=activation, pre=pre)


def _adds(given: Operands, out: Tensor | None, beta: float, activation: str | None) -> bool:
    """Say whether a result may be added where C lies, without reading it: a float32 sum, and nothing else."""
    c = given.c
    if out is None or c is None or beta != 1.0 or activation is not None or out.dtype != torch.float32:
        return False
    if not out.is_cuda and not INTERPRETED:  # the library's affair
        return False
    others = (given.bias, given.scale_a, given.scale_b)
    return operands.in_place(c, out) and all(each is None for each in others)


OPERATOR = Operator(_run)
INTERPRETED = is_interpreted(gemm_pointers)
"""Whether Triton's interpreter runs the kernels, so that they run on a CPU too."""


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
    out: Float[Tensor, "*batch m n"] | None = None,
    scale_a: Float[Tensor, " m"] | None = None,
    scale_b: Float[Tensor, " n"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch m n"]:
    """Compute `activation(alpha * A @ B + beta * C + bias)`, accumulating in float32 (float64 for float64).

    Args:
        a: `[*batch, M, K]` of any strides, so that a transpose costs nothing.
        b: `[*batch, K, N]`; batch axes are broadcast as in `torch.matmul`.
        c: `[*batch, M, N]`, or what broadcasts to it, in any floating-point format.
        alpha: Factor of the product; with 0 `a` and `b` are not read, as in BLAS.
        beta: Factor of `c`; with 0 it is not read.
        bias: Added to every row, `[N]`.
        activation: `relu`, `silu`, `gelu_tanh`, or None.
        out_dtype: Of the result; that of `a` unless given, bfloat16 for float8.
        out: Where the result goes; it may be `c`. Without gradients, as everywhere in torch. Where it
            overlaps an operand otherwise, the result is made elsewhere and copied.
        scale_a: What a row of `a` is multiplied by, float32 `[M]` or one value; for float8.
        scale_b: The same for columns of `b`, `[N]`.
        backend: `torch`: its library; `triton`: the kernels; `auto`: what was measured to be faster.

    Returns:
        The result, in `out` if that is given.

    Raises:
        ValueError: Shapes, devices, names or scales that do not fit.
        TypeError: A format that no kernel knows, or a factor that is no number.
        RuntimeError: `triton` where its kernels cannot run, or gradients with `out`.
        ImportError: `triton`, which is not installed.

    Example:
        >>> gemm(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 2), alpha=2.0, beta=-1.0)
        tensor([[5., 5.],
                [5., 5.]])
    """
    alpha, beta = float(alpha), float(beta)
    a, b = library.autocast(a, b)
    given = operands.check(
        a, b, c if beta else None, bias=bias, scale_a=scale_a, scale_b=scale_b,
        out_dtype=out_dtype, activation=activation,
    )  # fmt: skip
    if not alpha:
        given.a, given.b = a[..., :0], b[..., :0, :]
    if out is not None:
        operands.check_out(given, out)
        if operands.overlaps(given, out):
            return out.copy_(_compute(given, alpha, beta, activation, None, backend))
    return _compute(given, alpha, beta, activation, out, backend)


def _compute(
    given: Operands, alpha: float, beta: float, activation: str | None, out: Tensor | None, backend: str
) -> Tensor:
    adds = _adds(given, out, beta, activation)
    ours = dispatch.uses_triton(given, backend, interpreted=INTERPRETED, adds=adds, activation=activation)
    compute = OPERATOR if ours else library.gemm
    return compute(given, alpha=alpha, beta=beta, activation=activation, out=out)
