"""Sweeps by Hydra's plugins for joblib and Optuna, which `make test-full` installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_line import TINY
from tests.support.own_recipe import PICKY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
joblib, optuna = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], ["hydra/sweeper=optuna"]


def sweep(folder: Path, *words: str, expected: int) -> tuple[str, str]:
    """Run `train baseline -m` in `folder`; return its standard output and error."""
    (folder / "mine.py").write_text(PICKY)
    program = [sys.executable, "-m", "lightning_eff", "train", "baseline", "-m", *TINY]
    program += ["model._target_=mine.Picky", "optimized_metric=val_loss", *words]
    keywords: Any = {"cwd": folder, "capture_output": True, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=env, check=False, **keywords)
    assert done.returncode == expected, done.stderr[-3000:]
    return done.stdout, done.stderr


def values_of(folder: Path) -> list[float | None]:
    """Return the metric that the report of each run has, None for a run without one."""
    (runs,) = folder.glob("outputs/baseline/sweep_*")
    numbers = sorted(int(path.name) for path in runs.iterdir() if path.name.isdecimal())
    reports = [json.loads((runs / str(number) / "efficiency.json").read_text()) for number in numbers]
    return [report["metrics"].get("val_loss") for report in reports]


def test_parallel_runs_are_rows_and_a_failed_run_stops_no_other(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    out, err = sweep(tmp_path, *joblib, "model.dropout=0.0,0.5,0.1", "--json", expected=1)
    rows = json.loads(out)["rows"]
    assert [(row["settings"]["model.dropout"], row["status"]) for row in rows] == [
        ("0.0", "finished"),
        ("0.5", "failed"),
        ("0.1", "finished"),
    ]
    assert rows[1]["reason"] == "RuntimeError: no dropout, please"
    assert [row["metrics"].get("val_loss") for row in rows] == values_of(tmp_path)
    assert "error: RuntimeError: no dropout, please (traceback: " in err


def test_optuna_optimizes_the_last_value(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["optimizer.lr=tag(log,interval(0.001,0.1))", "hydra.sweeper.n_trials=3", "model.dropout=0.0"]
    out, _ = sweep(tmp_path, *optuna, *words, "hydra.sweeper.sampler.seed=1", expected=0)
    (file,) = tmp_path.rglob("optimization_results.yaml")
    values = values_of(tmp_path)
    assert yaml.safe_load(file.read_text())["best_value"] == min(values)
    assert all(f" {value:.4f} " in line for line, value in zip(out.splitlines()[1:4], values, strict=True))
