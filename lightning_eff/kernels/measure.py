"""Measure which backend computes a GEMM fastest, with the operands of its first call.

`dispatch.choose` calls `measure`. Each candidate first writes to separate memory, which is filled with NaN,
and the candidate's result is compared with the result of torch's library. The correct candidates then take
turns (A B A B), because clocks drift. Each candidate runs for 20 ms in total. Triton's `do_bench` puts CUDA
events around each call. `do_bench` flushes the L2 cache before a call, because in a real step the cache holds
other data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from lightning_eff.kernels.choices import LIBRARY, Choice
from lightning_eff.kernels.launch import CannotCompileError, Launch
from lightning_eff.kernels.library import by_library, mlp_by_library
from lightning_eff.kernels.operands import Operands, in_place
from lightning_eff.kernels.tile_configs import TileConfig

MIN_RATIO = 1.03
"""Ratio to the library's speed that a config must exceed; 20 ms are too short to measure a smaller gain."""
TURNS, TURN_MS = 4, 5
MAX_ROWS = 256
"""Largest number of rows that are compared. A few rows are enough, as a faulty tile affects all its rows."""


def measure(
    operands: Operands, out: Tensor | None, writes: int, configs: Sequence[TileConfig]
) -> Choice | None:
    """Return the fastest of the library and the configs; None if the library's result cannot verify them.

    Args:
        operands: Operands of the first call; they are not changed.
        out: The result tensor of the first call; None for a new tensor.
        writes: As in `Operands.shape`.
        configs: The candidates, best-ranked first.

    Raises:
        OutOfMemoryError: A second result does not fit in memory.

    Warns:
        UserWarning: A config computes a wrong result.
    """
    adds = out is not None and operands.c is not None and in_place(operands.c, out)
    # Measuring must not write to the caller's `out`, so every result gets separate memory.
    d = torch.empty(operands.size, dtype=operands.out_dtype, device=operands.a.device)
    d = d if out is None else torch.empty_like(out)
    d2 = torch.empty_like(d) if operands.up is not None else None
    pre = torch.empty_like(d) if writes > (d2 is not None) else None
    results = [result for result in (d, pre, d2) if result is not None]
    # A config with `adds` adds to C in memory, so the separate result takes the place of C.
    given = replace(operands, c=d) if adds else operands

    def reset() -> None:
        for result in results:
            # NaN, so that elements which a config does not write are detected.
            result.fill_(math.nan)
        if adds and out is not None:
            d.copy_(out)

    def library() -> list[Tensor]:
        if pre is not None or given.gate is not None:
            return mlp_by_library(given, stores_pre=pre is not None)
        return [by_library(given, None if out is None else d)]

    reset()
    expected = [_some_rows(result) for result in library()]
    if not all(bool(rows.isfinite().all() & rows.any()) for rows in expected):
        # A wrong config could also give 0, infinity or NaN, which float16's first gradients may contain.
        return None
    runs: dict[str, Callable[[], object]] = {LIBRARY: library}
    for config in configs:
        reset()
        run = partial(Launch(config), given, d, pre, d2)
        with suppress(CannotCompileError):
            run()
            if all(map(is_right, map(_some_rows, results), expected)):
                runs[str(config)] = run
            else:
                what = f"{config} computes {operands.M} x {operands.N} x {operands.K} wrongly here"
                warnings.warn(f"{what}: it is not used", UserWarning, stacklevel=2)
    # In turns, so that a change of the GPU's clock affects all candidates alike.
    turns = [{name: milliseconds(run) for name, run in runs.items()} for _ in range(TURNS)]
    # The median ignores a turn in which other work slowed the GPU.
    times = {name: median(turn[name] for turn in turns) for name in runs}
    library_ms = times.pop(LIBRARY)
    fastest = min(times, key=lambda name: times[name], default=LIBRARY)
    ratio = library_ms / times[fastest] if times else 0.0
    return Choice(fastest if ratio > MIN_RATIO else LIBRARY, round(ratio, 3))


def _some_rows(result: Tensor) -> Tensor:
    """Return some rows of a result, including the first and the last."""
    matrix = result.flatten(0, -2)
    last = len(matrix) - 1
    return matrix[torch.linspace(0, last, min(last + 1, MAX_ROWS), device=result.device).round().long()]


def is_right(found: Tensor, expected: Tensor) -> bool:
    """Return whether two results differ by at most four rounding errors of a row's largest element.

    This limit accepts sums in another order, and rounding before an activation. The limit detects a missing
    step of K. A missing step changes an element by the square root of the step's fraction of K, for example
    by 1/8 if K is 4,096.
    """
    found, largest = found.float(), expected.float().abs().amax(1, keepdim=True)
    # At least 2**-10, because float32 may be multiplied as TF32.
    allowed = 4 * max(torch.finfo(expected.dtype).eps, 2.0**-10) * largest
    return bool(((found - expected.float()).abs() <= allowed).all())


def milliseconds(run: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes on the GPU."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=1, rep=TURN_MS, return_mode="median"))  # pyright: ignore[reportArgumentType]
