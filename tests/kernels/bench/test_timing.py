"""How GEMMs are measured: data and layouts, what counts as correct, turns, means, and who is chosen."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from lightning_eff.kernels.bench import gemm_cases, timing
from lightning_eff.kernels.bench.candidates import Candidate, check_candidate, config_candidate
from lightning_eff.kernels.bench.comparison import CandidateResult, CaseComparison, fastest_by_bucket
from lightning_eff.kernels.bench.gemm_cases import Case
from lightning_eff.kernels.bench.timing import Timing
from lightning_eff.kernels.tile_configs import CONFIGS

CPU = torch.device("cpu")
FORMATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("layout", "a_strides", "b_strides"),
    [("nt", (7, 1), (1, 7)), ("nn", (7, 1), (5, 1)), ("tn", (1, 3), (5, 1))],
)
def test_a_layout_is_a_matter_of_strides(
    layout: str, a_strides: tuple[int, ...], b_strides: tuple[int, ...]
) -> None:
    problem = timing.problem(Case(M=3, N=5, K=7, layout=layout), CPU)
    for each in (problem, problem.copy()):
        assert (each.a.shape, each.b.shape) == ((3, 7), (7, 5))
        assert (each.a.stride(), each.b.stride()) == (a_strides, b_strides)
    assert problem.copy().a.data_ptr() != problem.a.data_ptr()


def test_data_are_normal_scaled_and_the_same_for_a_seed() -> None:
    case = Case(M=300, N=10, K=400, dtype=torch.float32)
    a = timing.problem(case, CPU).a
    assert abs(float(a.std()) * 400**0.5 - 1.0) < 0.02
    assert torch.equal(a, timing.problem(case, CPU).a)
    assert not torch.equal(a, timing.problem(case, CPU, seed=1).a)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "adds", "fused"])
def test_the_tolerance_lets_a_rounded_result_pass_and_sees_one_lost_term(
    dtype: torch.dtype, kind: Any
) -> None:
    case = Case(M=40, N=24, K=64, dtype=dtype, kind=kind)
    problem = timing.problem(case, CPU)

    def result(terms: int) -> torch.Tensor:
        product = problem.a[:, :terms].double() @ problem.b[:terms].double()
        product = product if problem.start is None else product + problem.start
        product = product if problem.bias is None else product + problem.bias
        product = torch.nn.functional.gelu(product, approximate="tanh") if kind == "fused" else product
        return product.to(case.out_dtype)

    assert timing.error(problem, result(64)) <= 1.0
    assert timing.error(problem, result(63)) > 1.0


def test_what_is_not_written_is_an_infinite_error() -> None:
    problem = timing.problem(Case(M=4, N=4, K=4, dtype=torch.float32), CPU)
    result = problem.a @ problem.b
    result[2, 3] = float("nan")
    assert timing.error(problem, result) == float("inf")


def test_a_second_rounding_is_allowed_only_to_the_library() -> None:
    problem = timing.problem(Case(M=64, N=64, K=512), CPU)
    half = problem.a[:, :256].double() @ problem.b[:256].double()
    rest = problem.a[:, 256:].double() @ problem.b[256:].double()
    result = (half.bfloat16().double() + rest.bfloat16().double()).bfloat16()
    assert timing.error(problem, result, rounds_between=True) <= 1.0 < timing.error(problem, result)


def test_sampled_rows_are_in_every_tile() -> None:
    rows = timing.sampled_rows(8192)
    assert (len(rows), int(rows[0]), int(rows[-1])) == (256, 0, 8191)
    assert torch.equal(rows // 32, torch.arange(256))
    assert not torch.equal(rows, timing.sampled_rows(8192, seed=1))


def test_a_candidate_that_writes_nothing_is_incorrect() -> None:
    problem = timing.problem(Case(M=4, N=4, K=4, dtype=torch.float32), CPU)
    torch.mm(problem.a, problem.b, out=problem.d)
    idle = Candidate(name="idle", run=lambda each: each.d, by_library=False)
    assert not check_candidate(idle, problem).is_correct


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_a_config_that_exceeds_a_device_is_incorrect_and_has_a_reason() -> None:
    from triton.runtime.errors import OutOfResources

    def run(_: Any) -> torch.Tensor:
        raise OutOfResources(262160, 232448, "shared memory")

    problem = timing.problem(Case(M=4, N=4, K=4, dtype=torch.float32), CPU)
    result = check_candidate(Candidate(name="large", run=run, by_library=False), problem)
    assert result.error == float("inf")
    assert "Required: 262160" in result.refusal


def test_candidates_take_turns() -> None:
    order: list[str] = []
    clock = iter([1.0, 10.0, 3.0, 30.0, 2.0, 20.0])

    def measure(name: str) -> float:
        order.append(name)
        return next(clock)

    found = timing.interleaved({name: lambda n=name: measure(n) for name in "AB"}, rounds=3)
    assert "".join(order) == "ABABAB"
    assert found["A"] == Timing(median_s=2.0, low_s=1.0, high_s=3.0)
    assert found["B"].median_s == 20.0


def test_the_clock_times_no_more_calls_than_it_may() -> None:
    calls: list[str] = []
    measure = timing.by_clock(
        lambda: calls.append("call"), 1.0, max_calls=7, finish=lambda: calls.append("finish")
    )
    calls.clear()
    assert measure() > 0.0
    assert calls == [*["call"] * 7, "finish"]


class Stand:
    """Stands for a stream, an event and a graph of CUDA's, and writes down what happens."""

    events: ClassVar[list[str]] = []

    def __init__(self, **_: bool) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self) -> None: ...
    def replay(self) -> None:
        self.events.append("replay")

    def elapsed_time(self, _: Any) -> float:
        return 42.0

    @staticmethod
    @contextlib.contextmanager
    def context(_: Any) -> Iterator[None]:
        Stand.events.append("(")
        yield
        Stand.events.append(")")


