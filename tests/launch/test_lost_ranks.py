"""A rank is killed at different moments of a run, under each launcher.

The job ends or restarts by itself, and leaves no process (as after every test) and no shared memory. With
`ckpt_path=auto` its final weights are bit-identical to those of an uninterrupted run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.commands.launch import ClusterJob
from tests.support.command_line import TINY
from tests.support.slurm import with_commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 6
SHARED_MEMORY = Path("/dev/shm")
WORDS = [
    *(word for word in TINY if "text_sample" not in word), f"trainer.max_steps={STEPS}", "strategy=ddp",
    "callbacks=[exact_resume]", "monitors=[efficiency_report,model_checkpoint]", "precision=fp32",
    "monitors.model_checkpoint.every_n_train_steps=1", "ckpt_path=auto", "data.num_workers=1",
    "+callbacks.lost._target_=lost.Lost",
]  # fmt: skip
LOST = """
import os, signal
from pathlib import Path
import lightning.pytorch as pl

class Lost(pl.Callback):
    def _die(self, moment, trainer):
        died = Path("died")
        if moment == os.environ.get("MOMENT") and trainer.global_rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def setup(self, trainer, module, stage):
        self._die("setup", trainer)
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 3:
            self._die("step", trainer)
    def on_save_checkpoint(self, trainer, module, checkpoint):
        if trainer.global_step == 3:
            self._die("save", trainer)
    def on_train_end(self, trainer, module):
        self._die("end", trainer)
"""
OWN = [sys.executable, "-m", "lightning_eff", "train", "lm", *WORDS]
TORCHRUN = [
    "torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0", "-m", *OWN[2:],
]  # fmt: skip
COMMANDS = {
    "own": [*OWN, "trainer.devices=2"],
    "torchrun": TORCHRUN,
    "slurm": ["bash", "-c", ClusterJob(recipe="lm", words=WORDS, tasks=2).file("slurm")],
    "ray": [*OWN, "launch=ray", "launch.workers=2"],
}
IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}


def start(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "lost.py").write_text(LOST)
    env = with_commands(folder, scontrol="#!/bin/sh\n") | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def weights(folder: Path) -> dict[str, Any]:
    newest = max(folder.rglob(f"step-{STEPS}.ckpt"), key=lambda path: path.stat().st_mtime)
    return torch.load(newest, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = start(COMMANDS["own"], folder)
    assert done.returncode == 0, done.stderr
    return weights(folder)


@pytest.mark.parametrize(
    ("launcher", "moment"),
    [
        *(("own", moment) for moment in ("setup", "step", "save", "end")),
        *(("torchrun", moment) for moment in ("setup", "save")),
        *(("slurm", "save"), ("ray", "save")),
    ],
)
def test_a_run_that_lost_a_rank_resumes_bit_identically(
    launcher: str, moment: str, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    if launcher == "ray":
        pytest.importorskip("ray")
    shared = set(SHARED_MEMORY.iterdir())
    job = IN_JOB if launcher == "slurm" else {}
    done = start(COMMANDS[launcher], tmp_path, MOMENT=moment, **job)
    assert (tmp_path / "died").exists(), done.stderr
    assert (done.returncode == 0) == (launcher in ("torchrun", "ray")), done.stderr
    if done.returncode:
        job = job and job | {"SLURM_RESTART_COUNT": "1"}
        done = start(COMMANDS[launcher], tmp_path, MOMENT=moment, **job)
        assert done.returncode == 0, done.stderr
    found = weights(tmp_path)
    assert found.keys() == uninterrupted.keys()
    assert all(torch.equal(found[name], uninterrupted[name]) for name in uninterrupted)
    while set(SHARED_MEMORY.iterdir()) - shared:  # of other tests, which ends; else pytest's time limit does
        time.sleep(0.1)
