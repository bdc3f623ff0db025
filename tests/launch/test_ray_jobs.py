"""Real jobs of Ray on this machine, some 40 s each: equal to the command's own ranks, killed, and stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import TINY
from tests.support.processes import processes_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("ray")
SHORT = [word for word in TINY if "text_sample" not in word]
WORDS = ["train", "lm", *SHORT, "trainer.max_steps=8", "callbacks=[exact_resume,gradient_accumulation]"]
WORDS += ["precision=fp32", "monitors=[efficiency_report,model_checkpoint]"]
RAY = ["launch=ray", "launch.workers=2"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MARK", str(tmp_path))
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def start(root: str, *more: str, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "lightning_eff", *WORDS, f"output_root={root}", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True)


def end_of(process: subprocess.Popen[str], code: int = 0) -> str:
    with process:
        out, err = process.communicate()
    assert process.returncode == code, err
    wait_for(lambda: not processes_of("ray") and not processes_of("lightning_eff"))
    return out + err


def wait_for(found: Callable[[], Any]) -> Any:
    while not (result := found()):  # what never comes ends by pytest's own limit
        time.sleep(0.1)
    return result


def processes_of(name: str) -> dict[int, str]:
    """Return the processes of this test with a word in their command line, which Ray sets for workers."""
    return processes_with(f"MARK={Path.cwd()}", name)


def saved(root: str, step: int) -> Any:
    (path,) = Path(root).glob(f"lm/*/checkpoints/step-{step}.ckpt")
    return torch.load(path, weights_only=True)


def assert_same(root: str, other: str) -> None:
    ours, theirs = saved(root, 8), saved(other, 8)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero"])  # ddp: test_lost_ranks
def test_two_workers_train_what_two_ranks_of_the_command_train(strategy: str) -> None:
    err = end_of(start("with_ray", f"strategy={strategy}", *RAY))
    assert err.count("Finished 8 optimizer steps") == err.count("Efficiency report") == 1
    (folder,) = Path("with_ray/lm").iterdir()
    assert (folder / "efficiency.json").is_file()
    assert not (folder / "ray").exists()
    end_of(start("without", f"strategy={strategy}", "trainer.devices=2"))
    assert_same("with_ray", "without")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_ends_the_run(number: int) -> None:
    process = start("out", *RAY)
    wait_for(lambda: processes_of("gcs_server"))
    process.send_signal(number)
    err = end_of(process, code=128 + number)
    assert err.splitlines()[-1].startswith("stopped")


def test_a_stopped_run_goes_on_with_one_worker() -> None:
    process = start("out", *RAY)
    wait_for(lambda: list(Path("out").glob("lm/*/checkpoints/step-[23].ckpt")))
    process.send_signal(signal.SIGTERM)
    err = end_of(process, code=143)
    assert err.splitlines()[-1].startswith("stopped")
    err = end_of(start("out", "launch=ray", "launch.workers=1", "ckpt_path=auto"))
    assert "ckpt_path=auto: resumes from" in err
    assert saved("out", 8)["global_step"] == 8


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (
            "raise RuntimeError('a fault of the test')",
            "rank 1: RuntimeError: a fault of the test (traceback: ",
        ),
        ("os.kill(os.getpid(), 9)", "rank 1 was lost, perhaps because memory ran out"),
    ],
)
def test_a_worker_that_fails_is_named_in_one_line(fault: str, named: str) -> None:
    Path("faulty.py").write_text(
        "import os\nfrom lightning_eff.models.gpt import GPT\n"
        "class Net(GPT):\n"
        "    def on_train_batch_start(self, batch, batch_idx):\n"
        "        if batch_idx == 3 and self.global_rank == 1:\n"
        f"            {fault}\n"
    )
    err = end_of(start("out", *RAY, "model._target_=faulty.Net", "launch.max_failures=0"), code=1)
    assert err.splitlines()[-1].startswith(f"error: {named}")


TWO_MACHINES = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 128 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
other = cluster.add_node(**node)
sys.stdout.write(f"{cluster.address}\\n")
sys.stdout.flush()
for line in sys.stdin:
    if line == "lose\\n":
        cluster.remove_node(other, allow_graceful=False)
    else:
        other = cluster.add_node(**node)
cluster.shutdown()
"""
SLOW = """
import sys, time
from lightning_eff.models.gpt import GPT

class Net(GPT):
    def on_train_batch_start(self, batch, batch_idx):
        if not self.global_rank:
            sys.stderr.write(f"{self.trainer.world_size} ranks at step {self.trainer.global_step}\\n")
        time.sleep(0.3)
"""


def part_of(log: Path, number: int, wanted: str) -> str:
    """Return the log of an attempt once it contains a text; empty before."""
    parts = log.read_text().split("resumes from")
    return parts[number] if len(parts) > number and wanted in parts[number].rpartition("\n")[0] else ""


def test_a_run_goes_on_with_the_machines_that_are_there() -> None:
    Path("slow.py").write_text(SLOW)
    log, words = Path("err"), [sys.executable, "-c", TWO_MACHINES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with log.open("w") as err, subprocess.Popen(words, **pipes, text=True) as cluster:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        elastic = ["launch=ray", "launch.workers=[1,2]", f"launch.address={address}"]
        more = ["model._target_=slow.Net", "trainer.max_steps=10000"]
        process = start("out", *elastic, *more, stderr=err)
        wait_for(lambda: "2 ranks at step 3\n" in log.read_text())
        for word, number in (("lose", 1), ("add", 2)):
            num_before = log.read_text().count("resumes from")
            cluster.stdin.write(f"{word}\n")
            cluster.stdin.flush()
            text = wait_for(lambda: part_of(log, num_before + 1, f"{number} ranks at step "))  # noqa: B023
            begun, _, rest = text.partition(f"{number} ranks at step ")
            step = int(rest.split()[0])
            assert f"checkpoints/step-{step}.ckpt" in begun
            assert step > 0
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 143
        cluster.stdin.close()
    wait_for(lambda: not processes_of("ray") and not processes_of("lightning_eff"))
    lines = log.read_text()
    assert "state-dump" not in lines
    assert "was lost" not in lines.splitlines()[-1]
