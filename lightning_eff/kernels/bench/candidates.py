"""Our GEMM beside torch's library: who takes part, who is right, and how long each takes.

Two things of ours are measured apart. The rows of the table are launched directly: what the kernels can do.
`gemm` is called as a user calls it: what dispatch.py makes of that. On the CPU there is only the second, and
it must cost what the library costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.kernels import devices, dispatch, tiles
from lightning_eff.kernels.bench import rows, timing
from lightning_eff.kernels.bench.comparison import DISPATCH, LIBRARY, CandidateResult, CaseComparison
from lightning_eff.kernels.bench.gemm_cases import Case
from lightning_eff.kernels.bench.timing import Call, Problem, Timing
from lightning_eff.kernels.matmul import gemm, launch
from lightning_eff.kernels.tile_configs import TileConfig

TOP_ROWS = 3
"""Rows that are measured unless all are, those first that the cost model expects to be fastest."""
HOST_SIZE = 64
HOST_CALLS = 500
"""So few that a GPU's queue, about a thousand launches, never makes the host wait."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure.

    Args:
        rounds: Turns of each candidate.
        round_s: Seconds of one turn.
        every_row: All rows that fit, not only the most promising.
    """

    rounds: int = 5
    round_s: float = 0.02
    every_row: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a case.

    Args:
        name: That of the row, `library` or `gemm`.
        run: Computes, and returns the result.
        by_library: torch's library computes, and rounds as torch lets it.
    """

    name: str
    run: Callable[[Problem], Tensor]
    by_library: bool


def compare_case(case: Case, device: torch.device, effort: Effort) -> CaseComparison:
    """Check every candidate of a case, then time those that are correct."""
    problem = timing.problem(case, device)
    shape = problem.given.shape(adds=case.kind == "adds")
    chosen = dispatch.measured_config(shape, device) if device.type == "cuda" else None
    runs = candidates(problem, every_row=effort.every_row)
    checked = [check_candidate(each, problem) for each in runs]
    correct = [run for run, result in zip(runs, checked, strict=True) if result.is_correct]
    timings = _timings(correct, problem, effort)
    return CaseComparison(
        case=case,
        results=tuple(
            CandidateResult(
                name=each.name, error=each.error, timings=timings.get(each.name, {}), refusal=each.refusal
            )
            for each in checked
        ),
        bucket=dispatch.bucket(shape),
        chosen=str(chosen) if chosen is not None else dispatch.LIBRARY,
    )


def candidates(problem: Problem, *, every_row: bool) -> list[Candidate]:
    """Return who takes part: the library, `gemm`, and on a GPU rows of the table."""
    device = problem.d.device
    backend = "auto" if device.type == "cuda" else "torch"
    case = problem.case
    adds = case.kind == "adds"
    shape = problem.given.shape(adds=adds)
    chosen = dispatch.uses_triton(problem.given, backend, interpreted=False, adds=adds)
    runs = [
        Candidate(name=LIBRARY, run=_by_library, by_library=True),
        Candidate(name=DISPATCH, run=lambda each: _by_gemm(each, backend), by_library=not chosen),
    ]
    if device.type != "cuda" or rows.not_compiled():
        return runs
    ranked = [cost.tile for cost in tiles.rank_configs(shape, devices.of(device))]
    return runs + [row_candidate(tile) for tile in (ranked if every_row else ranked[:TOP_ROWS])]


def row_candidate(tile: TileConfig) -> Candidate:
    """Return a row of the table as a candidate."""

    def run(problem: Problem) -> Tensor:
        launch(problem.given, tile, problem.d)
        return problem.d

    return Candidate(name=str(tile), run=run, by_library=False)


def _by_gemm(problem: Problem, backend: str) -> Tensor:
    adds = problem.start is not None
    return gemm(
        problem.a,
        problem.b,
        problem.d if adds else None,
        beta=1.0 if adds else 0.0,
        bias=problem.bias,
        activation=problem.case.activation,
        out_dtype=problem.case.out_dtype,
        out=problem.d,
        backend=backend,
    )


def _by_library(problem: Problem) -> Tensor:
    """Compute as one writes it with torch's own functions, in the fewest calls."""
    a, b, d = problem.a, problem.b, problem.d
    if problem.bias is not None:
        return F.gelu(torch.addmm(problem.bias, a, b), approximate="tanh")
    if problem.start is None:
        return torch.mm(a, b, out=d)
    if a.dtype == d.dtype:
        return torch.addmm(d, a, b, out=d)
    return torch.addmm(d, a, b, out_dtype=d.dtype, out=d)  # on CUDA only


def check_candidate(candidate: Candidate, problem: Problem) -> CandidateResult:
    """Run a candidate into a result that is poisoned, and compare it with float64."""
    problem.poison()
    try:
        result = candidate.run(problem)
    except rows.refusals() as refused:
        return CandidateResult(name=candidate.name, error=float("inf"), refusal=rows.first_line(refused))
    error = timing.error(problem, result, rounds_between=candidate.by_library)
    return CandidateResult(name=candidate.name, error=error)


def _timings(runs: Sequence[Candidate], problem: Problem, effort: Effort) -> dict[str, dict[str, Timing]]:
    """Return timings by candidate and method; the candidates take turns."""
    device, found = problem.d.device, dict[str, dict[str, Timing]]()
    if device.type == "cuda":
        l2_bytes = devices.of(device).l2_bytes
        others = [problem.copy() for _ in range(timing.num_copies(problem.num_bytes, l2_bytes) - 1)]
        flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.int8, device=device)
        methods = {
            "flushed": {run.name: timing.flushed(_call(run, problem), effort.round_s) for run in runs},
            "graph": {
                run.name: timing.captured([_call(run, each) for each in (problem, *others)], flush)
                for run in runs
            },
        }
    else:
        methods = {"clock": {run.name: timing.by_clock(_call(run, problem), effort.round_s) for run in runs}}
    for method, measures in methods.items():
        for name, each in timing.interleaved(measures, effort.rounds).items():
            found.setdefault(name, {})[method] = each
    return found


def _call(run: Candidate, problem: Problem) -> Call:
    return lambda: run.run(problem)


def host_times(device: torch.device, effort: Effort) -> dict[str, Timing]:
    """Return the host's time for one call, by who is called; the product itself is tiny."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(HOST_SIZE, HOST_SIZE, device=device).to(dtype)
    calls: dict[str, Call] = {"torch.mm": lambda: torch.mm(a, a), DISPATCH: lambda: gemm(a, a)}
    finish = None
    if device.type == "cuda":
        finish = torch.cuda.synchronize
        calls[f"{DISPATCH}, backend=triton"] = lambda: gemm(a, a, backend="triton")
    measures = {
        name: timing.by_clock(call, effort.round_s, max_calls=HOST_CALLS, finish=finish)
        for name, call in calls.items()
    }
    return timing.interleaved(measures, effort.rounds)
