"""`validate`, `test` and `predict`: which checkpoint, its values to the bit, and what is refused."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.commands._predictions import gather
from lightning_eff.config.evaluated import find_evaluated
from lightning_eff.core.errors import ConfigError
from tests.support.command_line import Command
from tests.support.sharded import save_sharded

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore:Experiment logs directory",
    "ignore:predict returned None",
    "ignore:Total length of",
)
MINE = """
import lightning.pytorch as pl, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def _log(self, stage, batch):
        self.log(f"{stage}_loss", self.layers(batch[0]).square().mean(), batch_size=len(batch[0]))

    def validation_step(self, batch, batch_idx):
        self._log("val", batch)
        self.log("score", float({2: 1.0, 4: 3.0, 6: 2.0}.get(self.global_step, 0.0)))

    def test_step(self, batch, batch_idx):
        self._log("test", batch)

    def predict_step(self, batch, batch_idx):
        return {"y": self.layers(batch[0]), "batch": [f"{batch_idx}"]}

class Bare(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 1))

    training_step = Net.training_step

class Silent(Net):
    def test_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        pass

class Data(pl.LightningDataModule):
    def rows(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(21, 8, generator=generator)), batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = rows

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(10, 1, 8))

class Streams(Data):
    def test_dataloader(self):
        return [DataLoader(Stream(), batch_size=4), DataLoader(Stream(), batch_size=5)]

class Empty(Data):
    def test_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(0, 8)), batch_size=4)

class NetOfTwo(Net):
    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_size", float(len(batch)), batch_size=len(batch))

class TrainData(pl.LightningDataModule):
    train_dataloader = Data.rows
"""
RECIPE = """
defaults:
  - run
  - trainer: default
  - optimizer: adamw
  - scheduler: none
  - precision: fp32
  - strategy: auto
  - checkpoint_io: durable
  - logger: csv
  - monitors: [efficiency_report, model_checkpoint]
  - callbacks: [empty_cache, exact_resume]
  - _self_
model: {_target_: my_evaluated.Net, width: 3}
data: {_target_: my_evaluated.Data}
optimizer: {lr: 0.1}
trainer: {max_steps: 6, val_check_interval: 2, accelerator: cpu}
"""
SCORE = ["monitors.model_checkpoint.monitor=score", "monitors.model_checkpoint.mode=max"]


@pytest.fixture
def train(empty_folder: Path, command: Command) -> Callable[..., Path]:
    """Return a function that trains `mine.yaml` and returns the run's folder."""
    Path("my_evaluated.py").write_text(MINE)
    Path("mine.yaml").write_text(RECIPE)

    def call(*words: str, recipe: str = "mine.yaml") -> Path:
        known = set(Path("outputs").glob("*/*"))
        command("train", recipe, *words, code=0)
        (run,) = [path for path in Path("outputs").glob("*/*/") if path not in known and path.name[0] == "2"]
        return run

    return call


