"""Measure on one CPU core why tiles pay: a float32 product by plain loops, by tiles, and by torch's library.

From variant to variant more of what was loaded is used again before it is replaced. The loops are C++
(blocking.cpp), compiled for this CPU when they are measured: a Python loop would measure the interpreter.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_eff.commands._bench.gemm_problem import Case, Problem
from lightning_eff.core import machine
from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, EnvironmentLacksError
from lightning_eff.core.text import human_bytes, text_table

SIZES = ((48, 48, 48), (256, 256, 256), (64, 1024, 1024), (32, 3072, 3072))
"""M, N, K; the three matrices take 27 KiB, 768 KiB, 4.5 MiB and 36.8 MiB: about a cache each, and more."""
ROUNDS = 5
SHORTEST_S = 0.02
"""Seconds that a variant is timed in a round, at least; in less than that it is called again."""
TILE_COLUMNS = 16
CACHES = ("L1", "L2", "L3")
ASSUMED_BYTES = {"L1": 32 * 2**10, "L2": 2**20}
"""For which the loops are blocked where the system does not state a size."""
SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
LIBRARY = "library"
Run = Callable[[Tensor, Tensor, Tensor], object]
"""Computes C from A and B."""


def main(options: argparse.Namespace) -> int:
    """Check and time every variant, print a table or JSON, and write the numbers into a folder."""
    compiler = machine.find_compiler("cpu")
    if compiler is None:
        text = "bench --blocking: its loops are C++, and no compiler was found\n  try: apt-get install g++"
        raise EnvironmentLacksError(text)
    caches = cache_sizes()
    variants, descriptions = variants_for(compile_loops(compiler), caches)
    environment = {
        "command": shlex.join(["lightning-eff", "bench", *options.arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.machine_info(torch.device("cpu")),
        "threads": 1,
        "compiler": f"{Path(compiler).name} {' '.join(FLAGS)}",
        "caches": ", ".join(f"{name} {_size(caches.get(name))}" for name in CACHES),
    }
    sizes, rounds = (SIZES[:2], 2) if options.quick else (SIZES, ROUNDS)
    rows = measure(variants, sizes, rounds)
    report = {"environment": environment, "variants": descriptions, "rows": rows}
    numbers = json.dumps(report, indent=1) + "\n"
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "blocking.json").write_text(numbers, encoding="utf-8")
    about = "\n".join(f" {key}: {value}" for key, value in environment.items())
    sys.stdout.write(numbers if options.json else f"{about}\n\n{table(report)}\n")
    return EXIT_OK if all(each["correct"] for row in rows for each in row["variants"]) else EXIT_FAILED


def cache_sizes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, int]:
    """Return the bytes of the caches of a core's data, by name; without those that Linux does not state."""
    sizes: dict[str, int] = {}
    for index in folder.glob("index*"):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            sizes[f"L{level}"] = int(size.removesuffix("K")) * 2**10
    return sizes


