"""Loggers get the learning rate, gradient norm, throughput and memory of the run, computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler

from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.logged import norm_of
from tests.support.logged import events_of, rows_of
from tests.support.models import Net, make_loader, make_trainer

EFF = ("learning_rate", "gradient_norm", "samples_per_second", "data_wait", "memory_mib")


class ByHand(Net):
    """Keeps each step's learning rate and its gradient norm in float64."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.rates: list[float] = []
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.5))  # changed in place
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        gradients = [p.grad.double().flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.linalg.vector_norm(torch.cat(gradients))))


def test_each_logger_of_a_plain_trainer_gets_the_figures_of_the_logged_steps(
    net: Callable[..., Net], tmp_path: Path, clock: SimpleNamespace
) -> None:
    torch.manual_seed(1)
    model, report = ByHand(), EfficiencyReport(dirpath=tmp_path)

    class Ticks(torch.utils.data.Dataset[Any]):
        """Each batch of 4 takes 2 seconds, of which half a second is a wait for data."""

        data = make_loader().dataset

        def __getitem__(self, index: int) -> Any:
            clock.now += 0.125
            return self.data[index]

        def __len__(self) -> int:
            return 40

    step = model.training_step

    def training_step(*arguments: Any) -> Any:
        clock.now += 1.5
        return step(*arguments)

    def validation_step(*_: Any) -> None:
        clock.now += 100.0  # no part of a batch

    model.training_step = training_step  # pyright: ignore[reportAttributeAccessIssue]
    model.validation_step = validation_step  # pyright: ignore[reportAttributeAccessIssue]
    profiler = SimpleProfiler()
    loggers = [CSVLogger(tmp_path, "a", ""), TensorBoardLogger(str(tmp_path), "b", "")]
    trainer = make_trainer(
        callbacks=[report], logger=loggers, log_every_n_steps=3, accumulate_grad_batches=2, max_epochs=3,
        max_steps=-1, gradient_clip_val=0.01, val_check_interval=2, num_sanity_val_steps=0, profiler=profiler,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(Ticks(), batch_size=4), make_loader(4))
    assert len(profiler.recorded_durations["run_training_batch"]) == 30, "the profiler does its own work"
    rows = rows_of(tmp_path / "a")
    assert list(rows) == [3, 6, 9, 12, 15]
    assert len(model.rates) == 15
    for number, row in rows.items():
        assert row["learning_rate"] == model.rates[number - 1] == pytest.approx(0.5 / number, rel=1e-6)
        assert row["gradient_norm"] == pytest.approx(model.norms[number - 1], rel=1e-6)
    counted, *timed = rows.values()
    assert sorted(counted) == ["gradient_norm", "learning_rate", "memory_mib"], "its batches are not timed"
    for row in timed:
        assert sorted(row) == sorted(EFF)
        assert (row["samples_per_second"], row["data_wait"]) == (2.0, 0.25)
    assert rows[15]["memory_mib"] == report.report["measured"]["peak_bytes"] / 2**20
    events = events_of(tmp_path / "b")
    assert list(events) == list(rows)
    for number, row in events.items():
        assert row == pytest.approx(rows[number], rel=1e-6)


class Adversarial(Net):
    """Two optimizers in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=lr) for each, lr in ((self, 0.5), (self, 0.25))]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            optimizer.step()


def test_several_optimizers_have_a_rate_each_and_no_norm(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "a", "")
    callbacks = [EfficiencyReport(dirpath=tmp_path)]
    trainer = make_trainer(callbacks=callbacks, logger=logger, log_every_n_steps=4, max_steps=12)
    trainer.fit(Adversarial(), make_loader())
    rows = rows_of(tmp_path / "a")
    assert list(rows) == [4, 8, 12]
    assert {(row["learning_rate"], row["learning_rate_2"]) for row in rows.values()} == {(0.5, 0.25)}
    assert not any("gradient_norm" in row for row in rows.values())


def test_norms_of_bfloat16_and_sparse_gradients_are_of_float32() -> None:
    values = torch.full((300,), 0.1, dtype=torch.bfloat16)
    assert norm_of([values]) == pytest.approx(float(values.double().norm()), rel=1e-6)
    sparse = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (4,), check_invariants=True)
    assert norm_of([sparse, torch.tensor(4.0)]) == 5.0
    assert norm_of([]) is None
