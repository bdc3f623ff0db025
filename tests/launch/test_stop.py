"""Two real ranks on gloo: they share a folder and a terminal, stop together, and fail together.

A start takes 10 to 20 s, so all tests but one are slow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command_line import Command
from tests.support.processes import processes_with

LAUNCHERS = {
    "own": [sys.executable, "-m"],
    "torchrun": [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m"],
}
FAULTY = """
import os, signal, time
from pathlib import Path
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset


def fault(here):
    kind, rank, place = os.environ["FAULT"].split(":")
    if place == here and os.environ.get("LOCAL_RANK", "0") == rank:
        if kind == "raise":
            raise RuntimeError("a fault of the test")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "tell":
            return Path("began").touch()
        os.kill(os.getpid(), getattr(signal, kind))

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            fault("step")
        return self.layers(batch[0]).square().mean()

class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        fault("build")
    def setup(self, stage):
        fault("data")
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=4)
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks from an empty folder, in an environment without a launcher's variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def words_for(strategy: str, *more: str) -> list[str]:
    Path("faulty.py").write_text(FAULTY)
    words = ["train", "baseline", "trainer.accelerator=cpu", "trainer.devices=2", f"strategy={strategy}"]
    words += ["trainer.val_check_interval=null", "model._target_=faulty.Net", "data._target_=faulty.Data"]
    return [*words, "~monitors.text_sample", *more]


def start(launcher: str, strategy: str, fault: str, *more: str) -> subprocess.Popen[str]:
    words = [*LAUNCHERS[launcher], "lightning_eff", *words_for(strategy, *more)]
    environment = os.environ | {"FAULT": fault, "MARK": str(Path.cwd())}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def end_of(process: subprocess.Popen[str]) -> list[str]:
    """Wait until the process fails; return the lines of its output."""
    with process:
        out, err = process.communicate()
    err = out + err
    assert process.returncode, err
    assert processes_with(str(Path.cwd())) == {}
    return [line for line in err.splitlines() if line.strip(" =")]


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize(
    ("launcher", "strategy", "fault"),
    [
        ("own", "ddp", "kill:1:step"),
        ("own", "deepspeed_zero", "raise:0:data"),
        ("own", "fsdp2", "raise:1:build"),
        ("torchrun", "fsdp2", "raise:1:step"),
        ("torchrun", "deepspeed_zero", "kill:0:step"),
        ("torchrun", "ddp", "raise:0:build"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(launcher: str, strategy: str, fault: str) -> None:
    """The quick test, without real ranks, is in test_ranks.py."""
    lines = end_of(start(launcher, strategy, fault, "trainer.max_steps=400"))
    kind, rank, place = fault.split(":")
    if launcher == "torchrun":  # its summary is last: "rank      : 1 (local_rank: 1)", then the traceback
        (first,) = [index for index, line in enumerate(lines) if "Root Cause" in line]
        last = " ".join(" ".join(lines[first:]).split())
        assert f"rank : {rank}" in last
    else:
        last = lines[-1]
        assert f"rank {rank}" in last
    assert ("SIGKILL" if kind == "kill" else "RuntimeError: a fault of the test") in last
    # If rank 1 cannot build its model, rank 0 may have started before.
    assert len(list(Path("outputs/baseline").glob("*"))) in ([0, 1] if place == "build" else [1])


def test_a_signal_to_one_rank_of_this_process(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's process itself starts the ranks, which saves the start of a third process."""
    monkeypatch.setenv("FAULT", "SIGTERM:1:step")
    monkeypatch.setenv("MARK", str(Path.cwd()))
    _, out, err = command(*words_for("ddp", "trainer.max_steps=100000"), code=143)
    assert processes_with(str(Path.cwd())) == {}
    assert_stopped([line for line in (out + err).splitlines() if line.strip(" =")])


def assert_stopped(lines: list[str], *, is_printed: bool = True) -> None:
    (saved,) = Path("outputs/baseline").glob("*/checkpoints/*.ckpt")
    assert saved.name in ("step-4.ckpt", "step-5.ckpt"), "the step of the signal, or the next one"
    assert sum("Stopped after" in line for line in lines) == 1, lines
    if is_printed:
        assert lines[-1].startswith("stopped")


@SLOW
@pytest.mark.parametrize(
    ("launcher", "strategy", "fault", "code"),
    [
        ("own", "ddp", "SIGTERM:1:step", 143),
        ("own", "ddp", "SIGUSR1:1:step", 138),
        ("own", "fsdp2", "SIGINT:1:step", 130),
        ("torchrun", "fsdp2", "SIGTERM:1:step", 1),  # torchrun has its own code
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    launcher: str, strategy: str, fault: str, code: int
) -> None:
    process = start(launcher, strategy, fault, "trainer.max_steps=100000")
    lines = end_of(process)
    assert process.returncode == code, "\n".join(lines)
    assert_stopped(lines, is_printed=launcher == "own")


@SLOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_command_stops_all_ranks(number: int) -> None:
    """Also SIGKILL, which it cannot handle: the ranks end too."""
    process = start("own", "ddp", "tell:0:step", "trainer.max_steps=100000")
    while process.poll() is None and not Path("began").exists():
        time.sleep(0.1)
    process.send_signal(number)
    lines = end_of(process)  # returns when no rank has the pipe open
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + (signal.SIGTERM if number == signal.SIGHUP else number), lines
    assert len(list(Path("outputs/baseline").glob("*/checkpoints/*.ckpt"))) == 1
    assert lines[-1].startswith("stopped")


@SLOW
@pytest.mark.parametrize(
    ("launcher", "recipe"),
    [
        *(("own", recipe) for recipe in ("baseline", "zero3_offload", "fsdp2")),
        ("torchrun", "zero2"),
    ],
)
def test_ranks_share_one_folder_and_one_terminal(launcher: str, recipe: str, tiny: list[str]) -> None:
    words = [*LAUNCHERS[launcher], "lightning_eff", "train", recipe, *tiny, "trainer.devices=2", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["num_steps"]) == ("finished", 2)
    assert report["measured"]["world_size"] == 2
    strategy = {"baseline": "", "fsdp2": "strategy/fsdp2"}.get(recipe, "strategy/deepspeed_zero")
    assert strategy in json.dumps(report["ledger"])
    assert done.stderr.count("Efficiency report of") == done.stderr.count("step 2/2") == 1
    (run_dir,) = Path("outputs", recipe).iterdir()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-2.ckpt"]


@SLOW
def test_each_run_of_a_sweep_starts_its_own_ranks(tiny: list[str]) -> None:
    words = [*LAUNCHERS["own"], "lightning_eff", "train", "baseline", *tiny, "-m", "seed=1,2"]
    words += ["trainer.devices=2", "strategy=ddp", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in json.loads(done.stdout)["rows"]] == ["finished"] * 2
    files = Path("outputs/baseline").glob("sweep_*/*/efficiency.json")
    assert [json.loads(file.read_text())["measured"]["world_size"] for file in files] == [2, 2]
    assert len(list(Path("outputs/baseline").glob("sweep_*/*/checkpoints/step-2.ckpt"))) == 2
