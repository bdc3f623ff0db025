"""Recipes that YAML or Hydra cannot read, and search paths that would import: refused by name, exit 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_eff import cli
from tests.support.command_line import Command

ROOT = Path(__file__).parent.parent.parent
TOP = "defaults: [lm, _self_]\n"
HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "tab": (f"{TOP}trainer:\n\tmax_steps: 2\n", "mine/tab.yaml:3: found character '\\t'"),
    "duplicate": (f"{TOP}seed: 1\nseed: 2\n", "mine/duplicate.yaml:3: found duplicate key"),
    "nul": (f"{TOP}seed: 1\0\n", "mine/nul.yaml:1: unacceptable character"),
    "latin": (
        f"{TOP}output_root: café\n".encode("latin-1"),
        "mine/latin.yaml:1: 'utf-8' codec can't",
    ),
    "tag": (f"{TOP}seed: !!python/object/apply:os.system ['touch touched']\n", "mine/tag.yaml:2: tag !!"),
    "alias": (f"{TOP}trainer: &a\n  x: *a\n", "mine/alias.yaml:3: aliases are not read: ${key} refers to"),
    "reused": (
        f"{TOP}trainer:\n  max_steps: &n 2\n  max_epochs: *n\n",
        "mine/reused.yaml:4: aliases are",
    ),
    "nested": (
        f"{TOP}seed: {'[' * 3000}{']' * 3000}\n",
        "mine/nested.yaml:1: maximum recursion",
    ),
    "digits": (f"{TOP}seed: {'1' * 5000}\n", "mine/digits.yaml:1: Exceeds the limit"),
    "hex": (f"{TOP}seed: 0x_\n", "mine/hex.yaml:1: invalid literal for int()"),
    "keys": (f"{TOP}? [a, b]\n: 1\n", "mine/keys.yaml:2: found unhashable key"),
    "null": (f"{TOP}model: {{~: 1}}\n", "mine/null.yaml:1: Incompatible key type"),
    "number": ("defaults:\n  - {1: x}\n", "defaults that never end or have no name, in "),
    "two": (f"{TOP}---\nseed: 3\n", "mine/two.yaml:2: but found another document"),
    "itself": ("defaults: [itself]\n", "/mine/itself.yaml"),
    "circle": ("defaults:\n  - lm\n  - other\n", "/mine/circle.yaml or "),
    "option": ("defaults:\n  - lm\n  - override logger: circle\n", "/mine/option.yaml or "),
    "seven": ("# a recipe\ndefaults: 7\n", "defaults must be a list"),
    "entry": ("defaults:\n  - lm\n  - 7\n", "Unsupported type in defaults : int"),
    "listed": ("defaults:\n  - {model: [7]}\n", "nested list items must be strings"),
    "empty": ("", "mine/empty.yaml:1: expected lines of key: value"),
    "folderless": ("seed: 1\n", "output_root=None: expected a folder; a recipe that builds on baseline"),
    "unset": (f"{TOP}output_root: ${{oc.env:NO_SUCH_VARIABLE}}\n", "'NO_SUCH_VARIABLE' not found"),
    "infinite": (f"{TOP}seed: ${{seed}}\n", "seed: Recursive interpolation detected"),
    "long": (f"defaults: [{'a' * 5000}]\n", "File name too long"),
    "no_recipe": (
        "defaults: [baselin, _self_]\n",
        "mine/no_recipe.yaml: baselin: no such recipe; did you mean 'baseline'?",
    ),
    "no_option": (
        "defaults:\n  - lm\n  - override precision: atuo\n",
        "mine/no_option.yaml: precision=atuo: no such option; did you mean 'auto'?",
    ),
    "two_recipes": ("defaults: [lm, baseline]\n", "Multiple values for"),
    "two_options": ("defaults:\n  - baseline\n  - data: text\n", "Multiple values for data"),
    "unread": (f"{TOP}x: {{a: 1}}\n", "x={'a': 1}: expected a known key"),
}
"""A recipe's content, and what is said about it."""


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> None:
    """Work in a folder with the hostile recipes in `mine`."""
    mine = Path("mine")
    (mine / "logger").mkdir(parents=True)
    for name, (content, _) in HOSTILE.items():
        data = content if isinstance(content, bytes) else content.encode()
        (mine / f"{name}.yaml").write_bytes(data)
    (mine / "other.yaml").write_text("defaults:\n  - circle\n")
    (mine / "logger" / "circle.yaml").write_text("defaults: [circle]\n")
    (mine / "logger" / "broken.yaml").write_text("name: x\n\ty: 1\n")


