"""Every command and every Python block of README.md and docs/ runs."""

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

from lightning_eff import cli
from lightning_eff.commands._parser import parse
from lightning_eff.comparison import subprocess_trial
from lightning_eff.comparison.result_table import MEASURED, TrialResult
from lightning_eff.config.composition import recipe_app
from lightning_eff.config.recipes import RecipePath
from tests.support.command_line import TINY, Command
from tests.support.models import make_trainer

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {
    path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/"): path.read_text()
    for path in FILES
}
README = PAGES["README"]
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.SlowPathWarning",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:Experiment logs directory",
)


def blocks(kind: str, *pages: str) -> list[str]:
    """Return the fenced blocks of a kind, of some pages or of all."""
    texts = [PAGES[page] for page in pages or PAGES]
    return [block for text in texts for block in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)]


def run_blocks(page: str) -> dict[str, Any]:
    """Run a page's Python in one namespace, except for files and fragments; return the namespace."""
    names: dict[str, Any] = {"__name__": page}
    for block in blocks("python", page):
        if not block.startswith(("# ", "def ")):
            exec(compile(block, page, "exec"), names)
    return names


def commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [shlex.split(line, comments=True) for line in dict.fromkeys(line[2:] for line in lines)]


def write_files() -> None:
    for block in [*blocks("python"), *blocks("yaml")]:
        name = re.match(r"(?:# @package .*\n)?# (\S+\.(?:py|yaml))\n", block)
        if name:
            Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(name[1]).write_text(block)
    for block in blocks("json"):  # JSON has no comments, so the name is on a line before it
        name, _, content = block.partition("\n")
        Path(name.removeprefix("// ")).write_text(content)


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = "\n".join(PAGES.values())
    named = {words[1] for words in commands() if words[0] == "make"} | {
        *re.findall(r"`make ([\w-]+)`", texts)
    }
    assert {"run", "test", "check", "test-full", "docs", "pages"} <= named <= set(targets)


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("README", "emptied 2 times"),
        ("adapters", "['0']\n"),
        ("fabric", "[4, 4]"),
        ("checkpoints", ""),
        ("techniques/tiled_loss", "float32 loss: True"),
    ],
)
def test_the_python_of_a_page_prints(
    page: str, shown: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_blocks(page)
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(("page", "num_effective"), [("batch_size", 2), ("optimizers", 1), ("adapters", 2)])
def test_the_techniques_of_a_page_have_an_effect(page: str, num_effective: int, empty_folder: Path) -> None:
    readme, names = run_blocks("README"), run_blocks(page)
    callbacks, plugins = names["callbacks"], names.get("plugins", [])
    data = readme["TensorDataset"](torch.randn(64, 8))
    trainer = make_trainer(callbacks=callbacks, plugins=plugins, max_steps=4)
    trainer.fit(readme["Net"](), readme["DataLoader"](data, batch_size=32))
    # DataPreload measures: on a busy machine its workers may be faster.
    assert sum(technique.outcome().effective for technique in [*callbacks, *plugins]) >= num_effective


@pytest.mark.parametrize("page", ["techniques/triton_gemm", "planning"])
def test_a_page_shows_what_its_code_prints(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(page)
    assert capsys.readouterr().out in PAGES[page]


def test_readme_is_three_screens() -> None:
    assert len(README.splitlines()) <= 250
    assert len(README.split()) <= 2200


def write_own_data(tiny_llama: Path) -> None:
    """Write the model and the texts that the commands for users' data name."""
    shutil.copytree(tiny_llama, "my-model")
    Path("notes").mkdir()
    for index in range(20):
        Path("notes", f"{index}.txt").write_text("the cat sat on the mat\n" * 9)
    talk = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "sat"}]
    Path("more.jsonl").write_text(json.dumps({"text": "on the mat"}) + "\n")
    Path("talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 120)


def test_every_command_is_accepted(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check words, options and overrides as before a run; `test_every_command_runs` takes a minute."""
    monkeypatch.syspath_prepend(str(empty_folder))
    write_files()
    found: list[tuple[list[str], list[str], Any]] = []
    for words in commands():
        if words[1] == "cp":  # later commands train the copy
            assert cli.main(words[1:]) == 0
        options = parse(words[1:]) if words[0] == "lightning-eff" else None
        if options is not None and getattr(options, "recipe", ""):
            overrides = [each for each in options.overrides if not each.startswith("device")]
            found.append((overrides, words, options))
    accepted: set[tuple[str, str]] = set()
    # The longest first: a command is composed only for an option or a setting that was not composed before.
    for overrides, words, options in sorted(found, key=lambda each: -len(each[0])):
        settings = [key if "." in (key := each.partition("=")[0]) else each for each in overrides]
        new = {(options.recipe, each) for each in ["", *settings]}
        if new <= accepted:
            continue
        accepted |= new
        with recipe_app(options.recipe, overrides, RecipePath.of(options.config_dir)) as app:
            if "-m" in words:
                app.check_sweep()
            else:
                app.check()
    for name in ("my_project", "my_checked", "my_gan", "my_package", "compare_mine"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_every_command_runs(
    tiny: list[str], tiny_llama: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"measured": {"samples_per_s": 1.0, "peak_bytes": 1}}
    monkeypatch.setattr(subprocess_trial, "run", lambda *_, **__: TrialResult(MEASURED, report=report))
    write_files()
    write_own_data(tiny_llama)
    own_data = [word for word in TINY if word.startswith("trainer.accelerator")]
    for words in commands():
        if words[0] != "lightning-eff":
            continue
        extra: list[str] = []
        if words[1] == "compare":
            extra = ["--steps", "6", *([] if "--only" in words else ["--only", "baseline"]), *tiny]
        if words[1] in ("train", "validate", "test", "predict", "generate") and "--cfg" not in words:
            given = {word.partition("=")[0] for word in words}
            extra = [word for word in tiny if word.partition("=")[0] not in given]
            if {"full_finetune", "qlora", "long_context"} & {*words}:
                extra = [*own_data, "trainer.max_steps=2", "trainer.limit_val_batches=1"]
            if "images_large" in words:
                extra = [*own_data, "trainer.max_steps=2", "data.image_size=32", "data.num_val_images=2"]
            if {"numbers", "data=numbers", "mine/numbers.yaml", "gan"} & {*words} or words[2] == "mine":
                extra = [*own_data, "trainer.max_steps=2"]
            if "mine/checked.yaml" in words:  # with an epoch's end, at which `best` is known
                extra = [*own_data, "trainer.max_steps=20"]
            if "ckpt_path=last" in words:
                extra.append("trainer.max_steps=60")
                words = [word for word in words if not word.startswith("trainer.max_steps=")]  # noqa: PLW2901
        code, out, err = command(*words[1:], *extra)
        assert code == 0, (words, err)
        assert out or err


def test_every_optimizer_is_in_the_table() -> None:
    from lightning_eff.core import catalog

    for entry in catalog.options():
        if entry.name.startswith("optimizer/"):
            assert entry.name.rpartition("/")[2] in PAGES["optimizers"], entry.name


def test_nothing_is_promised_that_is_not_there() -> None:
    for name in re.findall(r"`((?:callbacks|precision|monitors|scheduler)/\w+)`", "\n".join(PAGES.values())):
        assert (ROOT / "conf" / f"{name}.yaml").is_file(), name


@pytest.mark.slow
def test_the_script_that_compares_prints_its_rows(empty_folder: Path) -> None:
    write_files()
    done = subprocess.run([sys.executable, "compare_mine.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ("baseline", "micro-batches of 16", "bf16")
    assert [line.strip().startswith(names) for line in done.stdout.splitlines()] == [False, True, True, True]
    assert done.stdout.count("measured") == 3
