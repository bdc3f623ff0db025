"""One optimizer step, exactly: against an independent loop in float64, SGD with momentum, 50 steps (T1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.core.errors import ConfigError
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.window import Window
from lightning_eff.precision.auto import AutoPrecision
from tests.support.language import (
    BATCH_SIZE,
    LanguageModel,
    assert_same_training,
    language_model,
    loader,
    token_rows,
    train_reference,
)
from tests.support.models import make_trainer

CASES = [
    # window, batches an epoch, weighted, clipping
    (1, 13, True, None),
    (2, 13, False, None),
    (2, 13, True, 0.05),
    (4, 13, False, 0.05),
    (5, 13, False, None),
    (5, 3, True, None),
    (4, 1, False, 0.05),
]


@pytest.mark.filterwarnings("ignore:GradientAccumulation. a step is")
@pytest.mark.parametrize(("window", "num_batches", "weighted", "clip"), CASES)
def test_a_step_is_that_of_the_window_as_one_batch(
    window: int, num_batches: int, weighted: bool, clip: float | None
) -> None:
    """Faults that this kills: no division, mean of means, a cut window divided by its nominal length, ..."""
    model, num_steps = language_model(weighted), 50
    accumulation = GradientAccumulation(global_batch_size=window * BATCH_SIZE)
    callbacks = [accumulation] if window > 1 else []
    keywords: dict[str, Any] = {"max_steps": num_steps, "gradient_clip_val": clip}
    trainer = make_trainer(callbacks=callbacks, **keywords)
    if window == 1:
        lightning_loop.install(trainer)
    trainer.fit(model, loader(num_batches))
    assert trainer.global_step == num_steps
    assert len(model.gradients) == num_steps
    expected = train_reference(weighted, window, clip, num_steps, num_batches)
    assert_same_training(model, expected, clip)
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    assert schedule.last_epoch == num_steps


def test_lightnings_own_step_is_another_one() -> None:
    """The control: what this is for. Windows of 4 over 13 batches, uneven weights."""
    model = language_model(True)
    make_trainer(max_steps=4, accumulate_grad_batches=4).fit(model, loader(13))
    expected = train_reference(True, 4, None, 4, 13)
    relative = (model.gradients[0] - expected.gradients[0]).norm() / expected.gradients[0].norm()
    assert relative > 0.02 or not torch.isfinite(relative)


def test_full_windows_without_weights_are_to_the_bit_lightnings() -> None:
    ours, theirs = language_model(False), language_model(False)
    make_trainer(callbacks=[GradientAccumulation(global_batch_size=6)], max_steps=8).fit(ours, loader(12))
    make_trainer(accumulate_grad_batches=3, max_steps=8).fit(theirs, loader(12))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        *(([weight] * 4, "a finite number of at least 0") for weight in (-1.0, float("nan"), float("inf"))),
        ([None, 1, None, 1], "a weight for some micro-batches of a window and none for others"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[Any], message: str) -> None:
    class Wrong(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch)[0], "loss_weight": weights[batch_idx]}

    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=[GradientAccumulation(global_batch_size=4)]).fit(Wrong(False), loader(4))


def assert_one_step_of(rows: list[int], model: LanguageModel, size: int, num_samples: int) -> None:
    """Train a step of a window of that size, against these samples as one batch."""
    x, y = token_rows(num_samples)
    callbacks = [GradientAccumulation(global_batch_size=size)]
    dataset = TensorDataset(x, y)
    make_trainer(callbacks=callbacks, max_steps=1).fit(model, DataLoader(dataset, batch_size=BATCH_SIZE))
    expected = language_model(False)
    expected.loss((x[rows], y[rows]))[0].backward()
    gradient = torch.cat([p.grad.flatten() for p in expected.parameters()])
    torch.testing.assert_close(model.gradients[0], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_micro_batch_that_is_left_out_does_not_count() -> None:
    class LeavesOut(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 4 == 1 else self.loss(batch)[0]

    torch.manual_seed(1)
    assert_one_step_of([0, 1, 4, 5, 6, 7], LeavesOut(False).double(), size=8, num_samples=8)


def test_a_short_last_batch_counts_for_the_samples_that_it_has() -> None:
    """Five samples in batches of two: the last one is not half of the window's second half."""
    assert_one_step_of([*range(5)], language_model(False), size=6, num_samples=5)


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")  # some CPUs compute float16
def test_a_step_that_the_scaler_skips_advances_nothing() -> None:
    class Overflows(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss, weight = self.loss(batch)
            broken = self.trainer.fit_loop.total_batch_idx == 5  # in the second window of four
            return {"loss": loss * (float("inf") if broken else 1.0), "loss_weight": weight}

    torch.manual_seed(1)
    model = Overflows(True)
    accumulation = GradientAccumulation(global_batch_size=8)
    trainer = make_trainer(
        callbacks=[accumulation], plugins=[AutoPrecision(precision="16-mixed")], max_steps=-1, max_epochs=1
    )
    trainer.fit(model, loader(12))
    assert trainer.global_step == 2
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    assert schedule.last_epoch == 2
    assert accumulation.outcome().numbers["skipped_steps"] == 1
    assert len(model.gradients) == 3
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_loop_is_installed_once_and_taken_out_again() -> None:
    trainer = make_trainer()
    before = trainer.fit_loop.epoch_loop.automatic_optimization
    first = lightning_loop.install(trainer)
    assert lightning_loop.install(trainer) is first
    lightning_loop.uninstall(trainer)
    lightning_loop.uninstall(trainer)
    assert trainer.fit_loop.epoch_loop.automatic_optimization is before
    assert "_should_accumulate" not in trainer.fit_loop.epoch_loop.__dict__

    class Theirs(type(before)):
        pass

    trainer.fit_loop.epoch_loop.automatic_optimization = Theirs(trainer)
    with pytest.raises(ConfigError, match="Lightning's own loop"):
        lightning_loop.install(trainer)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_run_that_asks_for_the_number_of_steps_goes_on_exactly(tmp_path: Path) -> None:
    """In the middle of an epoch, though Lightning then makes the loaders before it resumes."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2 and not (tmp_path / "stop.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "stop.ckpt")

    class Counts(LanguageModel):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 6
            return super().configure_optimizers()

    whole, rest = language_model(True), language_model(True)
    whole.__class__ = rest.__class__ = Counts
    for model, path in ((whole, None), (rest, tmp_path / "stop.ckpt")):
        callbacks = [GradientAccumulation(global_batch_size=4), *([Save()] if path is None else [])]
        trainer = make_trainer(callbacks=callbacks, max_steps=6, max_epochs=9)
        data = StatefulDataLoader(TensorDataset(*token_rows(24)), batch_size=BATCH_SIZE)
        trainer.fit(model, data, ckpt_path=path)
    assert len(rest.gradients) == 4
    for one, other in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_batch_that_weighs_nothing_has_a_gradient_of_zero_where_it_was_used() -> None:
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    window = Window(lambda: [used, unused])
    window.scale((used * 3.0).sum(), weight=0.0).backward()
    assert used.grad is not None
    assert float(used.grad) == 0.0
    assert unused.grad is None, "as DDP expects that finds unused parameters"
    window.scale(used.sum() / 0.0 * 0.0, weight=0.0).backward()  # not a number: both stand in for it
    assert float(used.grad) == 0.0
    assert unused.grad is not None
    assert float(unused.grad) == 0.0
