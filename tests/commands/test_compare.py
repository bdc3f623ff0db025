"""`compare`: which rows a recipe gets, what they measure, and why others do not run."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import MEASURED, TrialResult
from lightning_eff.core.errors import EXIT_FAILED, EXIT_OK, exit_code, root_cause_line
from tests.support.command_line import Command

QUICK = ("--steps", "6", "--rounds", "1")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Train in this process, which has imported everything already; return the commands."""
    commands: list[list[str]] = []

    def run(train: functools.partial[int], *, folder: Path, limit_s: float) -> TrialResult:
        commands.append(train.args[0])
        folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a technique has no effect is no error, as in a process
            try:
                code = train(folder)
            except Exception as error:  # noqa: BLE001 - a failed trial is a row
                (folder / subprocess_trial.LOG_FILE).write_text(f"error: {root_cause_line(error)}\n")
                code = exit_code(error)
        return subprocess_trial.result_of(code, folder, limit_s)

    monkeypatch.setattr(subprocess_trial, "run", run)
    return commands


def test_rows_train_alike_and_are_compared_to_the_baseline(
    command: Command, tiny: list[str], in_process: list[list[str]], tmp_path: Path
) -> None:
    only = ["data.batch_size=4", "--only", "micro_batch,gradient_accumulation,strategy=fsdp2"]
    found = json.loads(command("compare", "lm", *tiny, *QUICK, *only, "--json", code=EXIT_OK)[1])
    rows = {row["technique"]: row for row in found["rows"]}
    assert list(rows)[:2] == ["baseline", "the recipe as it is"]
    base = rows["baseline"]
    for name in ("micro_batch", "gradient_accumulation"):
        assert rows[name]["status"] == MEASURED
        assert rows[name]["loss_difference"] == pytest.approx(0.0, abs=1e-5)
        assert rows[name]["peak_ratio"] == rows[name]["peak_bytes"] / base["peak_bytes"] < 1.0
        assert rows[name]["excluded"] == ""
        assert rows[name]["techniques"][f"callbacks/{name}"] == (name == "micro_batch"), "whether it is exact"
    assert not base["draws_random_numbers"]
    assert rows["combined"]["peak_ratio"] < 1.0
    assert rows["strategy=fsdp2"]["status"] == "not run"
    assert "one device" in rows["strategy=fsdp2"]["reason"]
    assert len(in_process) == 6
    assert not list(tmp_path.glob("outputs/compare/*/runs"))
    assert found["command"].startswith("lightning-eff compare lm")
    assert found["environment"]["torch"]


@pytest.mark.slow
def test_a_custom_row_is_on_top_of_the_baseline(
    command: Command, tiny: list[str], in_process: list[list[str]], tmp_path: Path
) -> None:
    own = "optimizer=sgd optimizer.lr=0.01 +callbacks=micro_batch callbacks.micro_batch.micro_batch_size=1"
    settings = ["callbacks.empty_cache.every_n_steps=3", "seed=7"]
    words = ["compare", "lm", *tiny, *settings, *QUICK, "--only", "baseline", "--row", own, "--json"]
    rows = {row["technique"]: row for row in json.loads(command(*words, code=EXIT_OK)[1])["rows"]}
    assert list(rows) == ["baseline", "the recipe as it is", own]
    assert all(row["status"] == MEASURED for row in rows.values())
    assert rows[own]["loss_difference"] != 0.0
    assert [("seed=7" in words, settings[0] in words) for words in in_process] == [
        (True, False), (True, True), (True, False),
    ], "only the unchanged recipe has its callback's setting"  # fmt: skip


@pytest.mark.usefixtures("in_process")
def test_a_comparison_in_which_nothing_works_exits_1(
    command: Command, tiny: list[str], tmp_path: Path
) -> None:
    words = [*tiny, "data.source_dir=/nowhere", *QUICK, "--only", "baseline"]
    assert "was not measured" in command("compare", "baseline", *words, code=EXIT_FAILED)[1]
    assert len(list(tmp_path.glob("outputs/compare/baseline_*/compare.html"))) == 1


@pytest.mark.slow
def test_real_processes_and_an_interruption(tiny: list[str], tmp_path: Path) -> None:
    # Whoever runs the tests in the background of a script has this signal ignored, and so would the child.
    listening = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program = f"{listening}from lightning_eff.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", program, "compare", "baseline", *tiny, *QUICK, "--only"]
    with subprocess.Popen([*words, "empty_cache"], stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        while "round 1, baseline" not in started.stderr.readline():
            pass
        os.kill(started.pid, signal.SIGINT)
        started.stderr.read()
    assert started.returncode == 130
    assert len(list(tmp_path.glob("outputs/compare/*/compare.html"))) == 1
    words += ["empty_cache,torch_compile", "--limit-s", "40", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["technique"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["empty_cache"]["status"] == MEASURED
    assert rows["torch_compile"]["status"] == MEASURED or "40 s" in rows["torch_compile"]["reason"]
