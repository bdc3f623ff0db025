"""Compile the kernels of the measurements for a GPU that need not be present, and check their machine code.

    TRITON_CACHE_DIR=build/kernels python benchmarks/gpu/compile.py --target sm_90

The folder is a cache of Triton's: on a machine with that GPU and the same version of Triton, with
TRITON_CACHE_DIR set to a copy of it, nothing is left to compile. Exits with 4 if a kernel spills registers or
needs more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from _suite import EXIT_FAULTS
from gemm import cases_by_worth
from kernels import CANNOT_LAUNCH, ODD_SIZES, TINY_SIZES, checked_cases, jobs_of
from layers import LOSS_SIZES
from lightning_eff.kernels import _row_kernel, devices, dispatch
from lightning_eff.kernels.tile_configs import CONFIGS
from tests.support.assembly import gpu, read_code
from tests.support.gemm_problem import Case, Problem, run_config

TARGETS = {"sm_80": "a100", "sm_90": "h100", "sm_100": "b200"}
"""Names of `devices.DEVICES` with that architecture."""


def compile_kernel(job: tuple[Case, int], device: str) -> tuple[str, str]:
    """Compile what a config launches for a case; return its name, and what is wrong with the code."""
    case, number = job
    name = f"{CONFIGS[number]} | {case} {str(case.dtype).removeprefix('torch.')}"
    with gpu(device, tf32=case.dtype == torch.float32) as compiled:
        try:
            run_config(CONFIGS[number])(Problem.draw(case, torch.device("cpu")))
        except CANNOT_LAUNCH as error:
            return name, str(error).partition("\n")[0]
    return name, fault_of(compiled, device)


def compile_loss(device: str) -> tuple[str, str]:
    """Compile the loss's kernel as `layers.py` launches it; return as `compile_kernel` does."""
    logits, column = torch.zeros(2, LOSS_SIZES[2]), torch.zeros(2, 1)
    with gpu(device) as compiled:
        _row_kernel.compute(
            logits, torch.bfloat16, torch.zeros(2, 1, dtype=torch.int64), [column] * 4,
            [column, column, None, None, None], None, smoothing=0.0, softcap=None, temperature=1.0, sums="",
        )  # fmt: skip
    return "rows of the loss", fault_of(compiled, device)


def fault_of(compiled: Iterable[Any], device: str) -> str:
    """Return what is wrong with the machine code of kernels."""
    for code in map(read_code, compiled):
        if code.stack_bytes or code.instructions["local_memory"]:
            return f"spills: {code}"
        if code.shared_bytes > devices.DEVICES[device].shared_bytes:
            return f"shared memory: {code}"
    return ""


def main() -> None:
    """Compile each kernel once, in as many processes as there are cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, default="sm_90", help="architecture of the GPU (sm_90)")
    parser.add_argument("--smoke", action="store_true", help="one kernel of each kind")
    options = parser.parse_args()
    device = TARGETS[options.target]
    torch.backends.cuda.matmul.allow_tf32 = True
    info = devices.DEVICES[device]
    jobs = jobs_of(checked_cases(TINY_SIZES if options.smoke else ODD_SIZES), info)
    jobs += jobs_of(cases_by_worth(torch.bfloat16), info, top=dispatch.NUM_CANDIDATES)
    numbered = [(case, CONFIGS.index(config)) for case, config in dict.fromkeys(jobs)]
    if options.smoke:
        numbered = list({case.kind: (case, number) for case, number in numbered}.values())[:3]
    faults = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = pool.submit(compile_loss, device)
        for name, fault in [*pool.map(partial(compile_kernel, device=device), numbered), rows.result()]:
            sys.stdout.write(f"{name}: {fault or 'ok'}\n")
            faults += bool(fault)
    sys.stdout.write(f"{len(numbered) + 1} kernels for {options.target}, {faults} with a fault\n")
    sys.exit(EXIT_FAULTS if faults else 0)


if __name__ == "__main__":
    main()
