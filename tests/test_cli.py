"""The command: exit codes, short errors with the root cause first, answers without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_eff import cli
from lightning_eff.commands._completion import SCRIPTS, complete
from lightning_eff.core.errors import UsageError
from lightning_eff.run import make
from tests.support.command_line import Command

pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
MINE = """
from pathlib import Path
import lightning.pytorch as pl
import torch
from lightning_eff.models.gpt import GPT
from torch.utils.data import DataLoader, TensorDataset

class Fails(GPT):
    def training_step(self, batch, batch_idx):
        raise KeyError('the label is missing')

class Hub(GPT):
    def __init__(self, *, api_token: str, **sizes: object) -> None:
        super().__init__(**sizes)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        assert self.hparams['api_token'] == 'hunter2'
        if batch_idx == 2 and Path("closed").exists():
            raise RuntimeError(f"rejected: {self.hparams['api_token']}")
        return super().training_step(batch, batch_idx)

class Nothing(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(0, 8)))
"""


@pytest.fixture
def mine(tiny: list[str]) -> list[str]:
    """Return overrides for a tiny run, next to a module of the user."""
    Path("mine.py").write_text(MINE)
    return tiny


def test_answers_come_without_torch_or_lightning() -> None:
    """Help, lists, a config and completion, in one process."""
    program = """
import contextlib, io, sys, lightning_eff
dir(lightning_eff)
assert not {"torch", "lightning", "hydra", "omegaconf"} & set(sys.modules)
from lightning_eff import cli

def answer(*words):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(words) == 0, words
    loaded = {"torch", "lightning"} & set(sys.modules)
    assert not loaded, (words, loaded)
    return printed.getvalue()

shown = answer("--help")
assert all(name in shown for name in ("train", "ls", "lm", "baseline")), shown
for verb in cli._parser.build()[1]:
    assert f"usage: lightning-eff {verb}" in answer(verb, "--help")
assert "--row" in answer("compare", "-h")
assert answer("--version").startswith("lightning-eff ")
answer("ls")
assert "Costs:" in answer("ls", "triton_gemm")
assert "max_steps: 7" in answer("train", "lm", "trainer.max_steps=7", "--cfg", "job")
assert "precision=tf32" in answer("--complete", "train", "lm", "pre")
assert answer("--complete", "train", "--mu") == "--multirun\\n"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_run_that_fails_exits_1_root_cause_first(mine: list[str], command: Command) -> None:
    _, out, err = command("train", "lm", *mine, "model._target_=mine.Fails", "--json", code=1)
    lines = err.strip().splitlines()[-3:]
    assert lines[0] == "error: KeyError: 'the label is missing'"
    assert "mine.py:10 in training_step" in lines[1]
    log = Path(lines[2].removeprefix("  traceback: "))
    assert "Traceback" in log.read_text()
    assert "Traceback" not in err
    report = json.loads(out)
    assert (report["status"], report["reason"]) == ("failed", "KeyError: 'the label is missing'")
    assert "Traceback" in command("train", "lm", "sed=3", "--debug", code=2)[2]


def test_a_run_resumes_from_the_newest_intact_checkpoint(tiny: list[str], command: Command) -> None:
    """No schedule of the recipe saves before the first run ends."""
    words = ["train", "lm", *tiny, "checkpoint_io.asynchronous=true"]
    out = command(*words, "trainer.val_check_interval=100", "--json", code=0)[1]
    (path,) = Path("outputs").rglob("*.ckpt")
    (row,) = [row for row in json.loads(out)["ledger"] if row["technique"] == "checkpoint_io/durable"]
    assert (path.name, row["status"], row["numbers"]["num_saves"]) == ("step-2.ckpt", "applied", 1)
    assert row["numbers"]["saved_bytes"] == path.stat().st_size
    err = command(*words, "ckpt_path=last", code=2)[2]
    assert "try: trainer.max_steps=4" in err
    assert len(list(Path("outputs/lm").iterdir())) == 1, "the rejected run left no folder"
    damaged = Path("outputs/lm/9999-01-01_00-00-00/checkpoints/step-3.ckpt")
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(path.read_bytes()[:-1])
    orphan = path.with_name(".durable-0123456789abcdef.tmp")
    orphan.touch()
    _, out, err = command(*words, "ckpt_path=last", "trainer.max_steps=5", code=0)
    assert f"{damaged} is not loaded" in err
    assert "Finished 3 optimizer steps" in out
    assert len(list(Path("outputs/lm").glob("*/checkpoints/step-5.ckpt"))) == 1
    assert not orphan.exists()