def compile_loops(compiler: str) -> ctypes.CDLL:
    """Compile the loops for this CPU, and load them.

    Raises:
        EnvironmentLacksError: The compiler fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "blocking.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            reason = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            text = f"bench --blocking: {shlex.join(command)} fails: {reason}\n  try: apt-get install g++"
            raise EnvironmentLacksError(text)
        return ctypes.CDLL(str(target))


def variants_for(loops: ctypes.CDLL, caches: Mapping[str, int]) -> tuple[dict[str, Run], dict[str, str]]:
    """Return the variants by name, blocked for caches, and a description of each."""
    l1, l2 = ((caches.get(name) or ASSUMED_BYTES[name]) // 4 for name in ("L1", "L2"))  # floats
    width = max(TILE_COLUMNS, l1 // 8)
    depth = max(1, l2 // 2 // width)
    panel = torch.empty(max(1, l1 // 2 // TILE_COLUMNS), TILE_COLUMNS)
    tile_rows = ctypes.c_int64.in_dll(loops, "tile_rows").value

    def call(name: str, *block: int | Tensor) -> Run:
        function = loops[name]
        function.restype = None

        def run(a: Tensor, b: Tensor, c: Tensor) -> None:
            sizes = (*c.shape, a.shape[1])
            tensors = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, c)]
            more = (
                ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int64(x) for x in block
            )
            function(*tensors, *map(ctypes.c_int64, sizes), *more)

        return run

    whole = 2**40
    runs = {
        "three loops": call("three_loops"),
        "along rows": call("blocked", whole, whole),
        "blocked": call("blocked", depth, width),
        "tiled": call("tiled", len(panel), panel),
        LIBRARY: lambda a, b, c: torch.mm(a, b, out=c),
    }
    descriptions = {
        "three loops": "each element of C is the sum over a row of A and a column of B",
        "along rows": "the innermost loop is along a row of B and of C",
        "blocked": f"the same for a block of B [{depth}, {width}] after another: half of the L2 cache",
        "tiled": f"tiles of C [{tile_rows}, {TILE_COLUMNS}] in registers, "
        f"and a copy of B [{len(panel)}, {TILE_COLUMNS}]: half of the L1 cache",
        LIBRARY: "torch.mm",
    }
    return runs, descriptions


def measure(
    variants: Mapping[str, Run], sizes: Sequence[tuple[int, int, int]], rounds: int
) -> list[dict[str, Any]]:
    """Check each variant against float64, then time those that are correct, in turn, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _row(variants, Case(M=m, N=n, K=k, layout="nn", dtype=torch.float32), rounds) for m, n, k in sizes
        ]
    finally:
        torch.set_num_threads(threads)


def _row(variants: Mapping[str, Run], case: Case, rounds: int) -> dict[str, Any]:
    problem = Problem.draw(case, torch.device("cpu"))
    a, b, c = problem.operands.a, problem.operands.b, problem.d
    flop = 2 * case.M * case.N * case.K
    errors: dict[str, float] = {}
    for name, run in variants.items():
        c.fill_(math.nan)
        run(a, b, c)
        errors[name] = problem.error(c)
    gflops: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name in (name for name, error in errors.items() if error <= 1.0):
            gflops[name].append(flop / _seconds(variants[name], a, b, c) / 1e9)
    results = [
        {
            "name": name,
            "correct": errors[name] <= 1.0,
            "error": errors[name] if math.isfinite(errors[name]) else None,  # JSON has no infinity
            "gflops": gflops[name],
        }
        for name in variants
    ]
    num_bytes = sum(tensor.nbytes for tensor in (a, b, c))
    return {"M": case.M, "N": case.N, "K": case.K, "bytes": num_bytes, "variants": results}


def _seconds(run: Run, a: Tensor, b: Tensor, c: Tensor) -> float:
    """Return the mean time of as many calls as take `SHORTEST_S`."""
    num_calls, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < SHORTEST_S:
        run(a, b, c)
        num_calls += 1
    return elapsed_s / num_calls


def table(report: Mapping[str, Any]) -> str:
    """Return the table of a report: GFLOP/s by size and variant, median and range of the rounds."""
    header = ["M x N x K", "bytes of A, B, C", *report["variants"]]
    rows = [
        [f"{row['M']}x{row['N']}x{row['K']}", human_bytes(row["bytes"]), *map(_cell, row["variants"])]
        for row in report["rows"]
    ]
    lines = [f" {name}: {description}" for name, description in report["variants"].items()]
    caches = report["environment"]["caches"]
    title = f" GFLOP/s on one thread, median (range) of the rounds; caches: {caches}"
    return "\n\n".join(["\n".join(lines), title, text_table(header, rows)])


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else human_bytes(num_bytes)


def _cell(result: Mapping[str, Any]) -> str:
    if not result["correct"]:
        return "INCORRECT"
    low, middle, high = (f"{pick(result['gflops']):.3g}" for pick in (min, median, max))
    return f"{middle} ({low}..{high})"
