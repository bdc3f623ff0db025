"""A recipe or override cannot run code, be read endlessly or leave files: exit code 2, and its key.

Most recipes that YAML or Hydra cannot read are in tests/test_messages.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_eff import cli
from tests.support.command_line import Command

ROOT = Path(__file__).parent.parent.parent
TOP = "defaults: [lm, _self_]\n"
TAB = f"{TOP}trainer:\n\tmax_steps: 2\n"
LONG = "a" * 5000


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> None:
    """Work in a folder with one of the user's."""
    Path("mine/logger").mkdir(parents=True)


def check_rejected(answer: tuple[int, str, str], text: str) -> None:
    code, out, err = answer
    assert text in err
    assert code == 2, err
    assert out == ""
    said = err[err.index("error: ") :]  # after what optional packages print when they are first imported
    assert len(said.strip().splitlines()) <= cli.MAX_ERROR_LINES
    assert len(said) < 500
    assert "Traceback" not in err
    assert not Path("outputs").exists()
    assert not Path("touched").exists()


def test_plan_and_compare_reject_a_broken_recipe_or_option(command: Command) -> None:
    Path("mine/tab.yaml").write_text(TAB)
    Path("mine/logger/broken.yaml").write_text("name: x\n\ty: 1\n")
    check_rejected(command("compare", "tab", "--config-dir", "mine"), "mine/tab.yaml:3: ")
    check_rejected(
        command("plan", "lm", "logger=broken", "--config-dir", "mine"), "mine/logger/broken.yaml:2: "
    )


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("hydra.launcher._target_", ("train", "lm", "hydra.launcher._target_=os.system")),
        ("hydra.sweeper._target_", ("train", "lm", "hydra.sweeper=${hydra.run}")),
        ("seed", ("train", "lm", f"seed={'1' * 5000}")),
        ("seed", ("train", "lm", f"seed={'[' * 3000}{']' * 3000}")),
        ("output_root", ("train", "lm", f"output_root=/tmp/{LONG}")),
        ("--config-dir", ("train", "lm", "--config-dir", LONG)),
        (
            "callbacks.peft_adapter.base_checkpoint",
            ("train", "lora", "trainer.accelerator=cpu", f"callbacks.peft_adapter.base_checkpoint={LONG}"),
        ),
    ],
)
def test_a_value_that_hydra_would_run_or_cannot_hold_is_rejected_by_its_key(
    key: str, words: tuple[str, ...], command: Command
) -> None:
    check_rejected(command(*words), f"error: {key}=")


def test_a_key_that_a_recipe_does_not_have_is_not_advised_as_it_was_typed(command: Command) -> None:
    Path("mine/own.yaml").write_text("output_root: outputs\n")
    for key, value in (("seed", "3"), ("precision", "fp32")):
        answer = command("train", "own", f"{key}={value}", "--config-dir", "mine")
        check_rejected(answer, f"  try: +{key}=...\n")


def test_a_package_on_the_search_path_is_not_imported(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sly").mkdir()
    Path("sly/__init__.py").write_text("from pathlib import Path\nPath('touched').touch()\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for override in ("hydra.searchpath=[pkg://sly]", "++hydra.searchpath=['structured://sly']"):
        check_rejected(command("plan", "lm", override), "hydra.searchpath=")
    for content in ("hydra:\n  searchpath: ['pkg://sly']\n", "x: {searchpath: ['pkg://sly']}\nhydra: ${x}\n"):
        Path("mine/sly.yaml").write_text(TOP + content)
        check_rejected(command("plan", "sly", "--config-dir", "mine"), "hydra.searchpath=")


def test_several_folders_of_the_user_are_searched_and_a_date_is_a_text(command: Command) -> None:
    Path("a folder/logger").mkdir(parents=True)
    Path("a folder/logger/slow.yaml").write_text((ROOT / "conf" / "logger" / "csv.yaml").read_text())
    Path("mine/own.yaml").write_text(
        "defaults: [lm, override logger: slow, _self_]\noutput_root: 2026-01-01\n"
    )
    folders = ["--config-dir", "a folder", "--config-dir", "mine"]
    out = command("train", "own", *folders, "--cfg", "job", code=0)[1]
    assert "output_root: '2026-01-01'" in out
