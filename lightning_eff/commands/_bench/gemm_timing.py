"""Measure our GEMM against torch's library: correct first, then timed in turns, then chosen for dispatch.

Candidates: torch's library; `gemm`, as a user calls it; and configs, each launched directly. What
is not correct (gemm_problem.py has the bound) is not timed.

Timed: normal data, because zeros draw less power and run faster; all candidates in turn, A B A B, because
clocks drift. Each is timed in two ways, and a claim must hold in both: single calls after an emptied L2
cache, and a CUDA graph of calls over buffers that the cache does not hold, which includes no host time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from operator import sub, truediv
from statistics import geometric_mean, median
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from lightning_eff.commands._bench.gemm_problem import Case, Problem
from lightning_eff.kernels import choices, devices, dispatch, tiles
from lightning_eff.kernels.gemm_kernels import INTERPRETED, triton
from lightning_eff.kernels.launch import CannotCompileError, launch
from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.tile_configs import TileConfig

LIBRARY, DISPATCH = "library", "gemm"
"""Names of the candidates that are no config of ours."""
METHODS = ("flushed", "graph")
ROUNDS = 5
GRAPH_REPLAYS = 10
"""Of `do_bench_cudagraph`, whose `rep` is the length of one of them."""
SLOW = 1.5
"""A config whose first round takes so many times as long as the library's gets no second one."""
MIN_GAIN = 0.02
"""Fraction of the library's time that a config has to save: rounds of one candidate differ by a percent."""
HOST_S = 5e-6
"""Seconds that a config has to save: Python takes longer to launch ours than torch to call its library."""
TOP_CONFIGS = 3
"""Configs that are measured unless all are: those that the cost model ranks first."""
Run = Callable[[Problem], Tensor]
"""Computes a problem, and returns the result; what is stored besides is in the problem then."""
CANNOT_LAUNCH: tuple[type[Exception], ...] = (
    CannotCompileError, *((triton.TritonError,) if triton is not None else ()),
)  # fmt: skip
"""What is raised where a kernel cannot be compiled, or exceeds a device's resources."""
aten: Any = torch.ops.aten


