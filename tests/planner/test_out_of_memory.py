"""An OOM error names the phase, the largest tensors and an override; with it the run finishes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_eff.core import host_memory
from lightning_eff.core.host_memory import HostMemoryLimit
from lightning_eff.planner import out_of_memory
from lightning_eff.planner.out_of_memory import free, phase_of
from tests.support.command_line import Command
from tests.support.models import Net, make_loader, make_trainer

MIB = 2**20
ROOT = Path(__file__).parents[2]

WIDE = f"""
import torch
from lightning_eff.models.gpt import GPT

class Wide(GPT):
    numbers = 8 * {MIB}
    most = 10**9

    def training_step(self, batch, batch_idx):
        rows = len(batch[0])
        loss = super().training_step(batch, batch_idx)
        if rows > self.most and type(loss.detach()) is torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        x = torch.ones(rows, self.numbers) * next(self.parameters()).sum()
        for _ in range(3):
            x = x.sin()
        return loss + 0.0 * x.mean()

class SmallTwo(Wide):
    numbers = {MIB} // 16
    most = 2

class NoRoom(Wide):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        if type(next(self.parameters()).data) is torch.Tensor:
            raise MemoryError
"""
"""A sample holds three times `numbers` floats for the backward pass; more than `most` samples do not fit."""


def words_for(model: str, tiny: list[str]) -> list[str]:
    Path("wide_models.py").write_text(WIDE)
    return ["train", "baseline", *tiny, "data.batch_size=8", f"model._target_=wide_models.{model}"]


def message(err: str) -> list[str]:
    """Return the lines of the one error message; they are the last."""
    assert "Traceback" not in err
    assert len(re.findall("^error:", err, re.MULTILINE)) == 1
    return err[err.index("\nerror:") :].strip().splitlines()


def test_a_model_that_does_not_fit_is_reported_before_the_run_begins(
    tiny: list[str], command: Command
) -> None:
    code, _, err = command(*words_for("NoRoom", tiny))
    assert (code, message("\n" + err)[0]) == (4, "error: out of memory during setup")
    assert not Path("outputs/baseline").exists()


def test_a_step_that_fits_is_not_named_as_the_cause(
    tiny: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step needs 10 MiB, and 50 are free, so another batch than the first has failed."""
    monkeypatch.setattr(
        host_memory, "host_memory_limit", lambda: HostMemoryLimit("cgroup /box", 150 * MIB, 100 * MIB)
    )
    code, _, err = command(*words_for("SmallTwo", tiny))
    assert code == 4
    _, held, reason, remedy = message(err)
    assert "50.0 MiB is free" in held
    assert "the first batch does not explain this" in reason
    assert remedy == "  try: +callbacks=micro_batch"


@pytest.mark.parametrize(
    ("phase", "hook"),
    [
        ("backward", "on_after_backward"),
        ("optimizer_step", "on_before_optimizer_step"),
        ("save_checkpoint", "on_save_checkpoint"),
    ],
)
def test_the_phase_is_read_from_the_traceback(phase: str, hook: str, tmp_path: Path) -> None:
    def fail(*_: Any) -> NoReturn:
        raise MemoryError

    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer = make_trainer(callbacks=[saver], enable_checkpointing=True, val_check_interval=2)
    model = Net()
    setattr(model, hook, fail)
    with pytest.raises(MemoryError) as failed:
        trainer.fit(model, make_loader(), make_loader(4))
    assert phase_of(failed.value) == out_of_memory.PHASES[phase]


def test_locals_in_the_traceback_are_freed() -> None:
    held: list[weakref.ref[Tensor]] = []

    def step() -> None:
        activations = torch.ones(3)
        held.append(weakref.ref(activations))
        try:
            raise MemoryError
        except MemoryError as error:
            msg = "out of memory"
            raise RuntimeError(msg) from error

    with pytest.raises(RuntimeError, match="out of memory") as failed:
        step()
    assert held[0]() is not None
    free(failed.value)
    assert held[0]() is None


CHILD = """
import resource, sys
from pathlib import Path
import lightning_eff.run
from lightning_eff import cli

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
taken = int(status["VmData"].split()[0]) * 1024 + {extra}
resource.setrlimit(resource.RLIMIT_DATA, (taken, taken))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/limits").is_file(), reason="needs Linux")
def test_with_a_real_limit_the_override_makes_the_difference(tiny: list[str]) -> None:
    """A step takes 1.75 GiB, and this process may have 600 MiB more than without a model."""
    words = words_for("Wide", tiny)

    def train(*more: str) -> subprocess.CompletedProcess[str]:
        program = CHILD.format(extra=600 * MIB)
        path = os.pathsep.join([str(ROOT), str(Path.cwd())])
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, *words, *more],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip

    failed = train()
    assert failed.returncode == 4, failed.stderr
    first, held, remedy, _ = message(failed.stderr)
    assert first == "error: out of memory during the forward pass: tried to allocate 256.0 MiB"
    assert " free on CPU (ulimit -d): activations 1.0 GiB" in held
    override = remedy.removeprefix("  try: ").split()
    (file,) = Path("outputs/baseline").glob("*/efficiency.json")
    found = json.loads(file.read_text())["out_of_memory"]
    assert (found["phase"], found["overrides"]) == ("the forward pass", override)
    assert found["holders"][0]["category"] == "activations"
    trained = train(*override)
    assert trained.returncode == 0, trained.stderr
