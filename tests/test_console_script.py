"""The installed command in its own process, with a model in the current folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_script_trains_a_model_of_the_current_folder(empty_folder: Path) -> None:
    """A console script starts without the current folder on its path."""
    Path("my_model.py").write_text(MODEL)
    done = script("train", "baseline", *OWN, cwd=empty_folder)
    assert done.stderr.startswith("model: my_model.Checked ")
    assert "Finished 2 optimizer steps" in done.stdout


ALL = ["plan", "baseline", "optimizer=adamw_8bit", "+callbacks=peft_adapter", "precision=frozen_int8"]
ERROR = "error: optimizer=adamw_8bitt: no such option"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "printed", "error"),
    [
        ([*ALL, "trainer.accelerator=cpu"], 0, "predicted peak of a step", ""),
        (["train", "baseline", "optimizer=adamw_8bitt"], 2, "", ERROR),
        (["train", "lm", "--info", "searchpath"], 0, "Config search path", ""),
    ],
)
def test_messages_of_libraries_are_not_printed(
    words: list[str], code: int, printed: str, error: str, tmp_path: Path
) -> None:
    """torchao and bitsandbytes log missing parts, torch logs deprecations, Hydra logs to two streams."""
    done = script(*words, cwd=tmp_path, code=code)
    assert done.stderr.startswith(error)
    assert len(done.stderr.splitlines()) == bool(error)
    assert done.stdout.count(printed) == 1 if printed else done.stdout == ""
    assert list(tmp_path.iterdir()) == []