def check_refused(answer: tuple[int, str, str], text: str) -> None:
    code, out, err = answer
    assert text in err
    assert code == 2, err
    assert out == ""
    said = err[err.index("error: ") :]  # behind what optional packages print when they are first imported
    assert len(said.strip().splitlines()) <= cli.MAX_ERROR_LINES
    assert "Traceback" not in err
    assert not Path("outputs").exists()
    assert not Path("touched").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_recipe_that_cannot_be_read_is_refused_by_file_and_line(name: str, command: Command) -> None:
    answer = command("train", name, "--config-dir", "mine")
    check_refused(answer, HOSTILE[name][1])
    assert "[one,other]" not in answer[2], "the remedy of an override"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("plan", "tab"), HOSTILE["tab"][1]),
        (("compare", "tab"), HOSTILE["tab"][1]),
        (("plan", "lm", "logger=broken"), "mine/logger/broken.yaml:2: found character '\\t'"),
    ],
)
def test_every_verb_refuses_them_and_options_that_an_override_chooses(
    words: tuple[str, ...], text: str, command: Command
) -> None:
    check_refused(command(*words, "--config-dir", "mine"), text)


OVERRIDES: dict[str, str] = {
    f"seed={'1' * 5000}": "...: not an override",
    f"trainer.max_steps={2**64}": "trainer.max_steps='184467440737...': expected a whole number of at most",
    f"seed={'[' * 3000}{']' * 3000}": "...: not an override",
    "trainer.gradient_clip_val=nan": "trainer.gradient_clip_val=nan: expected a number",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val=-1: expected a number of at least 0",
    "optimizer.betas=[nan,0.9]": "optimizer.betas[0]=nan: expected a number",
    "hydra.launcher._target_=os.system": "_target_='os.system': expected a Launcher",
    "hydra.sweeper._target_=subprocess.Popen": "_target_='subprocess.Popen': expected a Sweeper",
    "hydra.launcher=${hydra.sweeper}": "hydra.launcher._target_='${hydra.sweeper}': expected a Launcher",
    "+hydra.launcher.x._target_=os.system": "hydra.launcher.x._target_='os.system': expected no class here",
    "+hydra.sweeper.custom_search_space=os.system": "custom_search_space='os.system': expected null",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda each: each[:40])
def test_a_value_that_nothing_can_use_is_refused_before_a_folder_is_made(
    override: str, command: Command
) -> None:
    check_refused(command("train", "lm", override), OVERRIDES[override])


LONG = "a" * 5000
LONG_PATHS: dict[str, tuple[str, ...]] = {
    "ckpt_path": ("train", "lm", f"ckpt_path={LONG}"),
    "output_root": ("train", "lm", f"output_root=/tmp/{LONG}"),
    "logger.csv.save_dir": ("train", "lm", f"logger.csv.save_dir=outputs/{LONG}"),
    "--config-dir": ("train", "lm", "--config-dir", LONG),
    "callbacks.peft_adapter.base_checkpoint": (
        *("train", "lora", "trainer.accelerator=cpu"), f"callbacks.peft_adapter.base_checkpoint={LONG}",
    ),
    "RUN": ("export", LONG),
}  # fmt: skip


@pytest.mark.parametrize("key", LONG_PATHS)
def test_a_path_that_no_file_can_have_is_refused_by_its_key(key: str, command: Command) -> None:
    answer = command(*LONG_PATHS[key])
    check_refused(answer, "...: expected a path that can be looked up (File name too long)")
    assert f"error: {key}='" in answer[2]
    assert len(answer[2][answer[2].index("error: ") :]) < 500


def test_a_key_that_a_recipe_does_not_have_is_not_advised_as_it_was_typed(command: Command) -> None:
    Path("mine/own.yaml").write_text("output_root: outputs\n")
    for key, value in (("seed", "3"), ("precision", "fp32")):
        answer = command("train", "own", f"{key}={value}", "--config-dir", "mine")
        check_refused(answer, f"error: {key}: this recipe does not have it\n  try: +{key}=...\n")


def test_a_package_on_the_search_path_is_not_imported(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sly").mkdir()
    Path("sly/__init__.py").write_text("from pathlib import Path\nPath('touched').touch()\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for override in ("hydra.searchpath=[pkg://sly]", "++hydra.searchpath=['structured://sly']"):
        check_refused(
            command("plan", "lm", override), "expected nothing here: --config-dir DIR adds a folder"
        )
    for content in ("hydra:\n  searchpath: ['pkg://sly']\n", "x: {searchpath: ['pkg://sly']}\nhydra: ${x}\n"):
        Path("mine/sly.yaml").write_text(TOP + content)
        check_refused(
            command("plan", "sly", "--config-dir", "mine"), "hydra.searchpath=['pkg://sly']: expected"
        )


def test_several_folders_of_ones_own_are_searched_and_a_date_is_a_text(command: Command) -> None:
    Path("a folder/logger").mkdir(parents=True)
    Path("a folder/logger/slow.yaml").write_text((ROOT / "conf" / "logger" / "csv.yaml").read_text())
    Path("mine/own.yaml").write_text(
        "defaults: [lm, override logger: slow, _self_]\noutput_root: 2026-01-01\n"
    )
    folders = ["--config-dir", "a folder", "--config-dir", "mine"]
    out = command("train", "own", *folders, "--cfg", "job", code=0)[1]
    assert "output_root: '2026-01-01'" in out