@dataclass(kw_only=True)
class Result:
    """The result of one candidate."""

    error: float  # the largest over what is allowed; infinite for NaN, or where it could not run
    refusal: str = ""  # why it could not run: the compiler's message
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Per call, of each round, by method; empty unless it is correct."""

    @property
    def is_correct(self) -> bool:
        """Whether each element is within the bound."""
        return self.error <= 1.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All candidates of a case."""

    case: Case
    results: dict[str, Result]  # by name: torch's library, `gemm`, and configs
    bucket: str  # the name under which dispatch keeps a choice for this case
    computed_by: str  # who computes it when `gemm` is called: a config, or `torch`

    def ratio(self, name: str) -> float | None:
        """Return how many times as fast as the library a candidate is; None where either was not timed.

        The median of the rounds' ratios, since what runs in turn has the same clocks; of two methods that
        with the smaller ratio.
        """
        if name not in self.results:
            return None
        library, own = self.results[LIBRARY].seconds, self.results[name].seconds
        ratios = [median(map(truediv, library[method], own[method])) for method in own if method in library]
        return min(ratios, default=None)

    def saved_s(self, name: str) -> float:
        """Return the seconds that a candidate saves per call, by the method in which it saves less.

        Minus infinity where either was not timed in both.
        """
        if name not in self.results:
            return -math.inf
        library, own = self.results[LIBRARY].seconds, self.results[name].seconds
        saved = [median(map(sub, library[method], own[method])) for method in library if method in own]
        return min(saved) if saved and len(saved) == len(library) else -math.inf

    @property
    def library_s(self) -> float:
        """Seconds per call of the library, by the method in which it takes longer."""
        return max(map(median, self.results[LIBRARY].seconds.values()), default=0.0)

    @property
    def least_saved_s(self) -> float:
        """Seconds that a config has to save per call to be chosen."""
        return max(HOST_S, MIN_GAIN * self.library_s)

    @property
    def configs(self) -> list[str]:
        """Names of the candidates that are configs."""
        return [name for name in self.results if name not in (LIBRARY, DISPATCH)]

    @property
    def best_config(self) -> str | None:
        """The config with the largest ratio; None where no correct one was measured."""
        timed = {name: ratio for name in self.configs if (ratio := self.ratio(name)) is not None}
        return max(timed, key=lambda name: timed[name], default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        candidates = [
            {"name": name, "correct": result.is_correct, "ratio": self.ratio(name)}
            | asdict(result)
            | {"error": result.error if math.isfinite(result.error) else None}  # JSON has no infinity
            for name, result in self.results.items()
        ]
        dtypes = {"dtype": self.case.dtype, "out_dtype": self.case.result_dtype}
        case = asdict(self.case) | {key: str(dtype).removeprefix("torch.") for key, dtype in dtypes.items()}
        return case | {"computed_by": self.computed_by, "candidates": candidates}


def why_no_kernels() -> str:
    """Return why our kernels cannot be timed in this process; empty where they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (torch.cuda.is_available() is False)"
    if triton is None:
        return "Triton is not installed: pip install triton"
    return "TRITON_INTERPRET is set, and the interpreter is no GPU: unset it" if INTERPRETED else ""


def compare(case: Case, device: torch.device, *, round_ms: int, every_config: bool = False) -> Comparison:
    """Check every candidate of a case, then time those that are correct, in turn.

    `round_ms` is the time of a candidate, a method and a round. Configs are those that fit and are ranked
    best, or all that fit.
    """
    problem = Problem.draw(case, device)
    shape = problem.shape()
    config = dispatch.choose(shape, device, "auto")
    runs: dict[str, Run] = {LIBRARY: run_library, DISPATCH: run_gemm}
    ranked = [cost.config for cost in tiles.rank_configs(shape, devices.of(device))]
    tried = ranked if every_config else ranked[:TOP_CONFIGS]
    tried = tried if device.type == "cuda" or INTERPRETED else []
    runs |= {str(config): run_config(config) for config in tried}
    by_library = (LIBRARY, DISPATCH) if config is None else (LIBRARY,)
    results = {name: check(run, problem, rounds_twice=name in by_library) for name, run in runs.items()}
    problems = problem.rotation()
    timed = [name for name, result in results.items() if result.is_correct]
    for method in METHODS:
        for _ in range(ROUNDS):
            for name in timed:
                seconds = seconds_per_call(runs[name], problems, method, round_ms)
                results[name].seconds.setdefault(method, []).append(seconds)
            timed = [name for name in timed if not _is_slow(name, results, method)]
    computed_by = choices.LIBRARY if config is None else str(config)
    return Comparison(case=case, results=results, bucket=choices.bucket(shape), computed_by=computed_by)


def _is_slow(name: str, results: dict[str, Result], method: str) -> bool:
    """Return whether a config was so slow in the first round that more rounds cannot change the choice."""
    if name in (LIBRARY, DISPATCH) or not results[LIBRARY].seconds:
        return False
    return results[name].seconds[method][0] > SLOW * results[LIBRARY].seconds[method][0]


def run_config(config: TileConfig) -> Run:
    """Return a candidate that launches a config directly."""
    return lambda problem: launch(problem.operands, config, problem.d, pre=problem.pre, d2=problem.d2)


def run_gemm(problem: Problem) -> Tensor:
    """Compute as a user does, with what dispatch chooses; for a product of an MLP, as a fused MLP does."""
    given, d = problem.operands, problem.d
    if problem.pre is not None:
        is_ours = dispatch.may_use_triton("auto", d.device, given.a.dtype)
        chosen = dispatch.find(given, "auto", writes=len(problem.stored_besides)) if is_ours else None
        return run_library(problem) if chosen is None else chosen(given, d, problem.pre, problem.d2)
    return gemm(
        given.a, given.b, given.c, beta=given.beta, bias=given.bias, activation=given.activation,
        out_dtype=given.out_dtype, out=d,
    )  # fmt: skip


def run_library(problem: Problem) -> Tensor:
    """Compute with torch's own functions, in the fewest calls."""
    if problem.pre is not None:
        return _mlp_by_library(problem, problem.pre)
    a, b, bias, d = problem.operands.a, problem.operands.b, problem.operands.bias, problem.d
    if problem.operands.activation is not None and bias is not None:
        return functional.gelu(torch.addmm(bias, a, b), approximate="tanh")
    addend, dtype = problem.operands.c if bias is None else bias, d.dtype
    if addend is None:
        return torch.mm(a, b, out=d) if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype, out=d)
    if a.dtype == dtype:
        return torch.addmm(addend, a, b, out=d)
    return torch.addmm(addend, a, b, out_dtype=dtype, out=d)  # on CUDA only, as `mm` with a dtype


