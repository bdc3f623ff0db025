"""Every benchmark script runs; exact figures that are published are what their command gives."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"

SMALLEST = {
    "bf16_rounding": ["--small", "--seeds", "1", "--folder", "{folder}"],
    "compile_cache": ["--starts", "2", "model.num_layers=2", "model.d_model=32"],
    "data_preload": ["--repeats", "1", "--length", "16"],
    "float8": ["--steps", "1", "model.num_layers=2", "model.d_model=32", "data.batch_size=1"],
    "host_time": ["--rounds", "1"],
    "exact_stack": ["--small", "--steps", "1"],
    "exact_resume": ["--rounds", "1", "--samples", "1000"],
    "live_bytes": ["--batch-sizes", "1", "--only", "full"],
    "optimizers": ["--repeats", "1", "--only", "sgd", "in_backward"],
    "planner_ladder": ["--only", "plain"],
    "step_overhead": ["--steps", "1100"],
    "tiled_conv": ["--rounds", "1", "--sides", "32", "8"],
    "tiled_loss": ["--rounds", "1", "--sizes", "8", "16", "64"],
    "tiled_mlp": ["--rounds", "1"],
}
"""The arguments with which each script measures least."""


def test_every_script_has_its_smallest_size() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SMALLEST)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "live_bytes" else [pytest.mark.slow]) for name in SMALLEST],
)
def test_a_script_prints_its_table_and_writes_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    words = [word.replace("{folder}", str(tmp_path / "runs")) for word in SMALLEST[name]]
    monkeypatch.setattr(sys, "argv", [name, *words, "--json", str(path)])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    measured = json.loads(path.read_text())
    published = json.loads((FOLDER / f"{name}.json").read_text())
    assert measured.keys() == published.keys()
    first, of_published = measured["rows"][0], published["rows"][0]
    assert len(first) == len(of_published)
    if isinstance(first, dict):
        assert first.keys() == of_published.keys()
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) > len(measured["rows"])
    if name == "live_bytes":
        check_live_bytes(measured, published)


def check_live_bytes(measured: dict[str, Any], published: dict[str, Any]) -> None:
    if torch.__version__ != published["versions"]["torch"]:
        pytest.skip("another torch may keep other tensors")
    table = (FOLDER / "live_bytes.md").read_text()
    for row in measured["rows"]:
        assert row in published["rows"]
        phases = row["phases"]
        assert (
            f"| 1 | {row['policy']} | {phases['forward'] / 1e6:.1f} | {phases['backward'] / 1e6:.1f} |"
            in table
        )
