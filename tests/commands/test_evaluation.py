"""`validate`, `test` and `predict`: which checkpoint, its values to the bit, and what is rejected."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_eff.config.ckpt_path import find_evaluated
from lightning_eff.core.errors import ConfigError
from tests.support.command_line import Command
from tests.support.own_recipe import MODULE, RECIPE
from tests.support.sharded import save_sharded

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore:Experiment logs directory",
    "ignore:Total length of",
    "ignore:The val_check_interval",
)
MINE = """
class Steps(Net):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("score", float({2: 1.0, 4: 3.0, 6: 2.0}.get(self.global_step, 0.0)))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", self.layers(batch[0]).square().mean(), batch_size=len(batch[0]))

    def predict_step(self, batch, batch_idx):
        return {"y": self(batch), "batch": batch_idx}

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(10, 1, 8))

class Streams(Data):
    def test_dataloader(self):
        return [DataLoader(Stream(), batch_size=4), DataLoader(Stream(), batch_size=5)]

"""
OWN = ["model._target_=my_own.Steps", "optimizer.lr=0.1", "trainer.val_check_interval=2", "logger=csv"]
OWN += ["monitors=[efficiency_report,model_checkpoint]", "callbacks=[empty_cache,exact_resume]"]


@pytest.fixture
def train(empty_folder: Path, command: Command) -> Callable[..., Path]:
    """Return a function that trains a recipe and returns the run's folder."""
    Path("my_own.py").write_text(MODULE + MINE)
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


