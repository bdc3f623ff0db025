"""Compile kernels in several processes at once; Triton keeps them on disk, where a measurement finds them.

A kernel depends on its config, on dtypes and layouts, and on whether sizes are multiples of 16, but not on
the sizes themselves: each is compiled by launching it once on a small problem of the same kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context

import torch

from lightning_eff.commands._bench import gemm_timing
from lightning_eff.commands._bench.gemm_problem import Case, Problem
from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.tile_configs import CONFIGS, TileConfig

SMALL = 512
ALIGNMENT = 16
"""Triton compiles another kernel for sizes that are multiples of it."""
Job = tuple[Case, TileConfig]


def jobs_of(
    cases: Iterable[Case], device: torch.device, info: Device | None = None, *, top: int | None = None
) -> list[Job]:
    """Return each kernel that is needed, once: of all configs that fit a case, or of those ranked first."""
    info = info or devices.of(device)
    found: dict[Job, None] = {}
    for case in cases:
        shape = Problem.empty(case, device).shape()
        for cost in tiles.rank_configs(shape, info)[:top]:
            found[reduced(case), cost.config] = None
    return list(found)


def reduced(case: Case) -> Case:
    """Return a small case that the same kernels are compiled for.

    Example:
        >>> str(reduced(Case(M=8192, N=200, K=50264)))
        '512x520x520 nt plain'
    """
    sizes = {
        axis: size if size < ALIGNMENT else SMALL + size % ALIGNMENT
        for axis, size in (("M", case.M), ("N", case.N), ("K", case.K))
    }
    return replace(case, **sizes)


def compile_ahead(jobs: Iterable[Job], device: torch.device, *, limit_s: float) -> int:
    """Compile kernels until a time is over, and return how many were; nothing depends on them."""
    numbered = [(case, CONFIGS.index(config)) for case, config in jobs]
    workers = min(os.cpu_count() or 1, len(numbered), 16)
    if workers < 2 or device.type != "cuda":
        return 0
    num_compiled = 0
    tf32 = bool(torch.backends.cuda.matmul.allow_tf32)
    context = get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_allow_tf32, initargs=(tf32,))
    with suppress(TimeoutError, BrokenProcessPool):
        futures = [pool.submit(compile_one, case, number, device) for case, number in numbered]
        for _ in as_completed(futures, timeout=limit_s):
            num_compiled += 1
    pool.shutdown(wait=False, cancel_futures=True)
    return num_compiled


def _allow_tf32(allow: bool) -> None:  # noqa: FBT001 - of a process of the pool
    torch.backends.cuda.matmul.allow_tf32 = allow


def compile_one(case: Case, number: int, device: torch.device) -> None:
    """Launch a config once; what it raises, the measurement will meet again."""
    problem = Problem.draw(case, device)
    with suppress(*gemm_timing.CANNOT_LAUNCH, RuntimeError):
        gemm_timing.run_config(CONFIGS[number])(problem)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
