"""How GEMMs are measured: data and layouts, what counts as correct, turns, ratios, and who is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.commands._bench import gemm_problem
from lightning_eff.commands._bench import gemm_timing as bench
from lightning_eff.commands._bench.gemm_problem import Case, Problem
from lightning_eff.commands._bench.gemm_timing import Comparison, Result
from lightning_eff.kernels.tile_configs import CONFIGS

CPU = torch.device("cpu")
SMALL = Case(M=4, N=4, K=4, dtype=torch.float32)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


@pytest.mark.parametrize(
    ("layout", "kind", "a_strides", "b_strides"),
    [("nt", "fused", (7, 1), (1, 7)), ("nn", "plain", (7, 1), (5, 1)), ("tn", "adds", (1, 3), (5, 1))],
)
def test_copies_of_a_problem_have_its_numbers_and_strides(
    monkeypatch: pytest.MonkeyPatch, layout: str, kind: Any, a_strides: Any, b_strides: Any
) -> None:
    monkeypatch.setattr(gemm_problem, "MAX_COPIES", 2)
    case = Case(M=3, N=5, K=7, layout=layout, kind=kind)
    problems = Problem.draw(case, CPU).rotation()
    for each in problems:
        given = each.operands
        assert (given.a.shape, given.b.shape) == ((3, 7), (7, 5))
        assert (given.a.stride(), given.b.stride()) == (a_strides, b_strides)
        assert torch.equal(given.a, Problem.draw(case, CPU).operands.a), "the same for a seed"
        assert given.c is (each.d if kind == "adds" else None)
    assert len({each.operands.a.data_ptr() for each in problems}) == 3
    assert len({each.d.data_ptr() for each in problems}) == 3
    assert not torch.equal(problems[0].operands.a, Problem.draw(case, CPU, seed=1).operands.a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "adds", "fused"])
def test_the_tolerance_lets_a_rounded_result_pass_and_sees_one_lost_term(
    dtype: torch.dtype, kind: Any
) -> None:
    problem = Problem.draw(Case(M=40, N=24, K=64, dtype=dtype, kind=kind), CPU)
    given = problem.operands

    def result(terms: int) -> Tensor:
        product = given.a[:, :terms].double() @ given.b[:terms].double()
        product = product if problem.start is None else product + problem.start
        product = product if given.bias is None else product + given.bias
        product = torch.nn.functional.gelu(product, approximate="tanh") if kind == "fused" else product
        return product.to(given.out_dtype)

    assert problem.error(result(64)) <= 1.0
    assert problem.error(result(63)) > 1.0


def test_a_second_rounding_is_allowed_only_to_the_library() -> None:
    problem = Problem.draw(Case(M=64, N=64, K=512), CPU)
    a, b = problem.operands.a.double(), problem.operands.b.double()
    halves = [(a[:, part] @ b[part]).bfloat16().double() for part in (slice(256), slice(256, None))]
    result = (halves[0] + halves[1]).bfloat16()
    assert problem.error(result, rounds_twice=True) <= 1.0 < problem.error(result)


@pytest.mark.parametrize("row", [0, 31, 500, 999])
def test_a_wrong_tile_is_seen_in_a_large_result(row: int) -> None:
    problem = Problem.draw(Case(M=1000, N=8, K=8, dtype=torch.float32), CPU)
    result = problem.operands.a @ problem.operands.b
    result[row // 16 * 16 : row // 16 * 16 + 16] += 1.0
    assert problem.error(result) > 1.0


@on_linux
def test_a_candidate_that_writes_nothing_or_is_refused_is_incorrect() -> None:
    from triton.runtime.errors import OutOfResources

    problem = Problem.draw(SMALL, CPU)
    torch.mm(problem.operands.a, problem.operands.b, out=problem.d)
    assert bench.check(lambda each: each.d, problem).error == float("inf")

    def refused(_: Problem) -> Tensor:
        raise OutOfResources(262160, 232448, "shared memory")

    result = bench.check(refused, problem)
    assert not result.is_correct
    assert "Required: 262160" in result.refusal


def test_candidates_take_turns_and_what_is_incorrect_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    clock = iter(range(1, 1000))

    def measured(run: Callable[..., Any], problems: Any, method: str, round_ms: int) -> float:
        turns.append(f"{run.__name__} {method}")
        return float(next(clock))

    monkeypatch.setattr(bench, "seconds_per_call", measured)
    monkeypatch.setattr(bench, "METHODS", {"cpu": ("flushed", "graph")})
    found = bench.compare(SMALL, CPU, round_ms=1)
    assert turns == [
        *["run_library flushed", "run_gemm flushed"] * bench.ROUNDS,
        *["run_library graph", "run_gemm graph"] * bench.ROUNDS,
    ]
    assert found.results["gemm"].seconds["flushed"] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert found.ratio("gemm") == 5 / 6, "the median of 1/2, 3/4, 5/6, 7/8, 9/10"
    assert found.computed_by == "torch"
    turns.clear()
    monkeypatch.setattr(bench, "run_gemm", lambda problem: problem.d)
    assert not bench.compare(SMALL, CPU, round_ms=1).results["gemm"].seconds
    assert set(turns) == {"run_library flushed", "run_library graph"}


@on_linux
def test_a_gpu_is_timed_by_triton_with_an_empty_cache_and_from_buffer_to_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def stand_in(call: Callable[[], Any], **keywords: Any) -> float:
        calls.append(([call() for _ in range(4)], keywords))
        return 42.0

    monkeypatch.setattr("triton.testing.do_bench", stand_in)
    monkeypatch.setattr("triton.testing.do_bench_cudagraph", stand_in)
    problems: Any = ["first", "second", "third"]
    identity: Any = str
    for method in ("flushed", "graph"):
        assert bench.seconds_per_call(identity, problems, method, 20) == pytest.approx(42e-3)
    assert calls == [
        (["first"] * 4, {"warmup": 1, "rep": 20, "return_mode": "median"}),
        (["first", "second", "third", "first"], {"rep": 2, "return_mode": "median"}),
    ]


def comparison(ratios: dict[str, float], bucket: str = "some") -> Comparison:
    """A comparison in which the library takes a second; a candidate with a ratio of 0 is incorrect."""
    results = {
        name: Result(error=0.5, seconds={"graph": [1.0 / ratio]}) if ratio else Result(error=9.0)
        for name, ratio in {"library": 1.0, **ratios}.items()
    }
    return Comparison(case=Case(M=1, N=1, K=1), results=results, bucket=bucket, computed_by="torch")


def test_a_config_is_chosen_only_where_it_keeps_up_everywhere() -> None:
    both = comparison({"gemm": 2.0})
    both.results["library"].seconds["flushed"], both.results["gemm"].seconds["flushed"] = [1.0], [0.8]
    assert both.ratio("gemm") == 1.25, "the smaller of two ways"
    first, second, third = (str(tile) for tile in CONFIGS[:3])
    compared = [
        comparison({"gemm": 9.0, first: 1.5, second: 1.1, third: 3.0}),
        comparison({"gemm": 9.0, first: 0.9, second: 1.1, third: 0.0}),
        comparison({first: 0.9}, "slow"),
        comparison({first: 5.0, second: 6.0}, "fast"),
        comparison({}, "no configs"),
    ]
    assert bench.fastest_by_bucket(compared) == {
        "some": second, "slow": "torch", "fast": second, "no configs": "torch"
    }  # fmt: skip
    assert [each.best_config for each in compared] == [third, second, first, second, None]
