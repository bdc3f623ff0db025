"""The installed command, in a process and a folder of its own, with a model that lies in that folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import Command

SCRIPT = Path(sys.executable).parent / "lightning-eff"
MODEL = """
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        if self.trainer.fit_loop.epoch_loop.global_step == 0 and sys.argv[0].endswith("lightning-eff"):
            assert "peft" not in sys.modules, "it takes seconds, and this run has no adapters"
        return self.layer(batch[0]).square().mean()

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=4)
"""
OWN = ["model._target_=my_model.Net", "model.width=3", "data._target_=my_model.Data", "~monitors.text_sample"]
OWN += ["trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.val_check_interval=null"]


def script(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([SCRIPT, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_a_model_of_the_current_folder_is_trained_planned_and_exported(
    empty_folder: Path, command: Command
) -> None:
    """Trained by the script, which begins without the folder on its path; the rest in this process."""
    Path("my_model.py").write_text(MODEL)
    done = script("train", "baseline", *OWN, cwd=empty_folder)
    assert done.stderr.startswith("model: my_model.Net has no context_length")
    assert "Finished 2 optimizer steps" in done.stdout
    _, out, err = command("plan", "baseline", *OWN, code=0)
    assert len(set(err.splitlines())) == 2, "but for a line on what Net has not, and one on Data"
    assert "callbacks/optimizer_choice" in out
    _, out, err = command("export", "baseline", "--json", code=0)
    assert err == ""
    assert list(json.loads(out)["files"]) == ["model.safetensors"]


ALL = ["plan", "baseline", "optimizer=adamw_8bit", "+callbacks=peft_adapter", "precision=frozen_int8"]
ERROR = "error: optimizer=adamw_8bitt: no such option; did you mean 'adamw_8bit'?\n"


@pytest.mark.parametrize(
    ("words", "code", "printed", "error"),
    [
        pytest.param(
            [*ALL, "trainer.accelerator=cpu"], 0, "predicted peak of a step", "", marks=pytest.mark.slow
        ),
        pytest.param(["train", "baseline", "optimizer=adamw_8bitt"], 2, "", ERROR, marks=pytest.mark.slow),
        pytest.param(
            ["train", "lm", "--info", "searchpath"], 0, "Config search path", "", marks=pytest.mark.slow
        ),
    ],
)
def test_the_answer_is_all_that_is_printed(
    words: list[str], code: int, printed: str, error: str, tmp_path: Path
) -> None:
    """torchao and bitsandbytes log what they miss, torch what it deprecates; Hydra logs to two streams."""
    done = script(*words, cwd=tmp_path, code=code)
    assert done.stderr == error
    assert done.stdout.count(printed) == 1 if printed else done.stdout == ""
    assert list(tmp_path.iterdir()) == []
