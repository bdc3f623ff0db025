"""Check the GEMM against float64: as a user calls it, and every config of its kernels.

    python benchmarks/gpu/kernels.py --out results

Every layout, epilogue and dtype is computed at awkward sizes, into results that are filled with NaN. Without
a GPU this needs Triton's interpreter: TRITON_INTERPRET=1 and --smoke.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import TimeoutError, get_context
from typing import Any

import torch
from torch import Tensor

from _suite import Measurement, Setting, SkippedError, main, require, sync
from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.devices import Device
from lightning_eff.kernels.gemm_kernels import INTERPRETED, triton
from lightning_eff.kernels.launch import CannotCompileError
from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.tile_configs import CONFIGS, TileConfig
from tests.support.gemm_problem import GRADIENTS, Case, Problem, Run, error_of, mlp_cases, run_config

BF16 = torch.bfloat16
ODD_SIZES = ((264, 1000, 200), (1000, 264, 136), (200, 50264, 520), (264, 264, 4104), (136, 50257, 136))
"""Multiples of 8 and not of 16: rows that TMA can copy, of sizes for which other kernels are compiled. The
last has the vocabulary of GPT-2, whose rows TMA cannot copy."""
TINY_SIZES = ((24, 40, 72), (24, 40, 520))
COMPILE_S = 60.0
"""Seconds in which kernels are compiled in parallel before they are used one after the other."""
SMALL, ALIGNMENT = 512, 16
"""Triton compiles another kernel for sizes that are multiples of 16."""
CANNOT_LAUNCH = (CannotCompileError, *((triton.TritonError,) if triton is not None else ()))
"""What is raised where a kernel cannot be compiled, or exceeds a device's resources."""


def check(run: Run, problem: Problem, *, rounds_twice: bool = False) -> dict[str, Any]:
    """Return whether a candidate is correct, and what is wrong with it or why it cannot run."""
    try:
        error = error_of(run, problem, rounds_twice=rounds_twice)
    except CANNOT_LAUNCH as reason:
        return {"correct": False, "rejected": str(reason).partition("\n")[0]}
    if error <= 1.0:
        return {"correct": True, "error over the bound": error}
    return {"correct": False, "wrong": f"error {error:.3g} times what is allowed"}


def correctness(setting: Setting) -> dict[str, Measurement]:
    """Return a case for `gemm` with backend=triton, and for each config."""
    require("triton")
    if not (setting.is_cuda or INTERPRETED):
        raise SkippedError("the kernels need a GPU, or Triton's interpreter (TRITON_INTERPRET=1)")
    cases = checked_cases(TINY_SIZES if setting.smoke else ODD_SIZES)
    if setting.is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = True  # otherwise no TMA config takes float32
        compile_ahead(jobs_of(cases, devices.of(setting.device)), setting.device, limit_s=COMPILE_S)
    of_layers = [case for case in cases if case.kind not in (*GRADIENTS, *GRADIENTS.values())]
    found: dict[str, Measurement] = {"gemm": partial(check_cases, of_layers, setting)}
    found["other calls"] = partial(check_calls, setting)
    return found | {str(config): partial(check_cases, cases, setting, config) for config in CONFIGS}


