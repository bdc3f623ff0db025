"""A script that knows nothing of it gets advice at its end, and trains as it would without."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_eff import attach
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.planning.afterwards import Advise
from lightning_eff.planning.scripts import Script
from tests.conftest import Deep, make_loader, make_trainer


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
    report, advice = EfficiencyReport(), Advise()
    trainer = fit(Deep(), callbacks=[GradientCheckpointing(), report, advice], **keywords)
    found = Script(advice._module, advice._batch, trainer).expect(())
    assert found.prediction.reason == ""
    assert found.num_bytes == report.report["measured"]["peak_bytes"]


def test_the_model_is_remembered_as_it_was_and_without_memory() -> None:
    advice = Advise()
    module = Deep()
    fit(module, callbacks=[advice])
    assert all(p.is_meta for p in advice._module.parameters())
    assert advice._module._trainer is None
    assert module.trainer is not None


class Locked(Deep):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class OutOfMemory(Deep):
    """Runs out of memory where it has memory at all."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if type(loss.detach()) is Tensor:
            text = "CUDA out of memory. Tried to allocate 2.00 GiB"
            raise torch.OutOfMemoryError(text)
        return loss


def test_what_prevents_it_is_a_line_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(Locked(), callbacks=[Advise()])
    assert "no advice: the model cannot be copied" in said(caplog)


def test_who_ran_out_of_memory_is_told_what_would_save_some(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"), pytest.raises(torch.OutOfMemoryError):
        fit(OutOfMemory(), callbacks=[Advise()])
    assert "GradientCheckpointing()" in said(caplog)


def test_the_variable_brings_report_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attach.callbacks() == []
    monkeypatch.setenv(attach.VARIABLE, "1")
    assert [type(each) for each in attach.callbacks()] == [EfficiencyReport, Advise]
