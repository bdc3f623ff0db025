"""Measure our GEMM against torch's library: the candidates, whether each is correct, and how long each takes.

Configs are launched directly: what the kernels can do. `gemm` is called as a user calls it: what dispatch.py
makes of them. On the CPU only `gemm` is measured, and it must cost what the library costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.kernels import devices, dispatch, tiles
from lightning_eff.kernels.bench import assembly, timing
from lightning_eff.kernels.bench.comparison import DISPATCH, LIBRARY, CandidateResult, CaseComparison
from lightning_eff.kernels.bench.gemm_cases import Case
from lightning_eff.kernels.bench.timing import Problem, TimedCall, Timing
from lightning_eff.kernels.launch import launch
from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.tile_configs import TileConfig

TOP_CONFIGS = 3
"""Configs that are measured unless all are: those that the cost model ranks first."""
HOST_SIZE = 64
HOST_CALLS = 500
"""Few enough that a GPU's queue, about a thousand launches, never blocks the host."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure.

    Args:
        rounds: Turns of each candidate.
        round_s: Seconds per turn.
        every_row: Measure all configs that fit, not only the best-ranked.
    """

    rounds: int = 5
    round_s: float = 0.02
    every_row: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a case.

    Args:
        name: A config's, `library` or `gemm`.
        run: Computes, and returns the result.
        by_library: torch's library computes, and rounds as torch allows it.
    """

    name: str
    run: Callable[[Problem], Tensor]
    by_library: bool


def compare_case(case: Case, device: torch.device, effort: Effort) -> CaseComparison:
    """Check every candidate of a case, then time those that are correct, in turn."""
    problem = timing.problem(case, device)
    shape = problem.operands.shape(adds=case.kind == "adds")
    chosen = dispatch.measured_config(shape, device)
    runs = candidates(problem, every_row=effort.every_row)
    checked = {candidate.name: check_candidate(candidate, problem) for candidate in runs}
    correct = [candidate for candidate in runs if checked[candidate.name].is_correct]
    if device.type == "cuda":
        # As many problems as exceed four times the L2 cache, so that no call finds its operands there.
        num_bytes = sum(t.numel() * t.element_size() for t in (problem.a, problem.b, problem.d))
        num_problems = min(timing.MAX_CALLS, 1 + 4 * devices.of(device).l2_bytes // num_bytes)
        problems = [problem, *(problem.copy() for _ in range(num_problems - 1))]
        flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.int8, device=device)
        methods = {
            "flushed": {c.name: timing.flushed(partial(c.run, problem), effort.round_s) for c in correct},
            "graph": {c.name: timing.captured([partial(c.run, p) for p in problems], flush) for c in correct},
        }
    else:
        clocks = {c.name: timing.by_clock(partial(c.run, problem), effort.round_s) for c in correct}
        methods = {"clock": clocks}
    for method, measures in methods.items():
        for name, timed in timing.interleaved(measures, effort.rounds).items():
            checked[name].timings[method] = timed
    results, bucket = tuple(checked.values()), dispatch.bucket(shape)
    computed_by = str(chosen) if chosen is not None else dispatch.LIBRARY
    return CaseComparison(case=case, results=results, bucket=bucket, chosen=computed_by)


def candidates(problem: Problem, *, every_row: bool) -> list[Candidate]:
    """Return torch's library, `gemm`, and on a GPU configs."""
    case, device, adds = problem.case, problem.d.device, problem.start is not None
    backend = "auto" if device.type == "cuda" else "torch"
    decision = dispatch.decide(problem.operands, backend, out=problem.d)

    def by_gemm(own: Problem) -> Tensor:
        return gemm(
            own.a, own.b, own.d if adds else None, beta=1.0 if adds else 0.0, bias=own.bias,
            activation=case.activation, out_dtype=case.out_dtype, out=own.d, backend=backend,
        )  # fmt: skip

    runs = [
        Candidate(name=LIBRARY, run=_by_library, by_library=True),
        Candidate(name=DISPATCH, run=by_gemm, by_library=decision is None),
    ]
    if device.type != "cuda" or assembly.why_not_compiled():
        return runs
    shape = problem.operands.shape(adds=case.kind == "adds")
    ranked = [cost.config for cost in tiles.rank_configs(shape, devices.of(device))]
    return runs + [config_candidate(config) for config in (ranked if every_row else ranked[:TOP_CONFIGS])]


def config_candidate(config: TileConfig) -> Candidate:
    """Return a config as a candidate."""
    return Candidate(name=str(config), run=lambda own: launch(own.operands, config, own.d), by_library=False)


def _by_library(problem: Problem) -> Tensor:
    """Compute with torch's own functions, in the fewest calls."""
    a, b, d = problem.a, problem.b, problem.d
    if problem.bias is not None:
        return F.gelu(torch.addmm(problem.bias, a, b), approximate="tanh")
    if problem.start is None:
        return torch.mm(a, b, out=d)
    if a.dtype == d.dtype:
        return torch.addmm(d, a, b, out=d)
    return torch.addmm(d, a, b, out_dtype=d.dtype, out=d)  # on CUDA only


def check_candidate(candidate: Candidate, problem: Problem) -> CandidateResult:
    """Run a candidate into a result filled with NaN, or with C if it adds, and compare it with float64."""
    problem.d.fill_(math.nan) if problem.start is None else problem.d.copy_(problem.start)
    try:
        result = candidate.run(problem)
    except assembly.COMPILER_ERRORS as error:
        refusal = assembly.first_line(error)
        return CandidateResult(name=candidate.name, error=float("inf"), refusal=refusal)
    error = timing.error(problem, result, rounds_between=candidate.by_library)
    return CandidateResult(name=candidate.name, error=error)


def host_times(device: torch.device, effort: Effort) -> dict[str, Timing]:
    """Return the host's time per call of torch.mm and of `gemm`; the product itself is tiny."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(HOST_SIZE, HOST_SIZE, device=device).to(dtype)
    calls: dict[str, TimedCall] = {"torch.mm": lambda: torch.mm(a, a), DISPATCH: lambda: gemm(a, a)}
    finish = None
    if device.type == "cuda":
        finish = torch.cuda.synchronize
        calls[f"{DISPATCH}, backend=triton"] = lambda: gemm(a, a, backend="triton")
    measures = {
        name: timing.by_clock(call, effort.round_s, max_calls=HOST_CALLS, finish=finish)
        for name, call in calls.items()
    }
    return timing.interleaved(measures, effort.rounds)
