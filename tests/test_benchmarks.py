"""Every benchmark script runs; each result has a page and was measured with the tested versions."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import benchmarks

FOLDER = benchmarks.FOLDER

SMALLEST = {
    "bf16_rounding": ["--small", "--seeds", "1", "--folder", "{folder}"],
    "compile_cache": ["--starts", "2", "model.num_layers=2", "model.d_model=32"],
    "contrastive": ["--rounds", "1", "--batches", "40"],
    "data_preload": ["--repeats", "1", "--length", "16", "--epochs", "1"],
    "float8": ["--steps", "1", "model.num_layers=2", "model.d_model=32", "data.batch_size=1"],
    "host_time": ["--rounds", "1"],
    "exact_stack": ["--small", "--steps", "1"],
    "exact_resume": ["--rounds", "1", "--samples", "1000"],
    "live_bytes": ["--batch-sizes", "1", "--only", "full"],
    "optimizers": ["--repeats", "1", "--only", "sgd", "in_backward"],
    "memory_timeline": ["model.num_layers=1", "model.d_model=32"],
    "planner_ladder": ["--only", "plain"],
    "step_overhead": ["--steps", "100"],
    "tiled_conv": ["--rounds", "1", "--sides", "32", "8"],
    "tiled_loss": ["--rounds", "1", "--sizes", "8", "16", "64"],
    "tiled_mlp": ["--rounds", "1"],
}
"""Arguments with which each script measures as little as possible."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALLEST)
def test_a_script_prints_its_table_and_keeps_its_figures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, script = tmp_path / "rows.json", FOLDER / f"{name}.py"
    words = [word.replace("{folder}", str(tmp_path / "runs")) for word in SMALLEST[name]]
    monkeypatch.setattr(sys, "argv", [str(script), *words, "--json", str(path)])
    monkeypatch.syspath_prepend(FOLDER)
    ran = runpy.run_path(str(script), run_name="__main__")
    measured, published = json.loads(path.read_text()), benchmarks.kept()[name]
    assert measured.keys() == published.keys()
    assert measured["command"].endswith(f"python benchmarks/{name}.py {' '.join(words)} --json {path}")
    assert len(measured["rows"][0]) == len(published["rows"][0])
    assert capsys.readouterr().out == f"{ran['table'](measured)}\n"
    if name == "live_bytes" and torch.__version__ == published["versions"]["torch"]:
        assert all(row in published["rows"] for row in measured["rows"])


GPU_SCRIPTS = {
    "gemm": {"ceilings": 1, "gemm": 9},
    "kernels": {"correctness": 0},
    "layers": {"host": 1, "layers": 4, "dw": 2, "loss": 2},
    "models": {"attention": 12, "trainer": 1, "float8": 1, "offload": 1, "conv": 1, "lora": 1, "long": 1},
    "training": {"planner": 1, "speed": 3},
}
"""The parts of each script in benchmarks/gpu, with their number of cases on a CPU."""


def run_gpu_script(name: str, out: Path) -> dict[str, Any]:
    """Run a script in a new process; return the cases of its parts."""
    command = [sys.executable, str(FOLDER / "gpu" / f"{name}.py"), "--smoke", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return {part: json.loads((out / f"{part}.json").read_text())["cases"] for part in GPU_SCRIPTS[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name", GPU_SCRIPTS)
def test_a_script_for_a_gpu_runs_its_smallest_sizes_on_a_cpu(name: str, tmp_path: Path) -> None:
    found = run_gpu_script(name, tmp_path)
    assert {part: len(cases) for part, cases in found.items()} == GPU_SCRIPTS[name]
    if name == "training":
        assert found["planner"]["baseline"]["ratio"] == 1.0, "on a CPU exact to the byte"
    elif name == "layers":
        losses = [each["loss"] for case in found["loss"].values() for each in case.values()]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)


def test_every_measurement_has_a_script_and_a_place_on_a_page() -> None:
    names = {name for name in benchmarks.kept() if not name.startswith(benchmarks.COMPARE)}
    assert names == {*benchmarks.SCRIPTS} == {*SMALLEST}
    text = "\n".join(path.read_text() for path in benchmarks.PAGES.glob("*.md"))
    framed = re.findall(r"`make pages` from benchmarks/(\w+) -->", text)
    assert sorted(framed) == sorted({*names, "compare"})


@pytest.mark.parametrize("name", benchmarks.kept())
def test_what_is_kept_was_measured_with_tested_versions(name: str) -> None:
    content = benchmarks.kept()[name]
    known, old = benchmarks.stated(content), benchmarks.outdated(content)
    again = f"benchmarks/{name}.json: {', '.join(old)}; measure again: {known['command']}; then make pages"
    assert not old, again
    assert benchmarks.versions(content).keys() >= {"python", "torch"}
