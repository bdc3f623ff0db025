"""The configs that the kernels can be launched with, and the properties of a GEMM that select among them.

tiles.py ranks the configs, and launch.py launches the chosen config. The tests compile every config for
sm_90, and the pointer configs also for sm_80. The tests use sizes and strides that are multiples of 16, and
others that are not. The tests check that registers do not spill, that no stack is used, and that
`shared_bytes` matches the compiler's report. Larger pointer tiles (128 x 128) spill if no size is a multiple
of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

TMA_BYTES = 16
"""Alignment in bytes that the tensor memory accelerator requires for the start of each row."""


@dataclass(frozen=True)
class TileConfig:
    """One way to run the kernels.

    Args:
        kernel: `tma` for `gemm_tma`, `pointers` for `gemm_pointers`.
        block_m: Rows of a tile of D.
        block_n: Columns of a tile of D.
        block_k_bytes: Depth of a step through K, in bytes of a row.
        num_warps: Number of warps that share a tile.
        num_stages: Number of steps whose loads are in flight at the same time.
        subtiles: Number of parts in which a finished tile is stored; more parts need less shared memory.
        adds: Whether the finished tile is added to the result in memory; C is then never read.
        split_k: Number of ranges of K that are computed separately; `reduce_split_k` sums their results.
        efficiency: Fraction of the peak that the inner loop reaches on a full device.
    """

    kernel: Literal["tma", "pointers"]
    block_m: int
    block_n: int
    block_k_bytes: int
    num_warps: int
    num_stages: int
    subtiles: int = 1
    adds: bool = False
    split_k: int = 1
    efficiency: float = 0.5

    def __str__(self) -> str:
        block = f"{self.kernel} {self.block_m}x{self.block_n}"
        text = f"{block}, {self.num_stages} stages, {self.num_warps} warps"
        marks = {"subtiles": self.subtiles > 1, "adding": self.adds}
        marks[f"K in {self.split_k} parts"] = self.split_k > 1
        return ", ".join([text, *(mark for mark, holds in marks.items() if holds)])

    def shared_bytes(self, shape: Shape) -> int:
        """Return the largest shared memory, in bytes, that `gemm_tma` uses.

        Shared memory holds num_stages * (block_m + block_n) * block_k elements of operands, and a finished
        tile [block_m, block_n / subtiles] of D. One more tile is for C, gate and up, which are read one after
        the other.
        """
        out_itemsize, c_itemsize = shape.out_itemsize, shape.c_itemsize
        if self.split_k > 1:  # float32 sums; the epilogue runs in reduce_split_k
            out_itemsize, c_itemsize = 4, 0
        elif c_itemsize or shape.epilogue_reads:
            # One buffer serves C, gate and up in turn, so the widest element decides.
            c_itemsize = 0 if self.adds else max(c_itemsize, out_itemsize)
        finished = self.block_m * self.block_n // self.subtiles
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k_bytes
        return operands + finished * (out_itemsize + c_itemsize)


CONFIGS: tuple[TileConfig, ...] = (
    TileConfig("tma", 128, 256, 128, 8, 3, efficiency=0.80),
    TileConfig("tma", 128, 256, 128, 8, 4, subtiles=2, efficiency=0.80),
    TileConfig("tma", 128, 256, 128, 8, 3, subtiles=2, efficiency=0.78),
    TileConfig("tma", 128, 128, 128, 8, 4, subtiles=2, efficiency=0.70),
    TileConfig("tma", 64, 128, 128, 4, 4, subtiles=2, efficiency=0.55),
    TileConfig("tma", 128, 128, 128, 8, 4, split_k=4, efficiency=0.70),
    TileConfig("tma", 128, 256, 128, 8, 3, subtiles=2, adds=True, efficiency=0.78),
    TileConfig("tma", 128, 128, 128, 8, 3, adds=True, efficiency=0.68),
    TileConfig("pointers", 64, 128, 64, 8, 3, efficiency=0.50),
    TileConfig("pointers", 64, 64, 64, 8, 3, efficiency=0.40),
    TileConfig("pointers", 32, 32, 64, 4, 3, efficiency=0.20),
    TileConfig("pointers", 16, 64, 64, 4, 3, efficiency=0.15),
    TileConfig("pointers", 64, 64, 64, 4, 3, split_k=4, efficiency=0.40),
    TileConfig("pointers", 16, 64, 64, 4, 3, split_k=8, efficiency=0.15),
)
"""All configs that can be launched."""
BY_NAME = {str(config): config for config in CONFIGS}
"""All configs by their names in files and reports."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The properties of a GEMM that the choice of a config depends on.

    Args:
        M: Rows of A and of D (tokens, in a linear layer's forward pass).
        N: Columns of B and of the product.
        K: Columns of A and rows of B.
        dtype: Dtype of A and B.
        out_dtype: Dtype of the result; None if it equals `dtype`.
        batch: Number of independent products.
        aligned: Whether every row that TMA copies starts at a multiple of 16 bytes.
        c_itemsize: Bytes per element of C; 0 if C is not read.
        epilogue_reads: Number of matrices [M, N] that the epilogue reads in addition to C (`gate` and `up`).
            An element of these matrices has at most as many bytes as an element of the result.
        epilogue_writes: Number of matrices that the epilogue writes in addition to the result (`pre` and
            `d2`).
        adds: Whether the result may be added in memory.
        layout: Storage of A and B, each by rows (n) or transposed (t): `nn`, `nt`, `tn` or `tt`.
        epilogue: The activation or its gradient, for which torch needs a separate pass; empty if none.
        tf32: Whether float32 is multiplied as TF32.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    batch: int = 1
    aligned: bool = True
    c_itemsize: int = 0
    epilogue_reads: int = 0
    epilogue_writes: int = 0
    adds: bool = False
    layout: str = "nt"
    epilogue: str = ""
    tf32: bool = False

    @classmethod
    def packed(cls, M: int, N: int, K: int, dtype: torch.dtype) -> Shape:
        """Return the shape of contiguous operands, as in a linear layer.

        Example:
            >>> [Shape.packed(8, 16, K, torch.bfloat16).aligned for K in (24, 20)]
            [True, False]
        """
        aligned = not (N * dtype.itemsize % TMA_BYTES or K * dtype.itemsize % TMA_BYTES)
        return cls(M=M, N=N, K=K, dtype=dtype, aligned=aligned)

    def __str__(self) -> str:
        """Return the shape's name in files and reports, unique per shape."""
        dtypes = [str(each).removeprefix("torch.") for each in (self.dtype, self.out_dtype or self.dtype)]
        marks = {
            f"{self.batch} products": self.batch > 1, "unaligned": not self.aligned, "tf32": self.tf32,
            self.epilogue: bool(self.epilogue), f"C of {self.c_itemsize} bytes": self.c_itemsize > 0,
            "added in place": self.adds, f"{self.epilogue_reads} read": self.epilogue_reads > 0,
            f"{self.epilogue_writes} written": self.epilogue_writes > 0,
        }  # fmt: skip
        sizes = f"{self.M} x {self.N} x {self.K} {self.layout}"
        return ", ".join(
            [sizes, " to ".join(dict.fromkeys(dtypes)), *(mark for mark, holds in marks.items() if holds)]
        )

    @property
    def out_itemsize(self) -> int:
        """Bytes per element of the result."""
        return (self.out_dtype or self.dtype).itemsize
