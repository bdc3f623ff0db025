"""The rows that the kernels are launched with, and what a GEMM must say of itself for one to be chosen.

The tests compile every row for sm_90, those with pointers for sm_80 too: no register is spilled, no stack is
used, and `shared_bytes` is what the compiler says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

TMA_BYTES = 16
"""What the start of a row must be a multiple of, for the tensor memory accelerator to copy it."""


@dataclass(frozen=True)
class TileConfig:
    """One way to run the kernels.

    Args:
        kernel: Whether TMA or pointers fetch the tiles.
        block_m: Rows of a tile of C.
        block_n: Its columns.
        block_k_bytes: Depth of a step, in bytes of a row.
        num_warps: Warps that share a tile.
        num_stages: Steps that are on their way at once.
        subtiles: Parts in which a finished tile is stored, so that it needs less shared memory.
        specialize: Warps of their own fetch the tiles.
        adds: The finished tile is added to what is in memory, and C is never read.
        split_k: Parts of K that are computed apart, and summed by a second kernel.
        efficiency: Share of the peak that the inner loop reaches on a full device.
    """

    kernel: Literal["tma", "pointers"]
    block_m: int
    block_n: int
    block_k_bytes: int
    num_warps: int
    num_stages: int
    subtiles: int = 1
    specialize: bool = False
    adds: bool = False
    split_k: int = 1
    efficiency: float = 0.5

    def __str__(self) -> str:
        text = (
            f"{self.kernel} {self.block_m}x{self.block_n}, {self.num_stages} stages, {self.num_warps} warps"
        )
        parts = {"subtiles": self.subtiles > 1, "specialized": self.specialize, "adding": self.adds}
        parts[f"K in {self.split_k} parts"] = self.split_k > 1
        return ", ".join([text, *(word for word, holds in parts.items() if holds)])

    @property
    def constants(self) -> dict[str, bool | int]:
        """What the TMA kernel is compiled with beside sizes; its loops are one unless warps specialize."""
        return {
            "SUBTILES": self.subtiles,
            "ADDS": self.adds,
            "FLATTEN": not self.specialize,
            "SPECIALIZE": self.specialize,
        }

    def block_k(self, itemsize: int) -> int:
        """Return the depth of a step in elements."""
        return self.block_k_bytes // itemsize

    def shared_bytes(self, shape: Shape) -> int:
        """Return the shared memory of the TMA kernel, at most: operands on their way, a finished tile.

        Args:
            shape: What is computed; what is read beside operands passes through shared memory too.
        """
        if self.split_k > 1:  # what follows the product is another kernel's affair
            shape = shape.product()
        written = shape.columns_ratio + (shape.saves_pre and shape.columns_ratio < 1)
        read = (shape.reads_c and not self.adds) + shape.reads_at * shape.columns_ratio
        read_itemsize = max(shape.read_itemsize, shape.out_itemsize)
        finished = self.block_m * self.block_n // self.subtiles
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k_bytes
        return operands + int(finished * (written * shape.out_itemsize + read * read_itemsize))

    def can_finish(self, shape: Shape) -> bool:
        """Say whether what follows the product compiles: into registers, and in warps of their own."""
        if self.specialize and shape.columns_ratio != 1.0:  # Triton 3.6 cannot split a tile there
            return False
        values = self.block_m * self.block_n // (32 * self.num_warps)
        if shape.dtype.itemsize == 1 and values > FLOAT8_VALUES:  # which are there twice
            return False
        wide = shape.columns_ratio > 1 or max(shape.read_itemsize, shape.out_itemsize) > 2
        doubled = shape.reads_at and wide and self.split_k == 1
        return not doubled or values // self.subtiles <= DOUBLED_VALUES


FLOAT8_VALUES = 64
"""Accumulators of a thread where sums of float8 are kept apart; twice as many spill."""
DOUBLED_VALUES = 32
"""Those for which a thread can read twice as much: two columns each for SwiGLU's gradient, or float32."""