class Hostile:
    """Unpickling it would make a file."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("touched"),)


def test_a_damaged_or_hostile_checkpoint_is_rejected_unread(tiny: list[str], command: Command) -> None:
    command("train", "baseline", *tiny, code=0)
    (good,) = Path("outputs/baseline").glob("*/checkpoints/*.ckpt")
    flipped = bytes(b ^ 255 if 200 <= i < 260 else b for i, b in enumerate(good.read_bytes()))
    for each in (flipped, {"global_step": 0, "x": Hostile()}):
        Path("bad.ckpt").write_bytes(each) if isinstance(each, bytes) else torch.save(each, "bad.ckpt")
        err = command("train", "baseline", *tiny, "ckpt_path=bad.ckpt", "trainer.max_steps=4", code=2)[2]
        assert "ckpt_path='bad.ckpt': " in err
    assert not Path("touched").exists()
    assert len(list(Path("outputs/baseline").iterdir())) == 1


@pytest.mark.filterwarnings("ignore:hyperparameters left out of checkpoints")
def test_no_file_of_a_run_holds_a_secret_and_it_is_composed_again(
    mine: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run fails with the secret in its error; the second run resumes it."""
    monkeypatch.setenv("API_TOKEN", "hunter2")
    words = ["train", "baseline", *mine, "model._target_=mine.Hub", "model.api_token=${oc.env:API_TOKEN}"]
    words += ["trainer.max_steps=3", "ckpt_path=auto"]
    Path("closed").touch()
    assert "rejected: ***" in command(*words, code=1)[2]
    (run,) = Path("outputs/baseline").iterdir()
    assert "rejected: ***" in (run / "error.log").read_text()
    (checkpoint,) = run.glob("checkpoints/*.ckpt")
    assert "api_token" not in torch.load(checkpoint, weights_only=True)["hyper_parameters"]
    command("validate", str(run), code=0)
    Path("closed").unlink()
    assert json.loads(command(*words, "--json", code=0)[1])["first_step"] == 2
    files = [file for file in Path("outputs").rglob("*") if file.is_file()]
    assert [file for file in files if b"hunter2" in file.read_bytes()] == []


def test_a_variable_that_a_secret_names_must_be_set() -> None:
    with pytest.raises(UsageError, match=r"^data: .*NO_SUCH_VARIABLE"):
        make("data", {"_target_": "mine.Data", "token": "${oc.env:NO_SUCH_VARIABLE}"})


def test_a_sweep_runs_each_combination(tiny: list[str], command: Command) -> None:
    out = command("train", "lm", *tiny, "-m", "callbacks=[],[empty_cache]", "--json", code=0)[1]
    rows = json.loads(out)["rows"]
    assert [(row["status"], row["num_steps"]) for row in rows] == [("finished", 2)] * 2
    empty_cache = "lightning_eff.callbacks.empty_cache.EmptyCache"
    assert [row["settings"] for row in rows] == [
        {"callbacks.empty_cache": None},
        {"callbacks.empty_cache": empty_cache},
    ]
    folders = sorted(path.parent.name for path in Path("outputs/lm").glob("sweep_*/*/efficiency.json"))
    assert folders == ["0", "1"]


def test_a_printed_config_is_a_recipe(empty_folder: Path, command: Command) -> None:
    out = command("train", "lm", "trainer.max_steps=7", "--cfg", "job", code=0)[1]
    assert "max_steps: 7" in out
    assert not Path("outputs").exists()
    Path("mine").mkdir()
    Path("mine/frozen.yaml").write_text(out)
    again = command("train", "frozen", "--config-dir", "mine", "--cfg", "job", code=0)[1]
    assert again == out


def test_completion_knows_options_keys_and_shells(command: Command) -> None:
    assert complete(["train", "lm", "+callbacks=em"]) == ["+callbacks=empty_cache"]
    assert "callbacks.empty_cache.every_n_steps=" in complete(["train", "lm", "callbacks.empty"])
    assert complete(["ls", "callbacks/em"]) == ["callbacks/empty_cache"]
    for shell in SCRIPTS:
        assert "lightning-eff --complete" in command("--completion", shell)[1]


@pytest.mark.filterwarnings("ignore:Total length of")
def test_a_run_without_a_batch_is_an_error(mine: list[str], command: Command) -> None:
    words = ["data._target_=mine.Nothing", "model.vocab_size=9", "model.context_length=8"]
    err = command("train", "baseline", *mine[:5], *words, "~monitors.text_sample", code=2)[2]
    assert "trained on nothing" in err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_real_bash_completes_what_follows_an_equals_sign() -> None:
    """Bash ends a word at "=", so a completion is only the part after it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = SCRIPTS["bash"]
    for line in ("lightning-eff train lm +callbacks=mi", "lightning-eff train lm optimizer=ada"):
        program += f"COMP_LINE='{line}' COMP_POINT={len(line)}; _lightning_eff; echo \"${{COMPREPLY[@]}}\"\n"
    words = ["bash", "--norc", "-c", program]
    done = subprocess.run(words, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True)
    one, several = done.stdout.splitlines()
    assert one == "micro_batch"
    assert {"adafactor", "adamw"} <= set(several.split())
    assert "=" not in several, "bash lists only what follows the sign"


def test_an_error_of_a_library_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile("import torch\ntorch.load('missing.pt')\n", str(tmp_path / "own.py"), "exec")
    with pytest.raises(FileNotFoundError) as error:
        exec(code, {})
    assert f"{tmp_path / 'own.py'}:2 in" in cli._error_lines(error.value, [])[1]
