"""How GEMMs are measured: data and layouts, what counts as correct, turns, ratios, and who is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.commands._bench import gemm_problem
from lightning_eff.commands._bench import gemm_timing as bench
from lightning_eff.commands._bench.gemm_problem import GRADIENTS, Case, Problem
from lightning_eff.commands._bench.gemm_timing import Comparison, Result
from lightning_eff.kernels import choices, dispatch
from lightning_eff.kernels.launch import CannotCompileError
from lightning_eff.kernels.tile_configs import CONFIGS

CPU = torch.device("cpu")
MLP_KINDS: list[Any] = [*GRADIENTS, *GRADIENTS.values()]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MLP_KINDS)
def test_everything_that_an_mlp_stores_is_compared(dtype: torch.dtype, kind: Any) -> None:
    problem = Problem.draw(Case(M=40, N=24, K=64, dtype=dtype, kind=kind), CPU)
    given = problem.operands
    stored = {"gated": 2, "activated": 2, "gated gradient": 3, "activated gradient": 2}
    assert 1 + len(problem.stored_besides) == stored[kind]

    def write(terms: int) -> Tensor:
        """Compute by autograd in float64; one rounding each."""
        x = given.a[:, :terms].double() @ given.b[:terms].double()
        activate = torch.nn.functional.silu if given.activation == "silu" else gelu
        if not given.gradient:
            values = [activate(x) if given.gate is None else activate(given.gate.double()) * x, x]
        else:
            inputs = [t.double().requires_grad_() for t in (given.gate, given.up) if t is not None]
            result = activate(inputs[0]) * (inputs[1] if len(inputs) == 2 else 1.0)
            d, *d2 = torch.autograd.grad(result, inputs, x)
            values = [d, result.detach(), *d2]
        for target, value in zip((problem.d, *problem.stored_besides), values, strict=True):
            target.copy_(value)
        return problem.d

    assert bench.check(lambda _: write(64), problem).is_correct
    for target in (problem.d, *problem.stored_besides):
        write(64)
        target[17, 5] *= 1.1
        assert problem.error(problem.d) > 1.0
    write(64)
    problem.stored_besides[-1][0, 0] = float("nan")
    assert problem.error(problem.d) == float("inf")
    assert problem.error(write(63)) > 1.0


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MLP_KINDS)
def test_torch_computes_an_mlps_product_and_its_copies(
    dtype: torch.dtype, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_problem, "MAX_COPIES", 1)
    case = Case(M=40, N=24, K=64, dtype=dtype, kind=kind)
    problems = Problem.draw(case, CPU).rotation()
    for problem in problems:
        for run in (bench.run_library, bench.run_gemm):
            assert bench.check(run, problem, rounds_twice=True).is_correct
    pairs = zip(*(tensors_of(problem) for problem in problems), strict=True)
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairs)
    assert Problem.empty(case, CPU).shape() == problems[1].shape()


def tensors_of(problem: Problem) -> list[Tensor]:
    given = problem.operands
    tensors = (given.a, given.b, given.gate, given.up, problem.d, problem.pre, problem.d2)
    return [tensor for tensor in tensors if tensor is not None]


@pytest.mark.parametrize(
    ("kind", "marks"),
    [
        ("gated", "nt-fused-reads1-writes1"), ("activated", "nt-fused-writes1"),
        ("gated gradient", "nn-fused-reads2-writes2"), ("activated gradient", "nn-fused-reads1-writes1"),
    ],
)  # fmt: skip
def test_an_mlps_product_is_launched_where_a_config_was_chosen(
    kind: Any, marks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.draw(Case(M=40, N=24, K=64, kind=kind, layout=marks[:2]), CPU)
    shape = problem.shape()
    assert choices.bucket(shape) == f"bfloat16-bfloat16-40x24x64-{marks}"
    asked: list[Any] = []
    launched: list[Any] = []

    def find(operands: Any, backend: str, *, writes: int) -> Any:
        asked.append((operands.shape(writes=writes), backend))
        return lambda *tensors: launched.append(tensors) or tensors[1]

    monkeypatch.setattr(dispatch, "may_use_triton", lambda *_: True)
    monkeypatch.setattr(dispatch, "find", find)
    assert bench.run_gemm(problem) is problem.d
    assert asked == [(shape, "auto")]
    assert launched == [(problem.operands, problem.d, problem.pre, problem.d2)]


def test_a_second_rounding_is_allowed_only_to_the_library() -> None:
    problem = Problem.draw(Case(M=64, N=64, K=512), CPU)
    a, b = problem.operands.a.double(), problem.operands.b.double()
    halves = [(a[:, part] @ b[part]).bfloat16().double() for part in (slice(256), slice(256, None))]
    result = (halves[0] + halves[1]).bfloat16()
    assert problem.error(result, rounds_twice=True) <= 1.0 < problem.error(result)


def test_a_wrong_tile_is_seen_in_a_large_result() -> None:
    problem = Problem.draw(Case(M=1000, N=8, K=8, dtype=torch.float32), CPU)
    for row in (0, 31, 500, 999):
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

    def not_compiled(_: Problem) -> Tensor:
        raise CannotCompileError("tma 128x256 cannot be compiled: OutOfResources")

    assert "tma 128x256" in bench.check(not_compiled, problem).refusal


def test_candidates_take_turns_and_what_is_incorrect_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    clock = iter(range(1, 1000))

    def measured(run: Callable[..., Any], problems: Any, method: str, round_ms: int) -> float:
        turns.append(f"{run.__name__} {method}")
        return float(next(clock))

    monkeypatch.setattr(bench, "seconds_per_call", measured)
    monkeypatch.setattr(bench.tiles, "rank_configs", lambda *_: [])
    monkeypatch.setattr(gemm_problem, "MAX_COPIES", 1)
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
        "some": (second, 1.0 - 1.0 / 1.1), "slow": ("torch", 0.0), "fast": (second, 1.0 - 1.0 / 6.0),
        "no configs": ("torch", 0.0),
    }  # fmt: skip
    assert [each.best_config for each in compared] == [third, second, first, second, None]


@pytest.mark.parametrize(
    ("library_us", "ours_us", "is_chosen"),
    [
        (1000.0, 979.0, True),
        (1000.0, 981.0, False),  # less than 2 %
        (100.0, 94.9, True),
        (100.0, 95.1, False),  # less than 5 us, which Python takes
        (4.0, 1.0, False),
    ],
)
def test_a_config_has_to_save_two_percent_and_what_python_takes(
    library_us: float, ours_us: float, *, is_chosen: bool
) -> None:
    def seconds(microseconds: float, other: float) -> dict[str, list[float]]:
        return {"flushed": [1e-6 * microseconds] * 5, "graph": [1e-6 * other] * 5}

    name = str(CONFIGS[0])
    results = {
        "library": Result(error=0.5, seconds=seconds(library_us, library_us)),
        name: Result(error=0.5, seconds=seconds(ours_us, 1.0)),
    }
    both = Comparison(case=SMALL, results=results, bucket="b", computed_by="torch")
    assert bench.fastest_by_bucket([both])["b"].config == (name if is_chosen else "torch")
    swapped = seconds(1.0, ours_us)
    results[name].seconds = swapped
    chosen = bench.fastest_by_bucket([both])["b"]
    assert chosen.config == (name if is_chosen else "torch"), "in both ways"
    assert chosen.saved_s == pytest.approx(1e-6 * (library_us - ours_us) if is_chosen else 0.0)
    del swapped["graph"]
    assert bench.fastest_by_bucket([both]) == {"b": ("torch", 0.0)}, "not timed to the end"


def test_a_config_that_begins_slow_is_not_timed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    speed = {"run_library": 1.0, "run_gemm": 9.0, "slow": 1.6, "fair": 1.4}

    def measured(run: Callable[..., Any], problems: Any, method: str, round_ms: int) -> float:
        turns.append(run.__name__)
        return speed[run.__name__]

    def run_config(config: Any) -> Any:
        def run(problem: Problem) -> Tensor:
            return bench.run_library(problem)

        run.__name__ = config
        return run

    monkeypatch.setattr(bench, "seconds_per_call", measured)
    monkeypatch.setattr(bench, "run_config", run_config)
    monkeypatch.setattr(bench, "INTERPRETED", True)
    ranked = [SimpleNamespace(config="slow"), SimpleNamespace(config="fair")]
    monkeypatch.setattr(bench.tiles, "rank_configs", lambda *_: ranked)
    found = bench.compare(SMALL, CPU, round_ms=1)
    assert turns[:4] == ["run_library", "run_gemm", "slow", "fair"]
    assert (turns.count("slow"), turns.count("fair"), turns.count("run_gemm")) == (1, 10, 10)
    assert found.ratio("slow") == 1 / 1.6
    assert found.best_config == "fair"


@pytest.mark.parametrize(
    ("kind", "dtype", "out_dtype", "result", "addend", "adds"),
    [
        ("plain", torch.bfloat16, None, torch.bfloat16, None, False),
        ("plain", torch.bfloat16, torch.float32, torch.float32, None, False),
        ("adds", torch.bfloat16, None, torch.float32, torch.float32, True),
        ("adds", torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
        ("c", torch.bfloat16, None, torch.bfloat16, torch.bfloat16, False),
        ("c32", torch.bfloat16, None, torch.bfloat16, torch.float32, False),
    ],
)
def test_a_case_says_what_is_added_and_where_to(
    kind: Any, dtype: Any, out_dtype: Any, result: Any, addend: Any, adds: Any
) -> None:
    case = Case(M=16, N=24, K=32, kind=kind, dtype=dtype, out_dtype=out_dtype)
    problem = Problem.draw(case, CPU)
    c = problem.operands.c
    assert problem.d.dtype == problem.operands.out_dtype == result
    assert (c.dtype if c is not None else None) == addend
    assert (c is problem.d) == (kind == "adds")
    assert problem.shape().adds == adds
    assert Problem.empty(case, CPU).shape() == problem.shape()

    def exact(each: Problem) -> Tensor:
        total = each.operands.a.double() @ each.operands.b.double()
        return each.d.copy_(total if each.operands.c is None else total + each.operands.c.double())

    assert bench.check(exact, problem).is_correct
    assert bench.check(exact, problem.rotation()[-1]).is_correct
