"""Measure a GEMM: data, correctness first, then time.

Fair: normal data, because zeros draw less power and run faster; buffers that the cache does not hold; all
candidates in turn, A B A B, because clocks drift; the median of the rounds with its range. A GPU is timed in
two ways, and a claim must hold in both: single calls after a flushed cache, and a CUDA graph of many calls
over rotating buffers, which includes no host time.

Correct: each element is within a bound of float64, `|D - ref| <= (K + 2) u (|A| @ |B| + |C|) + eps |ref|`,
u = 2^-23. It allows any order of a float32 sum, and no lost term of it; eps is one rounding to the result's
dtype.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from lightning_eff.kernels import reference
from lightning_eff.kernels.bench.gemm_cases import Case
from lightning_eff.kernels.operands import Operands, check_operands

U32 = 2.0**-23
MAX_ROWS = 256
"""Rows that are compared: float64 is slow, and a fault in a tile affects each of its rows."""
ACTIVATION_SLOPE = 1.2
"""The largest slope of an activation, by which it enlarges an error."""
MIN_CALLS, MAX_CALLS = 20, 4096
"""Calls of one CUDA graph."""
FLUSH_BYTES = 2**28
TimedCall = Callable[[], object]
Measure = Callable[[], float]
"""Returns the seconds per call of one round."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call.

    Args:
        median_s: Of the rounds.
        low_s: Of the fastest round.
        high_s: Of the slowest round.
    """

    median_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The tensors of a case.

    Args:
        case: What is computed.
        a: `[M, K]`.
        b: `[K, N]`.
        bias: `[N]` where the case has one.
        start: C, to which the product is added, `[M, N]`; it is kept, and `d` begins as a copy of it.
        d: Receives the result.
    """

    case: Case
    a: Tensor
    b: Tensor
    bias: Tensor | None
    start: Tensor | None
    d: Tensor

    @cached_property
    def operands(self) -> Operands:
        """The operands that kernels are launched with."""
        adds = self.start is not None
        return check_operands(
            self.a, self.b, self.d if adds else None, beta=1.0 if adds else 0.0, bias=self.bias,
            out_dtype=self.case.out_dtype, activation=self.case.activation,
        )  # fmt: skip

    def copy(self) -> Problem:
        """Return the same numbers and strides at other addresses."""
        return replace(self, a=self.a.clone(), b=self.b.clone(), d=self.d.clone())


def problem(case: Case, device: torch.device, *, seed: int = 0) -> Problem:
    """Draw the operands of a case: N(0, 1), scaled by 1 / sqrt(K)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, dtype: torch.dtype = case.dtype) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return values.mul_(case.K**-0.5).to(dtype)

    a = normal(case.K, case.M).T if case.layout[0] == "t" else normal(case.M, case.K)
    b = normal(case.N, case.K).T if case.layout[1] == "t" else normal(case.K, case.N)
    bias = normal(1, case.N)[0] if case.kind == "fused" else None
    start = normal(case.M, case.N, case.out_dtype) if case.kind == "adds" else None
    d = torch.full((case.M, case.N), math.nan, dtype=case.out_dtype, device=device)
    return Problem(case=case, a=a, b=b, bias=bias, start=start, d=d)


def sampled_rows(num_rows: int, at_most: int = MAX_ROWS, *, seed: int = 0) -> Tensor:
    """Return the index of one random row per strip of rows, with the first and the last row, in order.

    Example:
        >>> sampled_rows(3).tolist(), len(sampled_rows(8192))
        ([0, 1, 2], 256)
    """
    count = min(num_rows, at_most)
    edges = torch.arange(count + 1) * num_rows // count
    offsets = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    rows = edges[:-1] + (offsets * edges.diff()).long()
    rows[0], rows[-1] = 0, num_rows - 1
    return rows


def error(problem: Problem, result: Tensor, *, rounds_between: bool = False) -> float:
    """Return the largest error over what is allowed; infinite where the result is not finite.

    Args:
        problem: What was computed.
        result: The result, `[M, N]`.
        rounds_between: The sum may be rounded once more to the result's dtype, as torch allows its library in
            split-K reductions, and as it does before an activation.
    """
    case = problem.case
    if not bool(result.isfinite().all()):
        return math.inf
    rows = sampled_rows(case.M).to(result.device)
    a, start = problem.a[rows], None if problem.start is None else problem.start[rows]
    expected = reference.gemm(a, problem.b, start, beta=1.0, bias=problem.bias, activation=case.activation)
    terms = [t.abs() if t is not None else None for t in (start, problem.bias)]
    size = reference.gemm(a.abs(), problem.b.abs(), terms[0], beta=1.0, bias=terms[1])
    eps = torch.finfo(case.out_dtype).eps
    slope = ACTIVATION_SLOPE if case.activation else 1.0
    allowed = slope * (case.K + 2) * U32 * size + eps * expected.abs()
    allowed += torch.finfo(case.out_dtype).smallest_normal * eps  # the spacing of subnormal numbers
    if case.activation:  # its own exponential and division
        allowed += 4 * U32 * expected.abs()
    if rounds_between:
        allowed += slope * eps * size
    return float(((result[rows].double() - expected).abs() / allowed).max())


def interleaved(measures: Mapping[str, Measure], rounds: int) -> dict[str, Timing]:
    """Measure all in turn, once per round."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            seconds[name].append(measure())
    return {
        name: Timing(median_s=statistics.median(times), low_s=min(times), high_s=max(times))
        for name, times in seconds.items()
    }


def by_clock(
    call: TimedCall, round_s: float, *, max_calls: int = 1000, finish: TimedCall | None = None
) -> Measure:
    """Time a loop of calls on the host.

    Args:
        call: To time; it is called twice beforehand.
        round_s: Seconds that a round should take.
        max_calls: Per round.
        finish: Called after each round, and not timed.
    """

    def measure(num_calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        seconds = (time.perf_counter() - begin) / num_calls
        if finish is not None:
            finish()
        return seconds

    measure(1)
    num_calls = max(1, min(max_calls, int(round_s / max(measure(1), 1e-9))))
    return lambda: measure(num_calls)


def flushed(call: TimedCall, round_s: float) -> Measure:
    """Time single calls on a GPU, each after a flushed cache; a round is their median."""
    from triton.testing import do_bench

    rep_ms = max(1, round(round_s * 1e3))
    return lambda: float(cast("float", do_bench(call, warmup=1, rep=rep_ms, return_mode="median"))) * 1e-3


def captured(calls: Sequence[TimedCall], flush: Tensor) -> Measure:
    """Time a CUDA graph of at least twenty calls, which cycles through `calls`.

    Args:
        calls: The same computation, each in buffers of its own.
        flush: Memory that is written before each round: this empties the cache, and the host launches the
            graph meanwhile, so that no launch is timed.
    """
    num_calls = max(MIN_CALLS, len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile and allocate before the capture
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_calls):
            calls[index % len(calls)]()
    graph.replay()

    def measure() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / num_calls

    return measure