def test_a_graph_goes_over_all_buffers_and_has_at_least_twenty_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for CUDA: what is captured, and that the cache is emptied before each replay."""
    events: list[str] = []
    monkeypatch.setattr(Stand, "events", events)
    for name in ("Stream", "CUDAGraph", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stand)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", Stand.context)
    monkeypatch.setattr(torch.cuda, "graph", Stand.context)
    flush = torch.ones(3)
    measure = timing.captured([lambda n=name: events.append(n) for name in "abc"], flush)
    assert "".join(events) == "(a)" + "(" + ("abc" * 7)[:20] + ")" + "replay"
    assert measure() == pytest.approx(42e-3 / 20)
    assert events[-1] == "replay"
    assert not flush.any()


def test_the_list_is_thirty_layers_in_three_layouts_and_the_cube() -> None:
    cases = gemm_cases.default_cases(torch.bfloat16)
    plain = [case for case in cases if case.kind == "plain" and not case.is_cube]
    assert len(plain) == len(set(plain)) == 90
    assert {(str(case), case.layout) for case in cases if case.is_cube} == {
        ("8192x8192x8192", layout) for layout in gemm_cases.LAYOUTS
    }
    assert {case.kind for case in cases} == {"plain", "adds", "fused"}


def comparison(ratios: dict[str, float], bucket: str = "some", kind: Any = "plain") -> CaseComparison:
    """A comparison in which the library takes a second; a candidate with a ratio of 0 is incorrect."""
    results = [
        CandidateResult(name=name, error=0.5 if ratio else 9.0, timings=seconds(1.0 / ratio) if ratio else {})
        for name, ratio in {"library": 1.0, **ratios}.items()
    ]
    case = Case(M=1, N=1, K=1, kind=kind)
    return CaseComparison(case=case, results=tuple(results), bucket=bucket, chosen="torch")


def seconds(value: float) -> dict[str, Timing]:
    timed = Timing(median_s=value, low_s=value, high_s=value)
    return {"flushed": timed, "graph": timed}


def test_a_ratio_is_the_smaller_of_two_ways() -> None:
    both = CandidateResult(name="x", error=0.0, timings=seconds(0.5) | {"graph": seconds(0.8)["graph"]})
    assert comparison({"gemm": 1.0}).ratio(both) == 1.25


def test_a_config_is_chosen_only_where_it_keeps_up_everywhere() -> None:
    first, second, third = (str(tile) for tile in CONFIGS[:3])
    found = fastest_by_bucket([
        comparison({"gemm": 9.0, first: 1.5, second: 1.1, third: 3.0}),
        comparison({"gemm": 9.0, first: 0.9, second: 1.1, third: 0.0}),
        comparison({first: 0.9}, "slow"),
        comparison({first: 5.0}, "slow-fused", "fused"),
        comparison({}, "no configs"),
    ])  # fmt: skip
    assert found == {"some": second, "slow": "torch", "slow-fused": first, "no configs": "torch"}


INTERPRETED = """
import torch
from lightning_eff.kernels.bench import timing
from lightning_eff.kernels.bench.candidates import check_candidate, config_candidate
from lightning_eff.kernels.bench.gemm_cases import LAYOUTS, Case
from lightning_eff.kernels.tile_configs import CONFIGS

for tile in (CONFIGS[1], CONFIGS[8], CONFIGS[10]):
    for kind in ("adds",) if tile.adds else ("plain", "adds", "fused"):
        for layout in LAYOUTS:
            case = Case(M=72, N=136, K=40, layout=layout, kind=kind)
            result = check_candidate(config_candidate(tile), timing.problem(case, torch.device("cpu")))
            assert result.is_correct, (case, result)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_configs_are_launched_for_each_kind_and_layout() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_candidate_has_the_name_of_its_config() -> None:
    assert [config_candidate(tile).name for tile in CONFIGS] == [str(tile) for tile in CONFIGS]
