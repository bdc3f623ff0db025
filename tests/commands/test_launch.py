"""The printed files are accepted by what reads them; their commands train here, with the variables set."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from lightning_eff.commands.launch import SHARED, ClusterJob
from tests.support.command_line import TINY, Command

SCHEMAS = yaml.safe_load((Path(__file__).parent / "kubernetes.yaml").read_text())
BIN = Path(sys.executable).parent
KINDS = {"trainjob": "TrainJob", "jobset": "JobSet", "rayjob": "RayJob"}


@pytest.mark.parametrize(("kind", "gpus"), [("trainjob", "8"), ("jobset", "0"), ("rayjob", "8")])
def test_kubernetes_accepts_the_printed_file(command: Command, kind: str, gpus: str) -> None:
    words = ("launch", "k8s", "images_large", "--nodes", "2", "--gpus", gpus, "--kind", kind)
    out = command(*words, code=0)[1]
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


def test_the_output_root_of_the_user_is_mounted(command: Command) -> None:
    out = command("launch", "k8s", "lm", "output_root=/data/runs", "--claim", "data", code=0)[1]
    assert out.count("/data/runs") == 2, "in the command, and as the mount"
    assert SHARED not in out
    assert 'claimName: "data"' in out


def test_overrides_reach_the_job_as_typed_with_spaces_quotes_and_dollars(command: Command) -> None:
    typed = ["seed=3", "output_root='/data/my $(HOME) \"runs\"'"]
    _, script, _ = command("launch", "slurm", "lm", *typed)
    (run,) = (line for line in script.splitlines() if line.startswith("srun"))
    assert set(typed) <= set(shlex.split(run))
    for kind in ("trainjob", "jobset"):
        found = command("launch", "k8s", "lm", *typed, "--kind", kind)[1]
        assert found.count("$$(HOME)") == 1, "Kubernetes makes $(HOME) of it, and replaces what has one $"
        assert yaml.safe_load(found)


def test_the_devices_of_the_cluster_replace_those_of_the_recipe(command: Command) -> None:
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


@pytest.mark.parametrize(("code", "is_requeued"), [(138, True), (143, False)])
def test_a_job_is_requeued_only_if_slurm_has_stopped_it(
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_the_command_of_a_pod_trains_on_two_machines(kind: str, tmp_path: Path) -> None:
    job = ClusterJob(recipe="lm", words=[*TINY, "strategy=ddp"], nodes=2)
    spec = yaml.safe_load(job.file(kind))["spec"]
    if kind == "trainjob":
        trainer = spec["trainer"]
        command = [*trainer["command"], *trainer["args"]]
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
