"""A script that knows nothing of it gets advice at its end, and trains as it would without."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.planner import attach
from lightning_eff.planner.advise_after import Advise, in_a_fork
from lightning_eff.planner.fakes import skeleton
from lightning_eff.planner.scripts import Script
from tests.support.models import Deep, make_loader, make_trainer


class Saves(Deep):
    """Has hooks that write files, and state that a copy must not share."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0

    def on_train_end(self) -> None:
        self.ended += 1
        Path("weights.pt").write_text("trained")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def fit(module: pl.LightningModule, **keywords: Any) -> pl.Trainer:
    trainer = make_trainer(**{"max_steps": 3, **keywords})
    trainer.fit(module, make_loader())
    return trainer


def test_advice_is_printed_and_the_training_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    pl.seed_everything(1)
    plain = Saves()
    fit(plain)
    after = torch.rand(1)
    pl.seed_everything(1)
    module = Saves()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(module, callbacks=[Advise()])
    assert torch.equal(torch.rand(1), after), "random numbers go on as they would"
    assert all(map(torch.equal, plain.state_dict().values(), module.state_dict().values()))
    assert module.ended == 1, "no dry run ends a training"
    words = said(caplog)
    assert "predicted peak of a step" in words
    assert "GradientCheckpointing()" in words
    assert 'Mixed(precision="bf16-mixed")' in words
    assert "time, expected" in words


def test_what_a_trainer_has_is_what_is_predicted() -> None:
    """The peak is the one that the report measures, with accumulation, clipping and a technique of ours."""
    keywords: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_steps": 4}
    report = EfficiencyReport()
    trainer = fit(Deep(), callbacks=[GradientCheckpointing(), report], **keywords)
    batch = skeleton(next(iter(make_loader())))
    found = Script(Deep(), batch, trainer).expect(())
    assert found.prediction.reason == ""
    assert found.num_bytes == report.report["measured"]["peak_bytes"]


SEEN: list[float] = []


class Meddles(Deep):
    """Has a step that changes what others see, an end of its own, and hooks that save."""

    def __deepcopy__(self, memo: object) -> Meddles:
        return self

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        SEEN.append(loss.item())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        torch.save(self.state_dict(), "last.pt")
        with Path("steps.csv").open("a") as file:
            file.write("step\n")


def test_what_a_module_does_beside_its_step_is_done_once(caplog: pytest.LogCaptureFixture) -> None:
    SEEN.clear()
    module = Meddles()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(module, callbacks=[Advise()])
    assert "dvice" in said(caplog)
    assert len(SEEN) == 3
    assert Path("steps.csv").read_text() == 3 * "step\n"
    saved = torch.load("last.pt")
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


def test_work_in_a_fork_writes_nothing_and_ends_in_time(tmp_path: Path) -> None:
    def writes() -> str:
        (tmp_path / "file").write_text("x")
        return "written"

    assert in_a_fork(writes, limit_s=30.0) == "written"
    assert not (tmp_path / "file").exists()
    assert in_a_fork(lambda: sys.exit(7), limit_s=30.0) == "no advice: SystemExit: 7"
    assert in_a_fork(lambda: os._exit(7), limit_s=30.0) == "no advice: its process died"
    endless = in_a_fork(lambda: str(time.sleep(3600)), limit_s=0.5)
    assert endless == "no advice: none was found within 0.5 s"


class OutOfMemory(Deep):
    """Runs out of memory where it has memory at all."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if type(loss.detach()) is Tensor:
            text = "CUDA out of memory. Tried to allocate 2.00 GiB"
            raise torch.OutOfMemoryError(text)
        return loss


def test_what_prevents_it_is_a_line_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    module = Deep()
    module.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue] - it cannot be copied
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(module, callbacks=[Advise()])
    assert "no advice: " in said(caplog)


def test_who_ran_out_of_memory_is_told_what_would_save_some(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"), pytest.raises(torch.OutOfMemoryError):
        fit(OutOfMemory(), callbacks=[Advise()])
    assert "GradientCheckpointing()" in said(caplog)


def test_the_variable_brings_report_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attach.callbacks() == []
    monkeypatch.setenv(attach.VARIABLE, "1")
    assert [type(each) for each in attach.callbacks()] == [EfficiencyReport, Advise]
