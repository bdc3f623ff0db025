"""The installed command, in a process and a folder of its own, with a model that lies in that folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).parent / "lightning-eff"
MODEL = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
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


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, and one run of it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_model.py").write_text(MODEL)
    done = script("train", "baseline", *OWN, cwd=folder)
    assert done.stderr.startswith("model: my_model.Net has no context_length")
    assert "Finished 2 optimizer steps" in done.stderr
    return folder


def test_a_model_of_the_current_folder_is_trained_planned_and_exported(project: Path) -> None:
    done = script("plan", "baseline", *OWN, cwd=project)
    assert done.stderr.splitlines()[1:] == [], "but for a line on what Net has not"
    assert "callbacks/optimizer_choice" in done.stdout
    done = script("export", "baseline", "--json", cwd=project)
    assert done.stderr == ""
    assert list(json.loads(done.stdout)["files"]) == ["model.safetensors"]


def test_the_answer_is_all_that_is_printed(tmp_path: Path) -> None:
    """torchao and bitsandbytes log what they miss, torch what it deprecates; Hydra logs to two streams."""
    words = ["plan", "baseline", "optimizer=adamw_8bit", "+callbacks=peft_adapter", "precision=frozen_int8"]
    done = script(*words, "trainer.accelerator=cpu", cwd=tmp_path)
    assert done.stderr == ""
    done = script("train", "baseline", "optimizer=adamw_8bitt", cwd=tmp_path, code=2)
    error = "error: optimizer=adamw_8bitt: no such option; did you mean 'adamw_8bit'?\n"
    assert (done.stdout, done.stderr) == ("", error)
    assert list(tmp_path.iterdir()) == []
    done = script("train", "lm", "--info", "searchpath", cwd=tmp_path)
    assert (done.stderr, done.stdout.count("Config search path")) == ("", 1)