def checked_cases(sizes: Iterable[tuple[int, int, int]]) -> list[Case]:
    """Return sizes x layouts x kinds in bfloat16; float16, float32 and a float32 result for plain ones.

    The products of an MLP come in the layouts that they have.
    """
    sizes = list(sizes)
    plain = Case(M=1, N=1, K=1)
    kinds = [plain, replace(plain, out_dtype=torch.float32)]
    kinds += [replace(plain, kind=kind) for kind in ("adds", "bias", "fused", "c", "c32")]
    kinds += [replace(plain, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    cases = [
        replace(kind, M=M, N=N, K=K, layout=layout)
        for (M, N, K), layout, kind in product(sizes, ("nt", "nn", "tn"), kinds)
    ]
    return [*cases, *mlp_cases("gated", sizes, BF16), *mlp_cases("activated", sizes, BF16)]


def check_cases(cases: Iterable[Case], setting: Setting, config: TileConfig | None = None) -> dict[str, Any]:
    """Return how many cases are right, by `gemm` or by a config that fits them, and each that is not."""
    info = devices.of(setting.device) if setting.is_cuda else devices.DEVICES["h200"]
    found: dict[str, Any] = {"right": 0}
    for case in cases:
        problem = Problem.draw(case, setting.device)
        if config is not None and not tiles.fits(config, problem.shape(), info):
            continue
        result = check(run_gemm if config is None else run_config(config), problem)
        if result["correct"]:
            found["right"] += 1
        else:
            found[f"{case} {str(case.dtype).removeprefix('torch.')}"] = result
    return found


def check_calls(setting: Setting) -> dict[str, Any]:
    """Check batch axes, factors, strides, more than 2^31 elements, and both precisions of float32."""

    def normal(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*sizes, device=setting.device).to(dtype)

    m, n, k = (setting.size(full, small) for full, small in ((264, 24), (1000, 40), (200, 72)))
    rows, columns = setting.size(65544, 24), setting.size(32776, 40)
    a, b, c, wide = normal(m, k), normal(k, n), normal(m, n), normal(m, 2 * n)
    single = {"a": normal(m, k, dtype=torch.float32), "b": normal(k, n, dtype=torch.float32)}
    calls: dict[str, dict[str, Any]] = {
        "batch axes": {"a": normal(3, 1, m, k), "b": normal(2, k, n)},
        "alpha and beta": {"a": a, "b": b, "c": c, "alpha": -0.5, "beta": 2.0},
        "strided out": {"a": a, "b": b, "out": wide[:, ::2]},
        "more than 2^31 elements": {"a": normal(rows, 64), "b": normal(64, columns)},
        "float32 in IEEE": single, "float32 in TF32": single,
    }  # fmt: skip
    tf32, found = torch.backends.cuda.matmul.allow_tf32, dict[str, Any]({"right": 0})
    for name, call in calls.items():
        torch.backends.cuda.matmul.allow_tf32 = name.endswith("TF32")
        error = call_error(call, u=2.0**-10 if name.endswith("TF32") and setting.is_cuda else 2.0**-23)
        if error <= 1.0:
            found["right"] += 1
        else:
            found[name] = {"wrong": f"error {error:.3g} times what is allowed"}
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return found


def call_error(call: dict[str, Any], *, u: float) -> float:
    """Return the largest error of the first and last rows over `4 u |A| @ |B| + eps |ref|`."""
    found = gemm(**call, backend="triton")
    a, b = call["a"], call["b"].double()
    errors: list[float] = []
    for part in (slice(0, 64), slice(-64, None)):
        rows = a[..., part, :].double()
        expected = rows @ b * call.get("alpha", 1.0)
        if "c" in call:
            expected = expected + call["beta"] * call["c"][..., part, :]
        allowed = 4 * u * (rows.abs() @ b.abs()) + torch.finfo(found.dtype).eps * expected.abs()
        error = (found[..., part, :].double() - expected).abs() / allowed
        errors.append(float(error.nan_to_num(math.inf).max()))
    return max(errors)


def run_gemm(problem: Problem) -> Tensor:
    """Compute as a user does, by our kernels."""
    given = problem.operands
    return gemm(
        given.a, given.b, given.c, beta=None if given.c is None else 1.0, bias=given.bias,
        activation=given.activation, out_dtype=given.out_dtype, out=problem.d, backend="triton",
    )  # fmt: skip


def jobs_of(cases: Iterable[Case], info: Device, *, top: int | None = None) -> list[tuple[Case, TileConfig]]:
    """Return each kernel that is needed, once: of all configs that fit a case, or of those ranked first."""
    found: dict[tuple[Case, TileConfig], None] = {}
    for case in cases:
        shape = Problem.empty(case, torch.device("meta")).shape()
        shape = replace(shape, tf32=case.dtype == torch.float32 and devices.float32_precision() == "tf32")
        for cost in tiles.rank_configs(shape, info)[:top]:
            found[reduced(case), cost.config] = None
    return list(found)


def reduced(case: Case) -> Case:
    """Return a small case for which the same kernels are compiled.

    A kernel depends on config, dtypes and layouts, and on whether sizes are multiples of 16, not on sizes.
    """
    sizes = {axis: getattr(case, axis) for axis in "MNK"}
    return replace(case, **{axis: n if n < ALIGNMENT else SMALL + n % ALIGNMENT for axis, n in sizes.items()})


def compile_ahead(jobs: Iterable[tuple[Case, TileConfig]], device: torch.device, *, limit_s: float) -> None:
    """Compile kernels in several processes until a time is over; Triton keeps them on disk."""
    numbered = [(case, CONFIGS.index(config), device) for case, config in jobs]
    workers = min(os.cpu_count() or 1, len(numbered), 16)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    with get_context("spawn").Pool(workers, set_tf32, (tf32,)) as pool, suppress(TimeoutError):
        pool.starmap_async(compile_one, numbered, chunksize=1).get(limit_s)


def set_tf32(allow: bool) -> None:  # noqa: FBT001 - called by the pool
    """Multiply float32 in a worker as its parent does."""
    torch.backends.cuda.matmul.allow_tf32 = allow


def compile_one(case: Case, number: int, device: torch.device) -> None:
    """Launch a config once; what it raises, the measurement will meet again."""
    with suppress(*CANNOT_LAUNCH, RuntimeError):
        run_config(CONFIGS[number])(Problem.draw(case, device))
        sync(device)


if __name__ == "__main__":
    main(__doc__, {"correctness": correctness})