def logged(run: Path, name: str) -> list[float]:
    """Return what a run's CSV logger has of a metric."""
    with (run / "metrics/metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def files(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_values_are_those_of_the_training_to_the_bit_and_the_run_stays(
    train: Callable[..., Path], command: Command
) -> None:
    run = train("ckpt_path=auto")
    before = files(run)
    state = torch.load(run / "checkpoints/step-6.ckpt", weights_only=True)["state_dict"]
    net = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    net.load_state_dict({key.removeprefix("layers.").replace("3.", "2."): v for key, v in state.items()})
    rows = torch.randn(21, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.cat([net(batch) for batch in rows.split(4)])
    for word in ("mine.yaml", str(run)):
        found = json.loads(command("validate", word, "--json", code=0)[1])
        assert found["metrics"]["val_loss"] == logged(run, "val_loss")[-1]
        assert (found["step"], found["num_batches"], found["ckpt_path"]) == (6, 6, "last")
        out = command("test", word, code=0)[1]
        lines = [f"test: {run}/checkpoints/step-6.ckpt (ckpt_path=last, step 6)", " Net on 6 batches of Data"]
        assert out.splitlines()[:2] == lines
        assert f" test_loss  {float(expected.square().mean()):.5f}"[:-1] in out
        out = command("predict", word, code=0)[1]
        assert "predictions: {y: float32 [21, 1], batch: list of 6}" in out
    assert before.items() <= files(run).items(), "what the run wrote is as it was"
    (new,) = files(run).keys() - before.keys()
    saved = torch.load(new, weights_only=True)
    assert torch.equal(saved["predictions"]["y"], expected)
    assert saved["predictions"]["batch"] == list("012345")
    assert saved["indices"] == list(range(21))
    assert len(list(Path("outputs/mine").iterdir())) == 1
    assert not Path("outputs/resolved").exists()


def test_best_is_what_the_monitored_metric_says(train: Callable[..., Path], command: Command) -> None:
    run = train(*SCORE)
    assert [p.name for p in sorted(run.glob("checkpoints/*"))] == ["step-4.ckpt", "step-6.ckpt"]
    for words in (
        ["mine.yaml", "ckpt_path=best"],
        [str(run), "ckpt_path=best"],
        [str(run), "ckpt_path=step-4.ckpt"],
    ):
        found = json.loads(command("validate", *words, "--json", code=0)[1])
        assert found["checkpoint"].endswith("/step-4.ckpt")
        assert found["metrics"]["val_loss"] == logged(run, "val_loss")[1] != logged(run, "val_loss")[2]
    Path("outputs").rename("moved")
    assert find_evaluated("best", Path("moved/mine"), remedy="").name == "step-4.ckpt", "the run was moved"
    (best,) = Path("moved").rglob("step-4.ckpt")
    best.unlink()
    with pytest.raises(ConfigError, match=r"is in its folder; it was .*/step-4.ckpt, which is not beside"):
        find_evaluated("best", Path("moved/mine"), remedy="")


def test_text_in_a_checkpoint_is_no_path(tmp_path: Path) -> None:
    """The best one's name is looked up beside the newest, and only if it was saved there."""
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    state = {"monitor": "loss", "best_model_path": "/old/checkpoints/a.ckpt", "dirpath": "/new/checkpoints"}
    torch.save({}, folder / "a.ckpt")
    os.utime(folder / "a.ckpt", (0, 0))

    def best(**changes: str) -> Path:
        torch.save({"callbacks": {"ModelCheckpoint": state | changes}}, folder / "z.ckpt")
        return find_evaluated("best", tmp_path, remedy="")

    with pytest.raises(ConfigError, match=r"it was /old/checkpoints/a.ckpt, which is not beside"):
        best()
    assert best(dirpath="/old/checkpoints") == folder / "a.ckpt"
    with pytest.raises(ConfigError, match=r"z.ckpt names none"):
        best(best_model_path="")
    (folder / "a.ckpt").unlink()
    with pytest.raises(ConfigError, match="which is not beside"):
        best(dirpath="/old/checkpoints")


def test_what_cannot_be_evaluated_is_said_with_a_remedy(train: Callable[..., Path], command: Command) -> None:
    err = command("validate", "mine.yaml", code=2)[2]
    assert "there is none under outputs/mine" in err
    assert "try: lightning-eff train mine.yaml" in err
    run = train()
    target = "model._target_=my_evaluated"
    for words, texts in [
        (["validate", "ckpt_path=best"], ["monitors.model_checkpoint.monitor was null", "=val_loss when"]),
        (["validate", "ckpt_path=no.ckpt"], ["ckpt_path='no.ckpt': expected an existing checkpoint"]),
        (["test", f"{target}.Bare"], ["test: Bare has no test_step", "try: def test_step"]),
        (["predict", f"{target}.Bare"], ["predict: Bare has no predict_step"]),
        (["test", "data._target_=my_evaluated.TrainData"], ["TrainData has no test_dataloader"]),
        (["predict", f"{target}.Silent"], ["Silent.predict_step returns nothing"]),
        (["validate", "trainer.limit_val_batches=0"], ["nothing was evaluated: trainer.limit_val_batches=0"]),
        (["test", "model.width=5"], ["size mismatch for layers.0.weight", f"try: lightning-eff test {run}"]),
        (["test", "data._target_=my_evaluated.Empty"], ["evaluated: Empty.test_dataloader has no batches"]),
        (["test", "launch=ray"], ["launch='ray': expected none", "try: launch=none"]),
    ]:
        err = command(words[0], "mine.yaml", *words[1:], code=2)[2]
        for text in texts:
            assert text in err, words
    assert "no metrics: test_step logs none" in command("test", "mine.yaml", f"{target}.Silent", code=0)[1]
    out = command("validate", str(run), "trainer.limit_val_batches=2", code=0)[1]
    assert "note: 2 of 6 batches: trainer.limit_val_batches=2; trainer.limit_val_batches=1.0 takes all" in out
    two = [f"{target}.NetOfTwo", "data._target_=my_evaluated.Streams", "--json"]
    found = json.loads(command("test", str(run), *two, code=0)[1])
    assert (found["num_batches"], found["metrics"]["test_size/dataloader_idx_1"]) == (5, 5.0)
    moved = shutil.move(run, Path("elsewhere"))
    err = command("validate", str(moved), code=2)[2]
    assert "try: lightning-eff validate RECIPE ckpt_path=elsewhere/checkpoints/NAME.ckpt" in err
    err = command("validate", "outputs/mine", code=2)[2]
    assert "outputs/mine is a folder, neither a run's folder" in err


def test_adapters_and_folders_of_shards_are_evaluated_as_they_were_trained(
    tiny: list[str], train: Callable[..., Path], command: Command
) -> None:
    words = [*tiny, "optimizer.lr=0.1", "precision=fp32"]
    for recipe in ("lm", "lora"):
        run = train(*words, recipe=recipe)
        for word in ([recipe, *words], [str(run)]):
            found = json.loads(command("validate", *word, "--json", code=0)[1])
            # Not to the bit: while it trains, the loss is computed in tiles.
            assert found["metrics"]["val_loss"] == pytest.approx(logged(run, "val_loss")[-1], abs=2e-6)
    (path,) = Path("outputs/lm").rglob("*.ckpt")
    value = logged(path.parent.parent, "val_loss")[-1]
    content = torch.load(path, weights_only=True)
    path.unlink()
    save_sharded(path, content, num_ranks=3)
    for word in (["lm", *words], ["fsdp2", *words, f"ckpt_path={path}"]):
        found = json.loads(command("validate", *word, "--json", code=0)[1])
        assert found["metrics"]["val_loss"] == pytest.approx(value, abs=1e-6)
        assert (found["checkpoint"], found["model"]) == (str(path), "GPT")
    assert "on 1 device, so that each sample counts once; trainer.devices=2" in found["notes"][0]
    err = command("validate", "lm", *tiny, f"ckpt_path={next(Path('outputs/lora').rglob('*.ckpt'))}", code=1)[
        2
    ]
    assert "it holds an adapter, and this run has none" in err


def test_batches_of_any_structure_are_joined() -> None:
    ones, two = torch.ones(2, 3), torch.zeros(1, 3)
    assert torch.equal(gather([ones, two]), torch.cat([ones, two]))
    first, second = gather([(ones, ["a", "b"]), (two, ["c"])])
    assert first.shape == (3, 3)
    assert second == ["a", "b", "c"]
    uneven: Any = [torch.ones(2, 3), torch.ones(2, 4)]
    assert gather(uneven) == uneven
    assert gather([torch.tensor(1.0), torch.tensor(2.0)]) == [1.0, 2.0]


@pytest.mark.slow
def test_two_ranks_write_a_file_each_and_every_sample_once(train: Callable[..., Path]) -> None:
    """In processes of their own, as started by the command; the limit is typed, so it is two."""
    run = train()
    words = ["predict", str(run), "trainer.devices=2"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_eff", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("each other rank has its own file") == 1
    parts = [torch.load(path, weights_only=True) for path in sorted(run.glob("predictions/*-of-2.pt"))]
    assert len(parts) == 2
    assert sorted(parts[0]["indices"] + parts[1]["indices"]) == list(range(21))
    assert sum(len(part["predictions"]["y"]) for part in parts) == 21
