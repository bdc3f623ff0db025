"""Every command and every block of the README runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.rows import MEASURED, Result
from tests.support.command_line import TINY, Command
from tests.support.models import make_trainer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.SlowPathWarning",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:Experiment logs directory",
)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [shlex.split(line[2:], comments=True) for line in lines]


def write_files() -> None:
    for block in [*blocks("python"), *blocks("yaml")]:
        name = re.match(r"# (\S+\.(?:py|yaml))\n", block)
        if name:
            Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(name[1]).write_text(block)


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {words[1] for words in commands() if words[0] == "make"} | set(
        re.findall(r"`make ([\w-]+)`", README)
    )
    assert {"run", "test", "check", "test-full"} <= named <= set(targets)


def test_the_python_blocks_run_in_a_plain_trainer_and_under_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_trainer, cut, choice, adapted, low, in_fabric, own_loop, kernels = [
        block for block in blocks("python") if not block.startswith(("# ", "def "))
    ]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(in_trainer, "README.md", "exec"), names)
    assert "emptied 2 times" in capsys.readouterr().out
    exec(compile(cut, "README.md", "exec"), names)
    data = names["TensorDataset"](torch.randn(64, 8))
    net = names["Net"]()
    make_trainer(callbacks=names["callbacks"], max_steps=4).fit(net, names["DataLoader"](data, batch_size=32))
    assert [each.outcome().effective for each in names["callbacks"]] == [True, True]
    exec(compile(choice, "README.md", "exec"), names)
    loader = names["DataLoader"](names["TensorDataset"](torch.randn(8, 8)))
    make_trainer(callbacks=names["callbacks"], max_steps=4).fit(names["Net"](), loader)
    assert "freed one by one" in names["choice"].outcome().did
    own = {"__name__": "readme"}
    exec(compile(adapted, "README.md", "exec"), own)
    assert capsys.readouterr().out == "['0']\n"
    make_trainer(callbacks=own["callbacks"], max_steps=2).fit(names["Net"](), loader)
    assert own["callbacks"][0].outcome().effective
    exec(compile(low, "README.md", "exec"), own)
    make_trainer(callbacks=own["callbacks"], plugins=own["plugins"], max_steps=2).fit(names["Net"](), loader)
    assert "nf4 in 1 frozen layers" in own["plugins"][0].outcome().did
    exec(compile(in_fabric, "README.md", "exec"), {"__name__": "readme"})
    assert "[4, 4]" in capsys.readouterr().out
    names = {"__name__": "readme"}
    exec(compile(own_loop, "README.md", "exec"), names)
    assert names["layer"].weight.grad is not None
    capsys.readouterr()
    exec(compile(kernels, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out in README, "the explanation that is shown is the one that is printed"


def write_own_data(tiny_llama: Path) -> None:
    """Write what the section on a model and texts of one's own speaks of."""
    shutil.copytree(tiny_llama, "my-model")
    Path("notes").mkdir()
    for index in range(20):
        Path("notes", f"{index}.txt").write_text("the cat sat on the mat\n" * 9)
    talk = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "sat"}]
    Path("more.jsonl").write_text(json.dumps({"text": "on the mat"}) + "\n")
    Path("talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 120)


def test_every_command_runs(
    tiny: list[str], tiny_llama: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"measured": {"samples_per_s": 1.0, "peak_bytes": 1}}
    monkeypatch.setattr(subprocess_trial, "run", lambda *_, **__: Result(MEASURED, report=report))
    write_files()
    write_own_data(tiny_llama)
    own_data = [word for word in TINY if word.startswith("trainer.accelerator")]
    for words in commands():
        if words[0] != "lightning-eff":
            continue
        extra: list[str] = []
        if words[1] == "compare":
            extra = ["--steps", "6", *([] if "--only" in words else ["--only", "baseline"]), *tiny]
        if words[1] == "train" and "--cfg" not in words:
            uses_numbers = "numbers" in words or "data=numbers" in words
            given = {word.partition("=")[0] for word in words}
            extra = (
                own_data if uses_numbers else [word for word in tiny if word.partition("=")[0] not in given]
            )
            if {"full_finetune", "qlora"} & {*words}:
                extra = [*own_data, "trainer.max_steps=2", "trainer.limit_val_batches=1"]
            if "ckpt_path=last" in words:
                extra.append("trainer.max_steps=60")
                words.remove("trainer.max_steps=320")
        if "data=numbers" in words:
            extra.append("trainer.max_steps=2")
        code, out, err = command(*words[1:], *extra)
        assert code == 0, (words, err)
        assert out or err


def test_every_technique_is_in_the_table() -> None:
    from lightning_eff.core import catalog

    for entry in catalog.options():
        if entry.kind == "technique":
            assert entry.name in README or entry.name.rpartition("/")[2] in README, entry.name
    for option in ("bf16_mixed", "fp16_mixed", "bf16_true", "fp32", "tf32", "adamw", "sgd", "cosine"):
        assert f"`{option}`" in README


def test_nothing_is_promised_that_is_not_there() -> None:
    for name in re.findall(r"`((?:callbacks|precision|monitors|scheduler)/\w+)`", README):
        assert (ROOT / "conf" / f"{name}.yaml").is_file(), name


@pytest.mark.slow
def test_the_script_that_compares_prints_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files()
    done = subprocess.run([sys.executable, "compare_mine.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ("baseline", "in parts of 16", "bf16")
    assert [line.strip().startswith(names) for line in done.stdout.splitlines()] == [False, True, True, True]
    assert done.stdout.count("measured") == 3