def test_metrics_and_predictions_match_the_training_to_the_bit_and_the_run_stays_unchanged(
    train: Callable[..., Path], command: Command
) -> None:
    run = train(*OWN, "ckpt_path=auto")
    before = files(run)
    state = torch.load(run / "checkpoints/step-6.ckpt", weights_only=True)["state_dict"]
    net = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    net.load_state_dict({key.removeprefix("layers.").replace("3.", "2."): v for key, v in state.items()})
    rows = torch.randn(21, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.cat([net(batch) for batch in rows.split(4)])
    for words in (["mine.yaml", *OWN], [str(run)]):
        found = json.loads(command("validate", *words, "--json", code=0)[1])
        assert found["metrics"]["val_loss"] == logged(run, "val_loss")[-1]
        assert (found["step"], found["num_batches"], found["ckpt_path"]) == (6, 6, "last")
        assert found["notes"] == []
    lines = command("test", str(run), code=0)[1].splitlines()
    assert lines[:2] == [
        f"test: {run}/checkpoints/step-6.ckpt (ckpt_path=last, step 6)",
        " Steps on 6 batches of Data",
    ]
    assert lines[2].startswith(f" test_loss  {float(expected.square().mean()):.5f}"[:-1])
    assert f"{run}/predictions/step-6.pt" in command("predict", str(run), code=0)[1]
    assert before.items() <= files(run).items(), "what the run wrote is as it was"
    (new,) = files(run).keys() - before.keys()
    saved = torch.load(new, weights_only=True)
    assert torch.equal(torch.cat([batch["y"] for batch in saved["predictions"]]), expected)
    assert [batch["batch"] for batch in saved["predictions"]] == list(range(6))
    assert [index for batch in saved["indices"] for index in batch] == list(range(21))
    assert len(list(Path("outputs/mine").iterdir())) == 1


def test_best_is_the_best_checkpoint_by_the_monitored_metric(
    train: Callable[..., Path], command: Command
) -> None:
    run = train(*OWN, "monitors.model_checkpoint.monitor=score", "monitors.model_checkpoint.mode=max")
    assert [p.name for p in sorted(run.glob("checkpoints/*"))] == ["step-4.ckpt", "step-6.ckpt"]
    found = json.loads(command("validate", str(run), "ckpt_path=best", "--json", code=0)[1])
    assert found["checkpoint"].endswith("/step-4.ckpt")
    assert found["metrics"]["val_loss"] == logged(run, "val_loss")[1] != logged(run, "val_loss")[2]
    Path("outputs").rename("moved")
    assert find_evaluated("best", Path("moved/mine"), remedy="").name == "step-4.ckpt", "the run was moved"


def test_a_path_in_a_checkpoint_is_never_followed(tmp_path: Path) -> None:
    """Only the file name of the best checkpoint is used, in the folder of the newest checkpoint."""
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    state = {"monitor": "loss", "best_model_path": "/old/checkpoints/a.ckpt", "dirpath": "/old/checkpoints"}
    torch.save({}, folder / "a.ckpt")
    os.utime(folder / "a.ckpt", (0, 0))

    def best(**changes: str) -> Path:
        torch.save({"callbacks": {"ModelCheckpoint": state | changes}}, folder / "z.ckpt")
        return find_evaluated("best", tmp_path, remedy="")

    assert best() == folder / "a.ckpt"
    for changes in ({"dirpath": "/new/checkpoints"}, {"best_model_path": ""}):
        with pytest.raises(ConfigError, match="ckpt_path='best'"):
            best(**changes)
    (folder / "a.ckpt").unlink()
    with pytest.raises(ConfigError, match="ckpt_path='best'"):
        best()


def test_limits_loaders_and_runs_that_cannot_be_evaluated(
    train: Callable[..., Path], command: Command
) -> None:
    err = command("validate", "mine.yaml", *OWN, code=2)[2]
    assert "try: lightning-eff train mine.yaml" in err
    run = train(*OWN)
    for verb, word, text in [
        ("validate", "ckpt_path=best", "try: monitors.model_checkpoint.monitor=val_loss"),
        ("test", "model._target_=my_own.Net", "`test_step()`"),
        ("validate", "trainer.limit_val_batches=0", "trainer.limit_val_batches=0"),
    ]:
        assert text in command(verb, "mine.yaml", *OWN, word, code=2)[2], word
    moved = shutil.move(run, Path("elsewhere"))
    out = command("validate", str(moved), "trainer.limit_val_batches=2", code=0)[1]
    assert "note: at most 2 of the batches" in out
    found = json.loads(command("test", str(moved), "data._target_=my_own.Streams", "--json", code=0)[1])
    assert found["num_batches"] == 5
    assert {"test_loss/dataloader_idx_0", "test_loss/dataloader_idx_1"} <= found["metrics"].keys()


@pytest.mark.slow
def test_adapters_and_sharded_checkpoints_are_evaluated_as_they_were_trained(
    tiny: list[str], train: Callable[..., Path], command: Command
) -> None:
    words = [*tiny, "optimizer.lr=0.1", "precision=fp32"]
    for recipe in ("lm", "lora"):
        run = train(*words, recipe=recipe)
        found = json.loads(command("validate", str(run), "--json", code=0)[1])
        # Not to the bit: while it trains, the loss is computed in tiles.
        assert found["metrics"]["val_loss"] == pytest.approx(logged(run, "val_loss")[-1], abs=2e-6)
    (path,) = Path("outputs/lm").rglob("*.ckpt")
    value = logged(path.parent.parent, "val_loss")[-1]
    content = torch.load(path, weights_only=True)
    path.unlink()
    save_sharded(path, content, num_ranks=3)
    found = json.loads(command("validate", "fsdp2", *words, f"ckpt_path={path}", "--json", code=0)[1])
    assert found["metrics"]["val_loss"] == pytest.approx(value, abs=1e-6)
    assert (found["checkpoint"], found["model"]) == (str(path), "GPT")
    assert "on 1 device" in found["notes"][0]
    adapter = next(Path("outputs/lora").rglob("*.ckpt"))
    assert "+callbacks=peft_adapter" in command("validate", "lm", *tiny, f"ckpt_path={adapter}", code=1)[2]


@pytest.mark.slow
def test_two_ranks_write_a_file_each_and_every_sample_once(train: Callable[..., Path]) -> None:
    """In processes of their own, as started by the command; the limit is typed, so it is two."""
    run = train(*OWN)
    words = [sys.executable, "-m", "lightning_eff", "predict", str(run), "trainer.devices=2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("predictions of rank 0: ") == 1
    parts = [torch.load(path, weights_only=True) for path in sorted(run.glob("predictions/*-of-2.pt"))]
    assert len(parts) == 2
    assert sorted(i for part in parts for batch in part["indices"] for i in batch) == list(range(21))
    assert sum(len(batch["y"]) for part in parts for batch in part["predictions"]) == 21
