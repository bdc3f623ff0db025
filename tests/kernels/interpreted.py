"""The kernels in Triton's interpreter: generated cases against float64, in a process of its own.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted --seed 0 --cases 1000 --json results.json

Every operand lies in a larger buffer of NaN, and so does the result: what is read beyond an edge makes a
result NaN, and what is written there is seen. A row of the table is drawn for each case, and so are sizes,
formats, strides, batch axes and epilogues.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels import operands, reference
from lightning_eff.kernels.matmul import gemm, launch
from lightning_eff.kernels.table import TILES, Tile

U32 = 2.0**-23
SIZES = [1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 47, 64, 65, 97, 127, 128, 130]
FORMATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


class Case:
    """One GEMM, drawn from a seed.

    Args:
        seed: What it is drawn from.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kind = self.draw.choice(["random", "random", "integers", "special"])
        self.dtype = self.draw.choice(FORMATS)
        low = self.dtype.itemsize == 1
        if low:  # which knows no infinity
            self.kind = self.kind.replace("special", "integers")
        self.out_dtype = self.draw.choice([torch.bfloat16 if low else self.dtype, torch.float32])
        self.tile: Tile | None = self.draw.choice([None, *TILES])
        uses_tma = self.tile is not None and self.tile.kernel == "tma"
        small = self.tile is None or self.tile.block_m < 64
        sizes = [0, *SIZES] if self.tile is None else SIZES
        self.M, self.N, self.K = (self.draw.choice(sizes[: -6 if small else None]) for _ in range(3))
        if uses_tma:
            self.M, self.N = self.draw.choice([5, 64, 130, 200]), self.draw.choice([8, 40, 136, 264])
        self.uses_tma = uses_tma
        self.batch = () if uses_tma else self.draw.choice([(), (), (2,), (2, 1)])
        self.alpha = self.draw.choice([1.0, 1.0, -0.5, 2.0, 0.0 if self.tile is None else 4.0])
        self.beta = self.draw.choice([0.0, 1.0, -2.0, 0.25])
        self.activation = self.draw.choice([None, None, "relu", "silu", "gelu_tanh"])
        if self.kind != "random" and self.activation is not None:
            self.activation = "relu"
        self.adds = self.tile is not None and self.tile.adds
        if self.adds:
            self.out_dtype, self.activation, self.beta = torch.float32, None, 1.0

    def values(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return numbers: small integers, whose products are exact in any format, or normal ones."""
        if self.kind == "integers":
            return torch.randint(-2, 3, size, generator=self.generator).to(dtype)
        values = torch.randn(size, generator=self.generator).to(dtype)
        if self.kind == "special" and values.numel():
            places = torch.rand(size, generator=self.generator) < 1.0 / max(values.numel(), 20)
            values[places] = self.draw.choice([float("nan"), float("inf"), float("-inf")])
        return values

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Tensor:
        """Return a matrix amid NaN, by rows or by columns; with gaps where they may be."""
        by_rows = self.draw.random() < 0.5
        step = 1 if self.uses_tma else self.draw.choice([1, 1, 2])
        near, far = (columns, rows) if by_rows else (rows, columns)
        item = torch.empty(0, dtype=dtype).element_size()
        pitch = -(-(near * step + 16) * item // 16) * 16 // item
        room = torch.full((*batch, far + 2, pitch), float("nan"), dtype=dtype)
        part = room[..., 1 : far + 1, 16 // item : 16 // item + near * step : step]
        part = part if by_rows else part.mT
        part.copy_(self.values((*batch, rows, columns), dtype))
        return part

    def vector(self, length: int, dtype: torch.dtype) -> Tensor:
        room = torch.full((length + 2,), float("nan"), dtype=dtype)
        part = room[1 : length + 1]
        part.copy_(self.values((length,), dtype))
        return part

    def run(self) -> dict[str, Any]:
        """Compute the case, and return how far it is off."""
        a = self.matrix(self.M, self.K, self.dtype, self.batch)
        b = self.matrix(self.K, self.N, self.dtype, (3,) if self.batch == (2, 1) else ())
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        other = self.draw.choice([self.out_dtype, torch.float32])
        c = self.matrix(self.M, self.N, other, ()) if self.beta and not self.adds else None
        if not self.beta and self.tile is None:  # which must not be read
            c = torch.full((self.M, self.N), float("nan"), dtype=other)
        bias = self.vector(self.N, other) if self.draw.random() < 0.4 and not self.adds else None
        scaled = self.draw.random() < (0.7 if self.dtype.itemsize == 1 else 0.2) and not self.adds
        scale_a = (
            torch.rand(self.M, generator=self.generator) + 0.5 if scaled and self.kind == "random" else None
        )
        scale_b = (
            torch.rand(self.N, generator=self.generator) + 0.5 if scaled and self.kind == "random" else None
        )
        out, room = self.place(tuple(batch))
        if self.adds:
            out.copy_(self.values(tuple(out.shape), self.out_dtype))
        c_read = out.clone() if self.adds else c
        room_before = room.clone()
        extra: dict[str, Any] = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
        factors = {"alpha": self.alpha, "beta": self.beta}
        if self.tile is None:
            gemm(a, b, c, **factors, **extra, activation=self.activation, out_dtype=self.out_dtype, out=out,
                 backend="triton")  # fmt: skip
        else:
            given = operands.check(a, b, c, **extra, out_dtype=self.out_dtype, activation=self.activation)
            launch(given, self.tile, out, **factors, activation=self.activation)
        expected = reference.gemm(a, b, c_read, **factors, **extra, activation=self.activation)
        ratio = self.ratio(out, expected, a, b, c_read, **extra)
        out_values = out.clone()
        out.fill_(0.0)
        room_before[self.inside] = 0.0
        untouched = torch.equal(room.nan_to_num(nan=7.0), room_before.nan_to_num(nan=7.0))
        return {"ratio": ratio, "untouched": untouched, "numel": out_values.numel()}

    def place(self, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return where the result goes, and the buffer around it."""
        item = torch.empty(0, dtype=self.out_dtype).element_size()
        pitch = -(-(self.N + 16) * item // 16) * 16 // item
        room = torch.full((*reversed(batch), self.M + 2, pitch), float("nan"), dtype=self.out_dtype)
        room = room.transpose(0, 1) if len(batch) == 2 else room  # no stride from one product to the next
        self.inside = (..., slice(1, self.M + 1), slice(16 // item, 16 // item + self.N))
        return room[self.inside], room

    def ratio(
        self, out: Tensor, expected: Tensor, a: Tensor, b: Tensor, c: Tensor | None, **extra: Any
    ) -> float:
        """Return the largest error over what T4 allows; infinite where only one is a number."""
        if not out.numel():
            return 0.0 if out.shape == expected.shape else float("inf")
        rounded = expected.to(self.out_dtype).double()
        result, finite = out.double(), expected.isfinite()
        if self.kind == "integers":  # the interpreter rounds to bfloat16 towards 0, where it has to
            exact = expected == rounded
            if not torch.equal(result[exact], rounded[exact]):
                return float("inf")
        same = torch.where(finite, True, (result == rounded) | (result.isnan() & rounded.isnan()))
        if not bool(same.all()) or not bool(result[finite].isfinite().all()):
            return float("inf")
        sums = {"alpha": abs(self.alpha), "beta": abs(self.beta)}
        parts = {name: each.abs() if each is not None else None for name, each in extra.items()}
        size = reference.gemm(a.abs(), b.abs(), c.abs() if c is not None else None, **sums, **parts)
        slope = 1.2 if self.activation else 1.0
        allowed = (self.K + 2) * U32 * size * slope + torch.finfo(self.out_dtype).eps * expected.abs() + 1e-30
        allowed += 4 * U32 * expected.abs() if self.activation else 0.0
        if self.out_dtype == torch.float16:
            allowed += 2.0**-24
        return float(((result - expected).abs() / allowed)[finite].max()) if bool(finite.any()) else 0.0


def main() -> None:
    """Run the cases and write what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failures: list[dict[str, Any]] = []
    worst: dict[str, float] = {}
    seen: dict[str, int] = {}
    for number in range(arguments.cases):
        seed = arguments.seed * 1_000_003 + number
        case = Case(seed)
        row = "gemm" if case.tile is None else str(case.tile)
        for key in (case.kind, str(case.dtype), row):
            seen[key] = seen.get(key, 0) + 1
        try:
            result = case.run()
        except Exception:  # noqa: BLE001 - a case that raises is a failure with a name
            failures.append({"seed": seed, "row": row, "error": traceback.format_exc()[-1500:]})
            continue
        name = str(case.out_dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), result["ratio"])
        if result["ratio"] > 1.0 or not result["untouched"]:
            size = [case.M, case.N, case.K, *case.batch]
            failures.append({"seed": seed, "row": row, "size": size, "kind": case.kind, **result})
    text = json.dumps(
        {"cases": arguments.cases, "failures": failures, "worst": worst, "seen": seen}, indent=1
    )
    arguments.json.write_text(text)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
