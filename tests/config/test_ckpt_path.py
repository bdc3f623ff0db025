"""`ckpt_path=auto`: the same command resumes where a run was stopped, and ends when all is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.config.ckpt_path import find_checkpoint
from lightning_eff.config.composition import compose_recipe
from tests.support.command_line import Command

pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
STOPPED = """
import os, signal
from pathlib import Path
from lightning_eff.models.gpt import GPT

class Stopped(GPT):
    def training_step(self, batch, batch_idx):
        if batch_idx == 4 and not Path("stopped").exists():  # the first batch of the third step of two
            Path("stopped").write_text("")
            if os.environ["STOP_BY"] == "SIGINT":  # which a run in the background ignores
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.Signals[os.environ["STOP_BY"]])
        return super().training_step(batch, batch_idx)
"""
MORE = [
    "model._target_=my_stopped.Stopped", "trainer.max_steps=6", "trainer.val_check_interval=100",
    "data.batch_size=1",
    "callbacks.gradient_accumulation.global_batch_size=2", "model.dropout=0.2",
]  # fmt: skip


def saved(folder: str) -> dict[str, dict[str, Any]]:
    """Return the weights of each checkpoint below a folder by its name."""
    return {
        path.stem: torch.load(path, weights_only=True)["state_dict"] for path in Path(folder).rglob("*.ckpt")
    }


def test_the_same_command_again_resumes_to_the_bit(
    tiny: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGUSR1; SIGTERM is in tests/launch/test_stop.py, SIGINT below."""
    monkeypatch.setenv("STOP_BY", "SIGUSR1")
    Path("my_stopped.py").write_text(STOPPED)
    words = ["train", "lm", *tiny, *MORE, "ckpt_path=auto"]
    out = command(*words, code=138)[1]
    assert out.count("Stopped after") == 1
    assert [*saved("outputs")] == ["step-3"], "the step was finished, with both of its batches"

    err = command(*words, code=0)[2]
    assert "/checkpoints/step-3.ckpt" in err
    assert "resumed at step 3: order and random states as saved" in err
    command(*words, "output_root=whole", code=0)
    resumed, whole = saved("outputs")["step-6"], saved("whole")["step-6"]
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []

    num_runs = len(list(Path("outputs/lm").iterdir()))
    Path("outputs").rename("moved")  # as to another machine
    _, out, err = command(*words, "--json", f"output_root={Path('moved').resolve()}", code=0)
    assert "nothing is left to train" in err
    assert json.loads(out)["status"] == "finished"
    assert len(list(Path("moved/lm").iterdir())) == num_runs


def test_auto_takes_a_checkpoint_of_the_same_settings_only(
    tiny: list[str], command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*tiny, "ckpt_path=auto"]
    command("train", "lm", *tiny, code=0)
    command("train", "lora", *words, code=0)
    (base,) = Path("outputs/lm").iterdir()
    shutil.copytree(base, base.with_name("9999-01-01_00-00-00"))  # a newer base: the run keeps its own

    def found(*more: str) -> Path | None:
        return find_checkpoint(compose_recipe("lora", [*words, *more]).values, Path("outputs/lora"))

    (checkpoint,) = Path("outputs/lora").glob("*/checkpoints/*.ckpt")
    assert found() == checkpoint
    assert found("seed=3") is None
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert found() is None
    assert f"skipped: checkpoint {checkpoint}" in caplog.text


def test_a_run_with_other_data_is_rejected_and_saves_nothing(tiny: list[str], command: Command) -> None:
    command("train", "lm", *tiny, code=0)
    words = ["data.batch_size=1", "trainer.max_steps=4", "ckpt_path=last"]
    err = command("train", "lm", *tiny, *words, code=2)[2]
    assert "try: callbacks.exact_resume.changed_data=continue" in err
    assert "states as saved" not in err
    assert len([*saved("outputs")]) == 1


def test_a_sweep_that_is_interrupted_starts_no_further_run(
    tiny: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_BY", "SIGINT")
    Path("my_stopped.py").write_text(STOPPED)
    _, out, _ = command("train", "lm", *tiny, *MORE, "-m", "seed=1,2", code=130)
    (row,) = out.splitlines()[1:]
    assert " stopped" in row
    assert len([*Path("outputs").rglob("efficiency.json")]) == 1
