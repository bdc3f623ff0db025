"""The installed command, in a process and a folder of its own, with a model that lies in that folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import Command
from tests.support.own_recipe import MODULE

SCRIPT = Path(sys.executable).parent / "lightning-eff"
MODEL = f"""
import sys
{MODULE}
class Checked(Net):
    def on_train_start(self):
        if sys.argv[0].endswith("lightning-eff"):
            assert "peft" not in sys.modules, "it takes seconds, and this run has no adapters"
"""
OWN = ["model._target_=my_model.Checked", "model.width=3", "data._target_=my_model.Data"]
OWN += [
    "~monitors.text_sample",
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
]


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
    assert done.stderr.startswith("model: my_model.Checked has no context_length")
    assert "Finished 2 optimizer steps" in done.stdout
    _, out, err = command("plan", "baseline", *OWN, code=0)
    assert len(set(err.splitlines())) == 2, "but for a line on what Net has not, and one on Data"
    assert "callbacks/optimizer_choice" in out
    _, out, err = command("export", "baseline", "--json", code=0)
    assert err == ""
    assert list(json.loads(out)["files"]) == ["model.safetensors"]


ALL = ["plan", "baseline", "optimizer=adamw_8bit", "+callbacks=peft_adapter", "precision=frozen_int8"]
ERROR = "error: optimizer=adamw_8bitt: no such option; did you mean 'adamw_8bit'?\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "printed", "error"),
    [
        ([*ALL, "trainer.accelerator=cpu"], 0, "predicted peak of a step", ""),
        (["train", "baseline", "optimizer=adamw_8bitt"], 2, "", ERROR),
        (["train", "lm", "--info", "searchpath"], 0, "Config search path", ""),
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
