"""Real jobs of Ray on this machine, some 40 s each: equal to the command's own ranks, and stopped.

A killed worker is in test_lost_ranks.py; how its error reaches the driver is in test_ray_worker.py.
"""

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


def start(root: str, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "lightning_eff", *WORDS, f"output_root={root}", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
    """Return the processes of this test with a word in their command; Ray names a worker by what it runs."""
    return processes_with(f"MARK={Path.cwd()}", name)


def saved(root: str, step: int) -> Any:
    (path,) = Path(root).glob(f"lm/*/checkpoints/step-{step}.ckpt")
    return torch.load(path, weights_only=True)


def assert_same(root: str, other: str) -> None:
    ours, theirs = saved(root, 8), saved(other, 8)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["auto", "fsdp2", "deepspeed_zero"])
def test_two_workers_train_what_two_ranks_of_the_command_train(strategy: str) -> None:
    err = end_of(start("with_ray", f"strategy={strategy}", *RAY))
    assert err.count("Finished 8 optimizer steps") == err.count("Efficiency report") == 1
    (folder,) = Path("with_ray/lm").iterdir()
    assert (folder / "efficiency.json").is_file()
    assert not (folder / "ray").exists()
    end_of(start("without", f"strategy={strategy}", "trainer.devices=2"))
    assert_same("with_ray", "without")


def test_a_signal_while_ray_starts_ends_the_run() -> None:
    process = start("out", *RAY)
    wait_for(lambda: processes_of("gcs_server"))
    process.send_signal(signal.SIGINT)
    assert end_of(process, code=130).splitlines()[-1].startswith("stopped")


def test_a_stopped_run_resumes_with_one_worker() -> None:
    process = start("out", *RAY)
    wait_for(lambda: list(Path("out").glob("lm/*/checkpoints/step-[23].ckpt")))
    process.send_signal(signal.SIGTERM)
    err = end_of(process, code=143)
    assert err.splitlines()[-1].startswith("stopped")
    err = end_of(start("out", "launch=ray", "launch.workers=1", "ckpt_path=auto"))
    assert "ckpt_path=auto: resumes from" in err
    assert saved("out", 8)["global_step"] == 8
