"""Launch the kernels: grids, strides, compiled-in constants, and scratch memory for split K."""

# pyright: basic
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import devices
from lightning_eff.kernels.gemm_kernels import INTERPRETED, gemm_pointers, gemm_tma, reduce_split_k, triton
from lightning_eff.kernels.operands import Operands, float32_precision
from lightning_eff.kernels.tile_configs import TMA_BYTES, TileConfig

GROUP_M = 8
"""Rows of tiles in a band (`_tile_of` in gemm_kernels.py)."""
SUM_M, SUM_N = 16, 128
"""Tile of `reduce_split_k`."""


def launch(operands: Operands, config: TileConfig, d: Tensor, *, pre: Tensor | None = None) -> Tensor:
    """Run the kernels with a config, and return the result.

    Args:
        operands: Checked, of sizes above 0.
        config: One that fits them (`tiles.fits`).
        d: Receives the result, `[*batch, M, N]` of any strides; a config that adds adds to it.
        pre: Receives the input of the activation, `[*batch, M, N]`, contiguous; or None.
    """
    if d.is_cuda and d.device.index != torch.cuda.current_device():
        with torch.cuda.device(d.device):  # Triton launches on the current device
            return launch(operands, config, d, pre=pre)
    batch, is_split = math.prod(operands.batch), config.split_k > 1
    target = d if config.kernel == "tma" and not is_split else _one_batch_axis(d, operands.batch)
    if is_split:
        # Each split is padded to whole tiles along M, and to 16 bytes a row, which TMA requires.
        rows = -(-operands.M // config.block_m) * config.block_m
        size = (batch * config.split_k, rows, -(-operands.N // 4) * 4)
        partials = torch.empty(size, dtype=torch.float32, device=d.device)
        product = Operands(a=operands.a, b=operands.b, out_dtype=torch.float32, batch=operands.batch)
        _launch_gemm(product, config, partials, None)
        c = _one_batch_axis(operands.c, operands.batch)
        num_tiles = -(-operands.M // SUM_M) * -(-operands.N // SUM_N)
        reduce_split_k[(batch * num_tiles,)](
            partials, c, operands.bias, None, None, pre, None, target,
            operands.M, operands.N, *partials.stride()[:2], *_strides(c), *_strides(target),
            operands.alpha, operands.beta,
            BLOCK_M=SUM_M, BLOCK_N=SUM_N, SPLIT_K=config.split_k, ACTIVATION=operands.activation,
            GRADIENT=False, WIDE=_is_wide(partials, c, pre, target),
        )  # fmt: skip
    else:
        _launch_gemm(operands, config, target, pre)
    if target.data_ptr() != d.data_ptr():  # d has batch axes that no single stride describes
        d.copy_(target.reshape(d.shape))
    return d


def _launch_gemm(operands: Operands, config: TileConfig, d: Tensor, pre: Tensor | None) -> None:
    num_tiles = -(-operands.M // config.block_m) * -(-operands.N // config.block_n) * config.split_k
    sizes = (operands.M, operands.N, operands.K)
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k_bytes // operands.a.element_size(),
        "GROUP_M": GROUP_M, "SPLIT_K": config.split_k, "ACTIVATION": operands.activation, "GRADIENT": False,
        "PRECISION": float32_precision(operands.a), "INTERPRETED": INTERPRETED,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    if config.kernel == "pointers":
        a, b, c = (_one_batch_axis(tensor, operands.batch) for tensor in (operands.a, operands.b, operands.c))
        gemm_pointers[(num_tiles * a.shape[0],)](
            a, b, c, operands.bias, None, None, pre, None, d,
            *sizes, *a.stride(), *b.stride(), *_strides(c), *_strides(d),
            operands.alpha, operands.beta, WIDE=_is_wide(a, b, c, pre, d), **constants,
        )  # fmt: skip
        return
    a, b = operands.a, operands.b
    c = None if config.adds else operands.c  # a config that adds never reads C: it is d
    a_by_rows, b_by_rows = a.stride(1) == 1, b.stride(1) == 1
    if c is not None and not _is_like_d(c, d):
        c = c.clone(memory_format=torch.contiguous_format)
    stride_cm = 0 if c is None else c.stride(0)
    strides = (a.stride(0 if a_by_rows else 1), b.stride(0 if b_by_rows else 1), stride_cm, d.stride(-2))
    device, num_sms = d.device, devices.of(d.device).num_sms
    # A kernel that makes tensor descriptors needs scratch memory; the allocator holds for this thread.
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    gemm_tma[(min(num_sms, num_tiles),)](
        a, b, c, operands.bias, None, None, pre, None, d, *sizes, *strides, operands.alpha, operands.beta,
        NUM_SMS=num_sms, A_BY_ROWS=a_by_rows, B_BY_ROWS=b_by_rows, SUBTILES=config.subtiles,
        ADDS=config.adds, WIDE=_is_wide(c), **constants,
    )  # fmt: skip


def _one_batch_axis(tensor: Tensor | None, batch: tuple[int, ...]) -> Any:
    """Return `[batch, rows, columns]`; a broadcast axis has stride 0."""
    if tensor is None:
        return None
    matrix = tensor.shape[-2:]
    return tensor.expand(*batch, *matrix).reshape(math.prod(batch), *matrix)


def _is_like_d(c: Tensor, d: Tensor) -> bool:
    """Return whether C is as contiguous and aligned as TMA requires of D, so that it is read in vectors."""
    return c.stride(1) == 1 and not (c.stride(0) * d.element_size() % TMA_BYTES or c.data_ptr() % TMA_BYTES)


def _is_wide(*tensors: Tensor | None) -> bool:
    """Return whether offsets inside a tile, of at most 128 rows and 256 columns, may not fit in 32 bits."""
    return any(max(tensor.stride()[-2:]) >= 2**23 for tensor in tensors if tensor is not None)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the strides of `[batch, rows, columns]`; zeros for None."""
    return (0, 0, 0) if tensor is None else tensor.stride()
