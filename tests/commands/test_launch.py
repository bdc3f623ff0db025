"""The printed files are accepted by what reads them; their commands train here, with the variables set."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

from lightning_eff.commands.launch import SHARED, ClusterJob
from tests.support.command_line import Command
from tests.support.slurm import with_commands

SCHEMAS = yaml.safe_load((Path(__file__).parent / "kubernetes.yaml").read_text())
BIN = Path(sys.executable).parent
KINDS = {"trainjob": "TrainJob", "jobset": "JobSet", "rayjob": "RayJob"}
TINY = [
    "trainer.accelerator=cpu", "trainer.max_steps=6", "trainer.val_check_interval=null", "data.batch_size=2",
    "model.d_model=16", "model.num_layers=1", "model.num_heads=2", "data.context_length=16",
    "callbacks=[exact_resume]", "model.context_length=16", "~monitors.text_sample", "precision=fp32",
    "strategy=ddp",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", ["0", "8"])
def test_kubernetes_accepts_what_is_printed(command: Command, kind: str, gpus: str) -> None:
    words = ("launch", "k8s", "images_large", "--nodes", "2", "--gpus", gpus, "--kind", kind)
    code, out, err = command(*words)
    assert code == 0, err
    job = yaml.safe_load(out)
    assert job["kind"] == KINDS[kind]
    jsonschema.validate(job, {"$defs": SCHEMAS["$defs"], **SCHEMAS[KINDS[kind]]})
    assert job["metadata"]["name"] == "images-large"
    assert out.count("nvidia.com/gpu: 8") == (gpus == "8")
    assert 'claimName: "outputs"' in out
    assert out.count("mountPath: /dev/shm") == out.count('mountPath: "/outputs"')
    assert job == json.loads(command(*words, "--json")[1])
    broken = json.loads(json.dumps(job).replace('"name": "images-large"', '"name": "images_large"'))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, {"$defs": SCHEMAS["$defs"], **SCHEMAS[KINDS[kind]]})


def test_a_folder_of_the_users_is_mounted(command: Command) -> None:
    code, out, err = command("launch", "k8s", "lm", "output_root=/data/runs", "--claim", "data")
    assert code == 0, err
    assert out.count("/data/runs") == 2, "in the command, and as the mount"
    assert SHARED not in out
    assert 'claimName: "data"' in out


def test_words_are_those_that_were_typed_whatever_is_in_them(command: Command) -> None:
    typed = ["seed=3", "output_root='/data/my $(HOME) \"runs\"'"]
    _, script, _ = command("launch", "slurm", "lm", *typed)
    (run,) = (line for line in script.splitlines() if line.startswith("srun"))
    assert set(typed) <= set(shlex.split(run))
    for kind in ("trainjob", "jobset"):
        found = command("launch", "k8s", "lm", *typed, "--kind", kind)[1]
        assert found.count("$$(HOME)") == 1, "Kubernetes makes $(HOME) of it, and replaces what has one $"
        assert yaml.safe_load(found)


def test_a_recipe_with_a_number_of_devices_runs_on_those_that_the_cluster_starts(command: Command) -> None:
    _, script, _ = command(
        "launch", "slurm", "zero2", "--nodes", "2", "--gpus", "4", "seed=3", "data.batch_size=1"
    )
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4"} <= set(lines)
    (run,) = (line for line in lines if line.startswith("srun"))
    assert shlex.split(run)[2:] == [
        "lightning-eff", "train", "zero2", "seed=3", "data.batch_size=1", "trainer.devices=auto",
        "trainer.accelerator=gpu", "ckpt_path=auto",
    ]  # fmt: skip
    _, script, _ = command("launch", "slurm", "zero2", "ckpt_path=last")
    assert "#SBATCH --ntasks-per-node=2\n" in script, "the recipe's two CPUs"
    assert "gpu" not in script
    assert "ckpt_path=auto" not in script


@pytest.mark.parametrize(("code", "is_requeued"), [(138, True), (143, False), (0, False)])
def test_a_job_is_requeued_when_slurm_has_stopped_it(
    code: int, is_requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in {"srun": f"exit {code}", "scontrol": "echo $* > requeued"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    script = ClusterJob(recipe="lm").file("slurm")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, check=False)
    assert done.returncode == code
    assert [path.read_text() for path in tmp_path.glob("requeued")] == ["requeue 7\n"] * is_requeued


SCONTROL = """#!/bin/bash
echo "$*" >> requeued
"""
SIGNALLED = """
import os, signal
import lightning.pytorch as pl

