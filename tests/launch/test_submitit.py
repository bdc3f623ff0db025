"""Hydra's launcher for SLURM, with scripts in place of `sbatch`, `srun` and `sacct`: the jobs run here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import TINY
from tests.support.slurm import with_commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("submitit")

# Prints the job's number, then runs the tasks of a job array one after another, as jobs 7_0 and 7_1.
SBATCH = f"""#!{sys.executable}
import os, pathlib, re, subprocess, sys, time
script = sys.argv[1]
text = open(script).read()
if len(sys.argv) == 2:
    copy = script + ".started"  # submitit moves the file
    open(copy, "w").write(text)
    quiet = {{name: subprocess.DEVNULL for name in ("stdout", "stderr")}}
    subprocess.Popen([sys.executable, __file__, copy, "run"], **quiet)
    sys.exit(print("Submitted batch job 7"))
tasks = re.search(r"--ntasks-per-node=(\\d+)", text)[1]
for index in "01":
    while not list(pathlib.Path(script).parent.glob(f"7_{{index}}/*_submitted.pkl")):
        time.sleep(0.1)
    env = os.environ | {{"SLURM_JOB_ID": "10" + index, "SLURM_ARRAY_JOB_ID": "7"}}
    env |= {{"SLURM_ARRAY_TASK_ID": index}}
    env |= {{"SLURM_NTASKS": tasks, "SLURM_NTASKS_PER_NODE": tasks, "SLURM_JOB_NUM_NODES": "1"}}
    env |= {{"SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NAME": "train"}}
    subprocess.run(["bash", script], env=env, check=False)
"""
SACCT = """#!/bin/bash
echo 'JobID|State|NodeList'
for task in 7_0 7_1; do echo "$task|RUNNING|localhost"; done
"""


def sweep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `train lm -m` in `folder` with scripts in place of SLURM's commands."""
    env = with_commands(folder, sbatch=SBATCH, sacct=SACCT)
    command = [sys.executable, "-m", "lightning_eff", "train", "lm", "-m", *TINY, *words]
    command += ["hydra/launcher=submitit_slurm", "trainer.max_steps=2"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_each_run_of_a_sweep_is_a_job_of_slurm_with_its_ranks(tmp_path: Path) -> None:
    words = ["seed=1,2", "hydra.launcher.tasks_per_node=2", "trainer.devices=auto", "strategy=ddp", "--json"]
    done = sweep(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout)["rows"]
    assert [(row["settings"], row["status"], row["num_steps"]) for row in reports] == [
        ({"seed": "1"}, "finished", 2),
        ({"seed": "2"}, "finished", 2),
    ]
    files = tmp_path.glob("outputs/lm/sweep_*/*/efficiency.json")
    assert [json.loads(file.read_text())["measured"]["world_size"] for file in files] == [2, 2]


def test_a_job_that_fails_is_an_error_of_the_sweep(tmp_path: Path) -> None:
    done = sweep(tmp_path, "seed=1,2", "trainer.devices=2")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "trainer.devices=2: expected 1: slurm started 1" in done.stderr
    assert done.stdout.count("trainer.devices=2: expected 1") == 2
