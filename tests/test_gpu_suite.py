"""benchmarks/gpu: the error bound of a correct product, and results that survive a failing case."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.gemm_problem import Case, Problem, error_of
from tests.support.techniques import ROOT

CPU = torch.device("cpu")
GPU_SCRIPTS = ROOT / "benchmarks" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(GPU_SCRIPTS)
    return importlib.import_module


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "plain"), (torch.bfloat16, "adds"), (torch.bfloat16, "fused")]
)
def test_the_bound_accepts_a_rounded_result_and_rejects_one_lost_term(dtype: torch.dtype, kind: Any) -> None:
    problem = Problem.draw(Case(M=40, N=24, K=64, dtype=dtype, kind=kind), CPU)
    given = problem.operands

    def result(terms: int) -> Tensor:
        product = given.a[:, :terms].double() @ given.b[:terms].double()
        product = product if problem.start is None else product + problem.start
        product = product if given.bias is None else product + given.bias
        product = functional.gelu(product, approximate="tanh") if kind == "fused" else product
        return product.to(given.out_dtype)

    assert problem.error(result(64)) <= 1.0
    assert problem.error(result(63)) > 1.0
    assert error_of(lambda each: each.d, problem) > 1.0, "a candidate that writes nothing"


def raises(error: BaseException) -> dict[str, Any]:
    raise error


def test_a_failing_case_loses_only_its_result_and_the_suite_resumes_after_one_that_ends_the_process(
    script: Any, tmp_path: Path
) -> None:
    suite, path, end = script("_suite"), tmp_path / "some.json", time.monotonic() + 1e6
    setting, ran = suite.Setting(device=CPU, smoke=True), list[str]()
    cases: dict[str, Any] = {
        "first": lambda: ran.append("first") or {"value": 1},
        "broken": partial(raises, ValueError("no")),
        "large": partial(raises, torch.OutOfMemoryError("tried to allocate")),
        "not here": partial(raises, suite.SkippedError("no card")),
        "ends": partial(raises, SystemExit(1)),
        "last": lambda: {"entry": {"wrong": "9 times"}},
    }
    run = partial(suite.run_part, lambda _: cases, setting, path, end=end)
    with pytest.raises(SystemExit):
        run(resume=False)
    content = run(resume=True)
    assert json.loads(path.read_text()) == content
    assert ran == ["first"]
    assert list(content["cases"]) == list(cases)
    assert content["cases"]["not here"] == {"skipped": "no card"}
    assert suite.faults_of(content) == [
        "broken: ValueError: no",
        "large: out of memory: OutOfMemoryError: tried to allocate",
        "ends: the process ended in this case",
        "last, entry: 9 times",
    ]
    assert len(content["calls"]) == 2
    late = suite.run_part(lambda _: cases, setting, tmp_path / "late.json", end=0.0, resume=False)
    assert (late["cases"], late["calls"][0]["not run"]) == ({}, list(cases))


@pytest.mark.slow
def test_day_sh_runs_the_requested_parts_and_writes_the_summary(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "SMOKE": "1"}
    for _ in range(2):
        command = ["bash", str(GPU_SCRIPTS / "day.sh"), "400", "ceilings", "gemm"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ceilings.json", "gemm.json", "log.txt", "summary.md"}
    assert len(json.loads((tmp_path / "gemm.json").read_text())["calls"]) == 2
    assert "| what | goal | measured | verdict |" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_kernels_are_compiled_ahead_for_a_gpu_that_is_not_present(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(GPU_SCRIPTS / "compile.py"), "--target", "sm_90", "--smoke"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    number, _, rest = done.stdout.splitlines()[-1].partition(" ")
    assert rest == "kernels for sm_90, 0 with a fault"
    assert len(list(tmp_path.glob("*/*.cubin"))) > int(number), "split K has a second kernel"