class Signalled(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        # What SLURM sends to all tasks before the time is over; in the first start only.
        if trainer.global_step == 3 and not os.environ.get("SLURM_RESTART_COUNT"):
            os.kill(os.getpid(), signal.SIGUSR1)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def last_weights(folder: Path) -> dict[str, Any]:
    newest = max(folder.rglob("*step-6.ckpt"), key=lambda path: path.stat().st_mtime)
    return torch.load(newest, weights_only=True)["state_dict"]


@pytest.mark.slow
def test_the_script_is_requeued_when_its_time_is_over_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    words = [*TINY, "+callbacks.signalled._target_=signalled.Signalled"]
    base = with_commands(tmp_path, scontrol=SCONTROL) | {"SLURM_JOB_ID": "7"}
    base |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}

    def run(folder: str, **more: str) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        job = ClusterJob(recipe="lm", words=[*words, f"output_root={tmp_path / folder}"], tasks=2)
        done = subprocess.run(
            ["bash", "-c", job.file("slurm")], cwd=tmp_path, env=base | more, timeout=300, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode in (0, 138), done.stderr[-3000:]
        return done.returncode

    assert run("requeued_run") == 138
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert run("requeued_run", SLURM_RESTART_COUNT="1") == 0
    assert run("whole", SLURM_RESTART_COUNT="0 ") == 0
    found, expected = last_weights(tmp_path / "requeued_run"), last_weights(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_the_command_of_a_pod_trains_on_two_machines(kind: str, tmp_path: Path) -> None:
    words = [word for word in TINY if not word.startswith("trainer.max_steps")] + ["trainer.max_steps=2"]
    job = ClusterJob(recipe="lm", words=words, nodes=2)
    spec = yaml.safe_load(job.file(kind))["spec"]
    if kind == "trainjob":
        trainer = spec["trainer"]
        command, variables = [*trainer["command"], *trainer["args"]], {}
        variables = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1"}
    else:
        pods = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (container,) = pods["containers"]
        command = container["command"]
        variables = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        assert variables["PET_MASTER_ADDR"] == "lm-node-0-0.lm"
    command = [word.replace(SHARED, str(tmp_path)) for word in command]
    own = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    env = os.environ | variables | own | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    pods = [
        subprocess.Popen(
            command, cwd=tmp_path, env=env | {"PET_NODE_RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    errors = [pod.communicate(timeout=300)[1].decode() for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], errors
    (report,) = tmp_path.rglob("efficiency.json")
    assert json.loads(report.read_text())["num_steps"] == 2


@pytest.mark.slow
def test_the_workers_of_an_elastic_job_go_on_with_the_machines_that_are_left(tmp_path: Path) -> None:
    words = [word for word in TINY if not word.startswith("trainer.max_steps")]
    words += ["trainer.max_steps=2000", "monitors.model_checkpoint.every_n_train_steps=200", "ckpt_path=auto"]
    torchrun = [
        BIN / "torchrun", "--nnodes=1:2", "--max-restarts=3", "--nproc-per-node=1", "--rdzv-backend=c10d",
        "--rdzv-id=elastic", f"--rdzv-endpoint=localhost:{free_port()}",
    ]  # fmt: skip

    def agent(name: str) -> subprocess.Popen[bytes]:
        host = f"--rdzv-conf=last_call_timeout=5,is_host={name == 'first'}"  # whose loss ends the job
        command = [*torchrun, host, "-m", "lightning_eff", "train", "lm", *words]
        with (tmp_path / name).open("w") as screen:
            streams: dict[str, Any] = {"stdout": screen, "stderr": subprocess.STDOUT}
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **streams)

    agents = [agent("first"), agent("second")]
    try:
        while not list(tmp_path.rglob("step-400.ckpt")):
            assert agents[0].poll() is None, (tmp_path / "first").read_text()[-3000:]
            time.sleep(0.1)
        workers = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
        for process in (agents[1].pid, *map(int, workers)):
            os.kill(process, signal.SIGKILL)
        assert agents[0].wait() == 0, (tmp_path / "first").read_text()[-3000:]
    finally:
        for each in agents:
            each.kill()
            each.wait()
    reports = [json.loads(path.read_text()) for path in tmp_path.rglob("efficiency.json")]
    finished = next(report for report in reports if report["status"] == "finished")
    assert finished["first_step"] >= 400
    assert finished["first_step"] + finished["num_steps"] == 2000
    assert "saved on 2 ranks, now 1" in (tmp_path / "first").read_text()