CONFIGS: tuple[TileConfig, ...] = (
    TileConfig("tma", 128, 256, 128, 8, 3, efficiency=0.80),
    TileConfig("tma", 128, 256, 128, 8, 4, subtiles=2, efficiency=0.80),
    TileConfig("tma", 128, 256, 128, 8, 3, subtiles=2, efficiency=0.78),
    TileConfig("tma", 128, 256, 128, 4, 3, specialize=True, efficiency=0.76),
    TileConfig("tma", 128, 128, 128, 8, 4, efficiency=0.70),
    TileConfig("tma", 128, 128, 128, 8, 3, subtiles=2, efficiency=0.68),
    TileConfig("tma", 64, 128, 128, 4, 4, efficiency=0.55),
    TileConfig("tma", 128, 128, 128, 8, 4, split_k=4, efficiency=0.70),
    TileConfig("tma", 128, 256, 128, 8, 2, adds=True, efficiency=0.74),
    TileConfig("tma", 128, 128, 128, 8, 3, adds=True, efficiency=0.68),
    TileConfig("pointers", 128, 128, 64, 8, 3, efficiency=0.55),
    TileConfig("pointers", 64, 64, 64, 4, 3, efficiency=0.40),
    TileConfig("pointers", 32, 32, 64, 4, 3, efficiency=0.20),
    TileConfig("pointers", 16, 64, 64, 4, 3, efficiency=0.15),
    TileConfig("pointers", 64, 64, 64, 4, 3, split_k=4, efficiency=0.40),
    TileConfig("pointers", 16, 64, 64, 4, 3, split_k=8, efficiency=0.15),
)
"""Everything that may be launched."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GEMM, as far as tiles depend on it.

    Args:
        M: Rows of A and of C: tokens, in a linear layer's forward pass.
        N: Columns of B and of C.
        K: Columns of A and rows of B.
        dtype: Of A and B.
        out_dtype: Of the result.
        batch: Independent products.
        aligned: Every row that TMA copies begins at a multiple of 16 bytes.
        reads_c: C is read.
        adds: The result may be added to what is in memory.
        layout: `nn`, `nt`, `tn` or `tt`: whether A and B lie by rows, or transposed.
        fused: Something follows the product that torch computes in a pass of its own: scales, an activation.
        columns_share: Columns of the result for one of the product: 1/2 behind SwiGLU, 2 for its gradient.
        saves_pre: What is before the activation is written too.
        reads_at: What an activation was applied to is read, since its gradient follows.
        read_itemsize: Bytes of an element of what is read beside the operands; 0 for those of the result.
        tf32: float32 is multiplied as TF32.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    batch: int = 1
    aligned: bool = True
    reads_c: bool = False
    adds: bool = False
    layout: str = "nt"
    fused: bool = False
    columns_ratio: float = 1.0
    saves_pre: bool = False
    reads_at: bool = False
    read_itemsize: int = 0
    tf32: bool = False

    @classmethod
    def packed(cls, M: int, N: int, K: int, dtype: torch.dtype) -> Shape:
        """Return the shape of operands whose rows lie one behind the other, as those of a layer do.

        Example:
            >>> [Shape.packed(8, 16, K, torch.bfloat16).aligned for K in (24, 20)]
            [True, False]
        """
        aligned = not (N * dtype.itemsize % TMA_BYTES or K * dtype.itemsize % TMA_BYTES)
        return cls(M=M, N=N, K=K, dtype=dtype, aligned=aligned)

    @property
    def has_tensor_cores(self) -> bool:
        """Whether tensor cores multiply this format; float32 as it is they do not."""
        return self.dtype != torch.float32 or self.tf32

    def product(self) -> Shape:
        """Return the float32 product alone."""
        return Shape(M=self.M, N=self.N, K=self.K, dtype=self.dtype, out_dtype=torch.float32)

    def without_tma(self) -> Shape:
        """Return the same for pointers alone."""
        return replace(self, aligned=False)

    @property
    def flop(self) -> int:
        """Operations, a multiplication and an addition apart."""
        return 2 * self.batch * self.M * self.N * self.K

    @property
    def out_itemsize(self) -> int:
        """Bytes of an element of the result."""
        return (self.out_dtype or self.dtype).itemsize
