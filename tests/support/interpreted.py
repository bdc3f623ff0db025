"""Generated cases of the kernels in Triton's interpreter, compared with float64.

    TRITON_INTERPRET=1 python -m tests.support.interpreted --seed 0 --cases 1000 --json results.json

Operands and result are parts of larger buffers of NaN: a read beyond an edge makes the result NaN, and a
write beyond an edge changes the buffer. Cases use `gemm` and the configs in turn; sizes, dtypes, strides,
batch axes and epilogues are random.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels.launch import launch
from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.operands import ACTIVATIONS, check_operands
from lightning_eff.kernels.tile_configs import CONFIGS, TileConfig
from tests.support.gemm_problem import reference

U32 = 2.0**-23
SIZES = [1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 47, 64, 65, 97, 127, 128, 130]
FORMATS = [torch.float32, torch.float16, torch.bfloat16]


class Case:
    """One GEMM, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kind = self.draw.choice(["random", "random", "integers", "special"])
        self.dtype = self.draw.choice(FORMATS)
        self.out_dtype = self.draw.choice([self.dtype, torch.float32])
        rows: list[TileConfig | None] = [None, *CONFIGS]
        self.tile = rows[seed % len(rows)]
        self.uses_tma = self.tile is not None and self.tile.kernel == "tma"
        is_split = self.tile is not None and self.tile.split_k > 1
        small = self.tile is None or self.tile.block_m < 64
        sizes = [0, *SIZES] if self.tile is None else SIZES
        self.M, self.N, self.K = (self.draw.choice(sizes[: -6 if small else None]) for _ in range(3))
        if self.uses_tma:
            fewest = 12 if self.out_dtype == torch.float32 else 8  # whole 16 bytes: of float32 4 elements
            self.M, self.N = self.draw.choice([5, 64, 130, 200]), self.draw.choice([fewest, 40, 136, 264])
        if self.tile is not None and is_split:  # two kernels, and many programs
            self.M = self.draw.choice([1, 5, 17, self.tile.block_m + 2])
            self.N, self.K = self.draw.choice([8, 40, 72]), self.draw.choice([1, 31, 65, 130, 200])
        batches = [()] if self.uses_tma else [(), (), (2,), (2, 1)]
        self.batch = self.draw.choice(batches[: 2 if is_split else None])
        self.alpha = self.draw.choice([1.0, 1.0, -0.5, 2.0, 0.0 if self.tile is None else 4.0])
        self.beta = self.draw.choice([0.0, 1.0, -2.0, 0.25])
        self.activation = self.draw.choice([None, "relu", "silu", "gelu_tanh"])
        if self.kind != "random" and self.activation is not None:
            self.activation = "relu"
        self.adds = self.tile is not None and self.tile.adds
        if self.adds:
            self.out_dtype, self.activation, self.beta = torch.float32, None, 1.0
        self.saves_pre = self.tile is not None and self.activation is not None and self.draw.random() < 0.5

    def values(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return small integers, whose products are exact in any dtype, or normally distributed numbers."""
        if self.kind == "integers":
            return torch.randint(-2, 3, size, generator=self.generator).to(dtype)
        values = torch.randn(size, generator=self.generator).to(dtype)
        if self.kind == "special" and values.numel():
            places = torch.rand(size, generator=self.generator) < 1.0 / max(values.numel(), 20)
            values[places] = self.draw.choice([float("nan"), float("inf"), float("-inf")])
        return values

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Tensor:
        """Return a matrix inside a buffer of NaN, stored by rows or by columns, sometimes with gaps."""
        by_rows = self.draw.random() < 0.5
        step = 1 if self.uses_tma else self.draw.choice([1, 1, 2])
        near, far = (columns, rows) if by_rows else (rows, columns)
        pitch = -(-(near * step + 16) * dtype.itemsize // 16) * 16 // dtype.itemsize
        room = torch.full((*batch, far + 2, pitch), float("nan"), dtype=dtype)
        first = 16 // dtype.itemsize
        part = room[..., 1 : far + 1, first : first + near * step : step]
        part = part if by_rows else part.mT
        part.copy_(self.values((*batch, rows, columns), dtype))
        return part

    def vector(self, length: int, dtype: torch.dtype) -> Tensor:
        room = torch.full((length + 2,), float("nan"), dtype=dtype)
        part = room[1 : length + 1]
        part.copy_(self.values((length,), dtype))
        return part

    def run(self) -> dict[str, Any]:
        """Compute the case; return its error over the bound, and whether the buffer is untouched."""
        a = self.matrix(self.M, self.K, self.dtype, self.batch)
        b = self.matrix(self.K, self.N, self.dtype, (3,) if self.batch == (2, 1) else ())
        if not self.alpha:  # A must not be read
            a.fill_(float("nan"))
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        other = self.draw.choice([self.out_dtype, torch.float32])
        c_batch = self.draw.choice([(), tuple(batch)])
        c = self.matrix(self.M, self.N, other, c_batch) if self.beta and not self.adds else None
        if not self.beta and self.tile is None:  # C must not be read
            c = torch.full((self.M, self.N), float("nan"), dtype=other)
        bias = self.vector(self.N, other) if self.draw.random() < 0.4 and not self.adds else None
        out, room, inside = self.place(tuple(batch))
        pre = torch.empty(*batch, self.M, self.N, dtype=self.out_dtype) if self.saves_pre else None
        if self.adds:
            out.copy_(self.values(tuple(out.shape), self.out_dtype))
        c_read = out.clone() if self.adds else c
        room_before = room.clone()
        product: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta, "bias": bias}
        epilogue: dict[str, Any] = {"activation": self.activation, "out_dtype": self.out_dtype}
        if self.tile is None:
            gemm(a, b, c, **product, **epilogue, out=out, backend="triton")
        else:
            launch(check_operands(a, b, c, **product, **epilogue), self.tile, out, pre=pre)
        x = reference(a, b, c_read, **product)
        size = self.size(a, b, c_read, bias)
        activate = ACTIVATIONS.get(self.activation or "")
        ratio = self.ratio(out, x, size) if activate is None else self.ratio(out, activate(x), 1.2 * size)
        if pre is not None:
            ratio = max(ratio, self.ratio(pre, x, size))
        out.fill_(0.0)
        room_before[inside] = 0.0
        untouched = torch.equal(room.nan_to_num(nan=7.0), room_before.nan_to_num(nan=7.0))
        return {"ratio": ratio, "untouched": untouched}

    def place(self, batch: tuple[int, ...]) -> tuple[Tensor, Tensor, Any]:
        """Return the memory of the result, the buffer around it, and its index in the buffer."""
        first = 16 // self.out_dtype.itemsize
        pitch = -(-(self.N + 16) // first) * first
        room = torch.full((*reversed(batch), self.M + 2, pitch), float("nan"), dtype=self.out_dtype)
        room = room.transpose(0, 1) if len(batch) == 2 else room  # then no single stride joins the batch axes
        inside = (..., slice(1, self.M + 1), slice(first, first + self.N))
        return room[inside], room, inside

    def size(self, a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return |alpha| |A| @ |B| + |beta| |C| + |bias|, to which errors are proportional."""
        c, bias = (each.abs() if each is not None else None for each in (c, bias))
        return reference(a.abs(), b.abs(), c, alpha=abs(self.alpha), beta=abs(self.beta), bias=bias)

    def ratio(self, out: Tensor, expected: Tensor, size: Tensor) -> float:
        """Return the largest error over T4's bound; infinite if NaN or infinity is in another place."""
        if not out.numel():
            return 0.0 if out.shape == expected.shape else float("inf")
        rounded = expected.to(self.out_dtype).double()
        result, finite = out.double(), expected.isfinite()
        # The interpreter rounds to bfloat16 towards 0, so only values that need no rounding are exact.
        if self.kind == "integers":
            exact = expected == rounded
            if not torch.equal(result[exact], rounded[exact]):
                return float("inf")
        same = torch.where(finite, True, (result == rounded) | (result.isnan() & rounded.isnan()))
        if not bool(same.all()) or not bool(result[finite].isfinite().all()):
            return float("inf")
        allowed = (self.K + 2) * U32 * size + torch.finfo(self.out_dtype).eps * expected.abs() + 1e-30
        allowed += 4 * U32 * expected.abs() if self.activation else 0.0
        if self.out_dtype == torch.float16:
            allowed += 2.0**-24
        return float(((result - expected).abs() / allowed)[finite].max()) if bool(finite.any()) else 0.0


def main() -> None:
    """Run the cases and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--stop", action="store_true", help="stop at the first wrong result")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = results_of(arguments.cases, arguments.seed, stop=arguments.stop)
    arguments.json.write_text(json.dumps(results, indent=1))
    sys.exit(bool(results["failures"]))


def results_of(cases: int, seed: int, *, stop: bool = False) -> dict[str, Any]:
    """Return the failures, the largest error over the bound by dtype, and how often each kind was drawn."""
    failures: list[dict[str, Any]] = []
    worst: dict[str, float] = {}
    seen = Counter[str]()
    for number in range(cases):
        case = Case(drawn := seed * 1_000_003 + number)
        row = "gemm" if case.tile is None else str(case.tile)
        seen.update([case.kind, str(case.dtype), row, str(case.activation)])
        seen["pre"] += case.saves_pre
        try:
            result = case.run()
        except Exception:  # noqa: BLE001 - a case may raise anything, which is a failure of this case
            failures.append({"seed": drawn, "row": row, "error": traceback.format_exc()[-1500:]})
            continue
        name = str(case.out_dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), result["ratio"])
        if result["ratio"] > 1.0 or not result["untouched"]:
            failure = {"seed": drawn, "row": row, "size": [case.M, case.N, case.K, *case.batch]}
            failures.append({**failure, "kind": case.kind, **result})
            if stop:
                break
    return {"cases": cases, "failures": failures, "worst": worst, "seen": seen}


if __name__ == "__main__":
    main()
