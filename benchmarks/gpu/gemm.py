"""Measure the kernels of the GEMM against torch's library, next to what the machine can reach.

    python benchmarks/gpu/gemm.py ceilings gemm choices --out results

Candidates are torch's library and the configs that the cost model ranks first, each launched directly. What
is not correct against float64 is not timed. Fair timing: normal data, because zeros draw less power and run
faster; candidates in turns A B A B, because clocks drift; each timed in two ways, single calls after an
emptied L2 cache, and a CUDA graph of calls over buffers that the cache does not hold, which has no host time.
A ratio has to hold in both: the smaller one counts.

`choices` asks for these products as a layer does, which measures them its own way and keeps what it chose in
the user's cache folder (XDG_CACHE_HOME). That file, in kernels/measured, ships with the package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from operator import truediv
from statistics import median
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from _suite import (
    CLOCKS,
    Measurement,
    Setting,
    SkippedError,
    in_turns,
    main,
    nvidia_smi,
    one_case,
    require,
    sync,
)
from kernels import COMPILE_S, check, compile_ahead, jobs_of
from lightning_eff.kernels import devices, dispatch, launch, tiles
from tests.support.gemm_problem import Case, Problem, Run, cases_of, mlp_cases, run_config, run_library

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Output and input features of a block of Llama 3 8B: queries, keys and values; attention's output; gate and
up; down."""
WEIGHTS = (*LLAMA_8B, (128256, 4096), (12288, 4096), (4096, 11008), (10240, 8192), (8192, 28672), (3072, 768))
"""These, its vocabulary, two of Llama 2 7B, two of Llama 3 70B, and one of GPT-2."""
TOKENS = (2048, 8192, 4096)
CUBE = (8192, 8192, 8192)
GATED_MLPS = ((8192, 14336, 4096), (8192, 11008, 4096))
"""Llama 3 8B and Llama 2 7B: tokens, hidden features, input features."""
ACTIVATED_MLPS = ((8192, 16384, 4096), (8192, 6400, 1600))
"""GPT-J 6B and GPT-2 XL."""
WIDE_BANDS = 16
"""Rows of tiles in a band, in place of 8: by arithmetic 21 % fewer misses of the L2 cache."""
LIBRARY, METHODS = "library", ("flushed", "graph")
ROUNDS, ROUND_MS = 5, 20
GRAPH_REPLAYS = 10
"""Of `do_bench_cudagraph`, whose `rep` is the length of one of them."""


