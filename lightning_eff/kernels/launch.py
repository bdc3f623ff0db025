"""How the kernels are launched: grids, strides, what is compiled in, and memory for what comes in parts."""

# pyright: basic
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import devices, operands
from lightning_eff.kernels.language import is_interpreted, use_torch_allocator
from lightning_eff.kernels.operands import Operands
from lightning_eff.kernels.tile_configs import TileConfig

GROUP_M = 8
"""Rows of tiles in a band."""
SUM_M, SUM_N = 16, 128
"""Tile of the kernel that sums parts."""


@dataclass(frozen=True)
class Launcher:
    """Launches rows of the table.

    Args:
        pointers: The kernel of rows `pointers`.
        tma: That of rows `tma`.
        sum_parts: Sums what either has computed in parts of K.
    """

    pointers: Any
    tma: Any
    sum_parts: Any

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, so that they run on a CPU too."""
        return is_interpreted(self.pointers)

    def __call__(
        self,
        given: Operands,
        tile: TileConfig,
        d: Tensor,
        *,
        pre: Tensor | None = None,
        logsumexp: Tensor | None = None,
    ) -> None:
        """Run a row.

        Args:
            given: The operands.
            tile: The row; it must fit them (`tiles.fitting`).
            d: Where the result goes, of any strides; a row that adds adds to it.
            pre: Where the result goes before the activation, `[*batch, M, N]`; None to forget it.
            logsumexp: Where that of each row of the result goes, float32 `[*batch, M]`, or None.
        """
        if d.is_cuda and d.device.index != torch.cuda.current_device():
            with torch.cuda.device(d.device):  # where Triton launches
                self(given, tile, d, pre=pre, logsumexp=logsumexp)
            return
        batch, split = math.prod(given.batch), tile.split_k > 1
        columns = -(-given.N // SUM_N) if split else -(-given.N // tile.block_n) * tile.subtiles
        sums = _scratch(d, batch, columns, given.M) if logsumexp is not None else None
        place = d if tile.kernel == "tma" and not split else _one_batch_axis(d, given.batch)
        if split:
            rows = -(-given.M // tile.block_m) * tile.block_m
            parts = _scratch(d, batch * tile.split_k, rows, -(-given.N // 4) * 4)
            self._multiply(given.product(), tile, parts, None, None)
            self._sum(given, tile, parts, place, pre, sums)
        else:
            self._multiply(given, tile, place, pre, sums)
        if place.data_ptr() != d.data_ptr():  # batch axes that no single stride describes
            d.copy_(place.reshape(d.shape))
        if logsumexp is not None and sums is not None:
            logsumexp.copy_(torch.logsumexp(sums, 1).reshape(logsumexp.shape))

    def _multiply(
        self, given: Operands, tile: TileConfig, d: Tensor, pre: Tensor | None, sums: Tensor | None
    ) -> None:
        tiles = -(-given.M // tile.block_m) * -(-given.N // tile.block_n) * tile.split_k
        constants = self._constants(given, tile)
        sizes = (given.M, given.N, given.K, given.columns)
        if tile.kernel == "pointers":
            a, b = (_one_batch_axis(each, given.batch) for each in (given.a, given.b))
            tensors, strides = _behind_the_product(given, pre, sums, d)
            self.pointers[(tiles * a.shape[0],)](
                a, b, *tensors, *sizes, *a.stride(), *b.stride(), *strides, given.alpha, given.beta,
                **constants,
            )  # fmt: skip
            return
        c, at = None if tile.adds else given.c, None if given.at is None else given.at.contiguous()
        strides = [_far(given.a), _far(given.b), *_strides(c, 2), _strides(pre if at is None else at, 2)[0]]
        num_sms = devices.of(d.device).num_sms
        use_torch_allocator(d.device)
        self.tma[(min(num_sms, tiles),)](
            given.a, given.b, c, given.bias, given.scale_a, given.scale_b, at, pre, sums, d,
            *sizes, *strides, d.stride(-2), given.alpha, given.beta,
            NUM_SMS=num_sms, A_BY_ROWS=given.a.stride(1) == 1, B_BY_ROWS=given.b.stride(1) == 1,
            **tile.constants, **constants,
        )  # fmt: skip

    def _constants(self, given: Operands, tile: TileConfig) -> dict[str, Any]:
        return {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k(given.a.element_size()),
            "GROUP_M": GROUP_M,
            "SPLIT_K": tile.split_k,
            "ACTIVATION": given.activation,
            "PRECISION": operands.float32_precision(given.a),
            "INTERPRETED": self.interpreted,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def _sum(
        self,
        given: Operands,
        tile: TileConfig,
        parts: Tensor,
        d: Tensor,
        pre: Tensor | None,
        sums: Tensor | None,
    ) -> None:
        tensors, strides = _behind_the_product(given, pre, sums, d)
        tiles = -(-given.M // SUM_M) * -(-given.N // SUM_N)
        self.sum_parts[(math.prod(given.batch) * tiles,)](
            parts, *tensors, given.M, given.N, given.columns, parts.stride(0), parts.stride(1), *strides,
            given.alpha, given.beta,
            BLOCK_M=SUM_M, BLOCK_N=SUM_N, SPLIT_K=tile.split_k, ACTIVATION=given.activation,
        )  # fmt: skip


def _scratch(like: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _behind_the_product(
    given: Operands, pre: Tensor | None, sums: Tensor | None, d: Tensor
) -> tuple[list[Any], list[int]]:
    """Return the tensors that `epilogue.write` takes, and their strides."""
    c, at = (_one_batch_axis(each, given.batch) for each in (given.c, given.at))
    before = _one_batch_axis(pre, given.batch)
    strides = [stride for each in (c, before if at is None else at, d) for stride in _strides(each, 3)]
    return [c, given.bias, given.scale_a, given.scale_b, at, before, sums, d], strides


def _one_batch_axis(tensor: Tensor | None, batch: tuple[int, ...]) -> Any:
    """Return `[batch, rows, columns]`; what was broadcast has a stride of 0."""
    if tensor is None:
        return None
    matrix = tensor.shape[-2:]
    return tensor.expand(*batch, *matrix).reshape(math.prod(batch), *matrix)


def _far(matrix: Tensor) -> int:
    """Return the stride of a matrix along the axis whose neighbours do not lie side by side."""
    return matrix.stride(0) if matrix.stride(1) == 1 else matrix.stride(1)


def _strides(tensor: Tensor | None, num_axes: int) -> tuple[int, ...]:
    return (0,) * num_axes if tensor is None else tensor.stride()