def _mlp_by_library(problem: Problem, pre: Tensor) -> Tensor:
    """Compute a product of an MLP, and what is stored besides."""
    given, d2 = problem.operands, problem.d2
    gate, up = given.gate, given.up
    if not given.gradient:
        x = torch.mm(given.a, given.b, out=pre)
        return functional.gelu(x, approximate="tanh") if gate is None else functional.silu(gate).mul_(x)
    if up is None or d2 is None:
        aten.gelu(gate, approximate="tanh", out=pre)
        return aten.gelu_backward(torch.mm(given.a, given.b), gate, approximate="tanh")
    activated = functional.silu(cast("Tensor", gate))
    torch.mul(activated, up, out=pre)
    x = torch.mm(given.a, given.b, out=d2)
    d = aten.silu_backward(x * up, gate)
    x.mul_(activated)  # in d2
    return d


def check(run: Run, problem: Problem, *, rounds_twice: bool = False) -> Result:
    """Run a candidate into results filled with NaN, or with C if it adds, and compare them with float64."""
    problem.reset()
    try:
        result = run(problem)
    except CANNOT_LAUNCH as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return Result(error=math.inf, refusal=first_line)
    return Result(error=problem.error(result, rounds_twice=rounds_twice))


def seconds_per_call(run: Run, problems: Sequence[Problem], method: str, round_ms: int) -> float:
    """Time a candidate for about `round_ms`, and return the median.

    `flushed`: each call after an emptied cache. `graph`: CUDA graphs whose calls go from buffer to buffer.
    """
    from triton.testing import do_bench, do_bench_cudagraph

    if method == "flushed":
        ms = do_bench(lambda: run(problems[0]), warmup=1, rep=round_ms, return_mode="median")
    else:
        turn, rep = cycle(problems), max(1, round_ms // GRAPH_REPLAYS)
        ms = do_bench_cudagraph(lambda: run(next(turn)), rep=rep, return_mode="median")
    return cast("float", ms) * 1e-3


def fastest_by_bucket(comparisons: Iterable[Comparison]) -> dict[str, choices.Choice]:
    """Return what dispatch is to choose, by bucket.

    Dispatch cannot distinguish the cases of a bucket: a config is chosen only where it is correct and faster
    than the library in each of them, by `MIN_GAIN` and by `HOST_S`; of those the one with the largest mean
    ratio.
    """
    buckets: defaultdict[str, list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        buckets[comparison.bucket].append(comparison)
    fastest: dict[str, choices.Choice] = {}
    for bucket, members in buckets.items():
        gains: dict[str, float] = {}
        for name in members[0].configs:
            if all(member.saved_s(name) >= member.least_saved_s for member in members):
                gains[name] = geometric_mean([member.ratio(name) or 0.0 for member in members])
        name = max(gains, key=lambda name: gains[name], default=choices.LIBRARY)
        saved_s = min(member.saved_s(name) for member in members) if gains else 0.0
        fastest[bucket] = choices.Choice(name, saved_s)
    return fastest