def ceilings(setting: Setting) -> dict[str, Any]:
    """Measure what the machine can do: one product by torch's library, and one copy in memory."""
    n, num_bytes = setting.size(8192, 64), setting.size(4 << 30, 1 << 20)
    a, b = (torch.randn(n, n, device=setting.device).mul_(n**-0.5).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    calls = {"mm": lambda: torch.mm(a, b.T, out=out), "copy": lambda: target.copy_(source)}
    found = in_turns(calls, setting, calls_per_turn=10)
    found["mm"]["TFLOP/s"] = 2 * n**3 / found["mm"]["ms"] / 1e9
    found["copy"]["TB/s"] = 2 * num_bytes / found["copy"]["ms"] / 1e9  # each byte is read and written
    return found | {"sustained": sustained(calls["mm"], 2 * n**3, setting)}


def sustained(call: Callable[[], Any], num_flops: int, setting: Setting) -> dict[str, Any]:
    """Run a product for two seconds, and read power and clocks in their middle."""
    limit_s, num_calls, elapsed_s = setting.size(2, 0), 0, 0.0
    with ThreadPoolExecutor(1) as pool:
        clocks = pool.submit(lambda: time.sleep(limit_s / 2) or nvidia_smi(setting.device, CLOCKS))
        sync(setting.device)
        began = time.perf_counter()
        while elapsed_s < limit_s or not num_calls:
            for _ in range(setting.size(20, 1)):  # queued: the GPU never waits for Python
                call()
                num_calls += 1
            sync(setting.device)
            elapsed_s = time.perf_counter() - began
    return {"TFLOP/s": num_calls * num_flops / elapsed_s / 1e12, "clocks": clocks.result()}


def gemm(setting: Setting) -> dict[str, Measurement]:
    """Return the products of language models, the most telling first."""
    require("triton")
    cases = cases_by_worth(torch.bfloat16 if setting.is_cuda else torch.float32)
    if setting.smoke:  # one of each kind and layout
        cases = list(dict.fromkeys(replace(case, M=24, N=40, K=72) for case in cases))
    if not setting.is_cuda:
        return {str(case): partial(check_library, case, setting.device) for case in cases}
    jobs = jobs_of(cases, devices.of(setting.device), top=dispatch.NUM_CANDIDATES)
    compile_ahead(jobs, setting.device, limit_s=COMPILE_S)
    return {str(case): partial(compare, case, setting.device) for case in cases}


def cases_by_worth(dtype: torch.dtype) -> list[Case]:
    """Return the cube, Llama 3 8B at 2,048 and 8,192 tokens, products with epilogues, then the rest."""
    llama = [(tokens, *weight) for weight in WEIGHTS[:5] for tokens in TOKENS[:2]]
    first = cases_of([CUBE, *llama], dtype)
    more = [(tokens, *weight) for weight in ((4096, 4096), (28672, 4096)) for tokens in TOKENS[:2]]
    kinds = {"nt": "fused", "tn": "adds"}
    first += [
        replace(each, kind=kinds[each.layout]) for each in cases_of(more, dtype) if each.layout in kinds
    ]
    first += mlp_cases("gated", GATED_MLPS, dtype) + mlp_cases("activated", ACTIVATED_MLPS, dtype)
    rest = cases_of([(tokens, *weight) for weight in WEIGHTS for tokens in TOKENS], dtype)
    return list(dict.fromkeys([*first, *rest]))


def choices(setting: Setting) -> dict[str, Measurement]:
    """Return the same products, to be chosen for."""
    require("triton")
    if not setting.is_cuda:
        raise SkippedError("choices are measured on a GPU")
    return {str(case): partial(choose, case, setting.device) for case in cases_by_worth(torch.bfloat16)}


def choose(case: Case, device: torch.device) -> dict[str, Any]:
    """Choose for a case as its first call would, and return the row of the report."""
    problem = Problem.draw(case, device)
    given, shape = problem.operands, problem.shape()
    dispatch.choose(shape, given, problem.d if given.c is problem.d else None, len(problem.stored_besides))
    rows = {row["shape"]: row for row in dispatch.choices_of(device).rows()}
    return rows.get(str(dispatch.rounded(shape)), {"by": "torch's library: too small to be measured"})


def check_library(case: Case, device: torch.device) -> dict[str, Any]:
    """Check the library's result against float64 where there is no GPU to time anything on."""
    return {LIBRARY: check(run_library, Problem.draw(case, device), rounds_twice=True)}


def compare(case: Case, device: torch.device) -> dict[str, Any]:
    """Check every candidate of a case, then time those that are correct, in turns."""
    problem = Problem.draw(case, device)
    ranked = tiles.rank_configs(problem.shape(), devices.of(device))[: dispatch.NUM_CANDIDATES]
    runs: dict[str, Run] = {LIBRARY: run_library}
    runs |= {str(cost.config): run_config(cost.config) for cost in ranked}
    if (case.M, case.N, case.K) == CUBE and ranked:
        best = ranked[0].config
        runs[f"{best}, bands of {WIDE_BANDS}"] = partial(in_wide_bands, run_config(best))
    candidates = {name: check(run, problem, rounds_twice=name == LIBRARY) for name, run in runs.items()}
    problems = problem.rotation()
    seconds: dict[str, dict[str, list[float]]] = {
        name: {method: [] for method in METHODS} for name, found in candidates.items() if found["correct"]
    }
    for method in METHODS:
        for _ in range(ROUNDS):
            for name in seconds:
                seconds[name][method].append(seconds_per_call(runs[name], problems, method))
    for name, found in candidates.items():
        found["ratio"] = ratio(seconds, name)
        found["seconds"] = seconds.get(name)
    ratios = [found["ratio"] for name, found in candidates.items() if name != LIBRARY and found["ratio"]]
    return {"kind": case.kind, "best": max(ratios, default=None)} | candidates


def in_wide_bands(run: Run, problem: Problem) -> Tensor:
    """Launch a config whose tiles are computed in higher bands."""
    with patch.object(launch, "GROUP_M", WIDE_BANDS):
        return run(problem)


def ratio(seconds: dict[str, dict[str, list[float]]], name: str) -> float | None:
    """Return how many times as fast as the library a candidate is; None if one of them was not timed.

    The median of the rounds' ratios, since what runs in turn has the same clocks; the smaller one of methods.
    """
    if name not in seconds or LIBRARY not in seconds:
        return None
    return min(median(map(truediv, seconds[LIBRARY][way], seconds[name][way])) for way in METHODS)


def seconds_per_call(run: Run, problems: Sequence[Problem], method: str) -> float:
    """Time a candidate for about `ROUND_MS`, and return the median.

    `flushed`: each call after an emptied cache. `graph`: CUDA graphs whose calls go from buffer to buffer.
    """
    from triton.testing import do_bench, do_bench_cudagraph

    if method == "flushed":
        ms = do_bench(lambda: run(problems[0]), warmup=1, rep=ROUND_MS, return_mode="median")
    else:
        turn, rep = cycle(problems), ROUND_MS // GRAPH_REPLAYS
        ms = do_bench_cudagraph(lambda: run(next(turn)), rep=rep, return_mode="median")
    return cast("float", ms) * 1e-3


if __name__ == "__main__":
    main(__doc__, {"ceilings": one_case("8192^3 and 4 GiB", ceilings), "gemm": gemm, "choices": choices})
