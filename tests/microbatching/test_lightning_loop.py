"""Exact optimizer steps, compared with an independent loop in float64: SGD with momentum, 50 steps (T1)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.core.errors import ConfigError, ConflictWarning
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
from tests.support.ranks import is_equal

CASES = [
    # window, batches per epoch, weighted, clipping
    (2, 13, True, 0.05),
    (4, 13, False, 0.05),
    (5, 3, True, None),
]


@pytest.mark.filterwarnings("ignore:GradientAccumulation. a step is")
@pytest.mark.parametrize(("window", "num_batches", "weighted", "clip"), CASES)
def test_a_step_equals_the_step_on_the_whole_window(
    window: int, num_batches: int, weighted: bool, clip: float | None
) -> None:
    """Faults that this detects: no division, mean of means, a cut window divided by its nominal length."""
    model, num_steps = language_model(weighted), 50
    callbacks = [GradientAccumulation(global_batch_size=window * BATCH_SIZE)]
    trainer = make_trainer(callbacks=callbacks, max_steps=num_steps, gradient_clip_val=clip)
    trainer.fit(model, loader(num_batches))
    assert trainer.global_step == len(model.gradients) == num_steps
    expected = train_reference(weighted, window, clip, num_steps, num_batches)
    assert_same_training(model, expected, clip)
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    assert schedule.last_epoch == num_steps


def test_lightnings_own_accumulation_has_another_gradient() -> None:
    """The negative control: windows of 4 over 13 batches, uneven weights."""
    model = language_model(True)
    make_trainer(max_steps=4, accumulate_grad_batches=4).fit(model, loader(13))
    expected = train_reference(True, 4, None, 4, 13)
    relative = (model.gradients[0] - expected.gradients[0]).norm() / expected.gradients[0].norm()
    assert relative > 0.02 or not torch.isfinite(relative)


def test_full_windows_without_weights_are_bit_identical_to_lightnings() -> None:
    ours, theirs = language_model(False), language_model(False)
    make_trainer(callbacks=[GradientAccumulation(global_batch_size=6)], max_steps=8).fit(ours, loader(12))
    make_trainer(accumulate_grad_batches=3, max_steps=8).fit(theirs, loader(12))
    assert is_equal([*ours.parameters()], [*theirs.parameters()])


@pytest.mark.parametrize("weights", [[float("nan")] * 4, [None, 1, None, 1]])
def test_invalid_weights_are_rejected(weights: list[Any]) -> None:
    class Wrong(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch)[0], "loss_weight": weights[batch_idx]}

    with pytest.raises(ValueError, match="training_step returned"):
        make_trainer(callbacks=[GradientAccumulation(global_batch_size=4)]).fit(Wrong(False), loader(4))


def assert_one_step_of(rows: list[int], model: LanguageModel, size: int, num_samples: int) -> None:
    """Compare a step of one window with a step on these samples as one batch."""
    x, y = token_rows(num_samples)
    callbacks = [GradientAccumulation(global_batch_size=size)]
    dataset = TensorDataset(x, y)
    make_trainer(callbacks=callbacks, max_steps=1).fit(model, DataLoader(dataset, batch_size=BATCH_SIZE))
    expected = language_model(False)
    expected.loss((x[rows], y[rows]))[0].backward()
    gradient = torch.cat([p.grad.flatten() for p in expected.parameters()])
    torch.testing.assert_close(model.gradients[0], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_does_not_count() -> None:
    class LeavesOut(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 4 == 1 else self.loss(batch)[0]

    torch.manual_seed(1)
    assert_one_step_of([0, 1, 4, 5, 6, 7], LeavesOut(False).double(), size=8, num_samples=8)


def test_a_short_last_batch_counts_by_its_samples() -> None:
    assert_one_step_of([*range(5)], language_model(False), size=6, num_samples=5)


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")  # some CPUs compute float16
def test_a_step_that_the_scaler_skips_advances_neither_schedule_nor_global_step() -> None:
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


def test_the_loop_is_installed_once_and_removed_but_replaces_no_other() -> None:
    trainer = make_trainer()
    before = trainer.fit_loop.epoch_loop.automatic_optimization
    first = lightning_loop.install(trainer)
    assert lightning_loop.install(trainer) is first
    lightning_loop.uninstall(trainer)
    assert trainer.fit_loop.epoch_loop.automatic_optimization is before
    assert "_should_accumulate" not in trainer.fit_loop.epoch_loop.__dict__
    trainer.fit_loop.epoch_loop.automatic_optimization = type("Theirs", (type(before),), {})(trainer)
    with pytest.raises(ConfigError):
        lightning_loop.install(trainer)


def test_a_micro_batch_of_weight_0_has_gradients_of_0() -> None:
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    window = Window(lambda: [used, unused])
    window.scale((used * 3.0).sum(), weight=0.0).backward()
    assert used.grad == 0.0
    assert unused.grad is None, "as DDP expects if it finds unused parameters"
    window.scale(used.sum() / 0.0 * 0.0, weight=0.0).backward()  # NaN, replaced by a sum over parameters
    assert used.grad == unused.grad == 0.0


class Batches:
    """Six batches of token rows, some of them None; its length is correct, too large or unknown."""

    def __init__(self, missing: tuple[int, ...], length: int | None) -> None:
        pairs = zip(*(rows.split(BATCH_SIZE) for rows in token_rows(6 * BATCH_SIZE)), strict=True)
        self.batches = [None if index in missing else pair for index, pair in enumerate(pairs)]
        self.length = length

    def __iter__(self) -> Any:
        return iter(self.batches)


class SizedBatches(Batches):
    def __len__(self) -> int:
        assert self.length is not None
        return self.length


class EndsEarly(LanguageModel):
    ends_at = -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.ends_at else None


def train_on(batches_of_steps: list[list[int]], num_epochs: int) -> LanguageModel:
    model, (x, y) = language_model(True), token_rows(6 * BATCH_SIZE)
    (optimizer,), (schedule,) = model.configure_optimizers()
    for batches in batches_of_steps * num_epochs:
        rows = [row for b in batches for row in range(b * BATCH_SIZE, (b + 1) * BATCH_SIZE)]
        optimizer.zero_grad()
        model.loss((x[rows], y[rows]))[0].backward()
        optimizer.step()
        schedule["scheduler"].step()
    return model


ENDS = [
    # missing batches, ends at, length, batches of each step, split
    ((4, 5), -1, None, [[0, 1, 2], [3]], "accumulation"),
    ((0, 1, 5), -1, 6, [[2, 3, 4]], "micro-batches"),
    (tuple(range(6)), -1, None, [], "accumulation"),
    ((2,), 4, 6, [[0, 1, 3]], "Trainer's own"),
    ((4,), -1, 5, [[0, 1, 2], [3]], "micro-batches"),  # `limit_train_batches`
]
SPLITS: dict[str, Any] = {
    "accumulation": (lambda: [GradientAccumulation(num_batches=3)], {}),
    "micro-batches": (lambda: [GradientAccumulation(num_batches=3), MicroBatch(micro_batch_size=1)], {}),
    "Trainer's own": (lambda: [MicroBatch()], {"accumulate_grad_batches": 3}),
}


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None", "ignore:GradientAccumulation. a step is")
@pytest.mark.filterwarnings("ignore:MicroBatch had no effect")
@pytest.mark.parametrize(("missing", "ends_at", "length", "steps", "split"), ENDS)
def test_a_window_ends_where_the_epoch_ends(
    missing: tuple[int, ...], ends_at: int, length: int | None, steps: list[list[int]], split: str
) -> None:
    model = language_model(True)
    model.__class__, model.ends_at = EndsEarly, ends_at
    make, keywords = SPLITS[split]
    keywords = keywords | ({"limit_train_batches": 5} if length == 5 else {})
    trainer = make_trainer(callbacks=make(), max_steps=-1, max_epochs=2, **keywords)
    trainer.fit(model, Batches(missing, length) if length is None else SizedBatches(missing, 6))
    expected = train_on(steps, num_epochs=2)
    assert len(model.gradients) == trainer.global_step == 2 * len(steps)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == trainer.global_step
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=1e-12, atol=1e-14)


def test_a_loader_that_ends_before_its_length_drops_the_rest_with_a_warning() -> None:
    model = language_model(True)
    trainer = make_trainer(callbacks=[GradientAccumulation(num_batches=4)], max_steps=-1, max_epochs=2)
    with pytest.warns(ConflictWarning) as caught:
        trainer.fit(model, SizedBatches((), 9))
    texts = "".join(str(each.message) for each in caught)
    assert "the last 2 batches of epoch 0" in texts
    assert "the last 2 batches of epoch 1" in texts
    expected = train_on([[0, 1, 2, 3]], 2)
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")
def test_a_float16_window_whose_last_batch_has_no_loss_steps() -> None:
    class LeavesOut(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.loss(batch)[0]

    model = LeavesOut(False)
    before = [parameter.clone() for parameter in model.parameters()]
    precision = AutoPrecision(precision="16-mixed")
    callbacks = [GradientAccumulation(num_batches=2)]
    make_trainer(callbacks=callbacks, plugins=[precision], max_steps=1).fit(model, loader(2))
    assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def optimized(make: Any, num_batches: int, **keywords: Any) -> LanguageModel:
    class Optimized(LanguageModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    model = language_model(True)
    model.__class__ = Optimized
    x, y = token_rows(6)
    data = DataLoader(TensorDataset(x, y), batch_size=6 // num_batches)
    make_trainer(callbacks=make(), max_steps=2, **keywords).fit(model, data)
    return model


@pytest.mark.filterwarnings("ignore:GradientAccumulation. a step is")
def test_an_optimizer_that_evaluates_its_closure_again_needs_one_batch_per_step() -> None:
    expected, ours = optimized(list, 1), optimized(lambda: [MicroBatch(micro_batch_size=2)], 1)
    torch.testing.assert_close([*ours.parameters()], [*expected.parameters()], rtol=1e-9, atol=1e-11)
    for make, keywords in SPLITS.values():
        with pytest.raises(ConfigError) as caught:
            optimized(make, 3, **keywords)
        assert caught.value.key == "optimizer"


class Normalized(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:GradientAccumulation. a step is", "ignore:callbacks/micro_batch with")
@pytest.mark.filterwarnings("ignore:MicroBatch had no effect")
def test_an_epoch_without_backward_passes_trains_as_under_lightning() -> None:
    """StochasticWeightAveraging ends with an epoch that only updates the batch norms."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).double()
    models: list[pl.LightningModule] = []
    for callbacks, accumulate in (([], 4), ([GradientAccumulation(num_batches=4), MicroBatch()], 1)):
        averaging = pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
        keywords: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(callbacks=[averaging, *callbacks], **keywords)
        models.append(Normalized())
        trainer.fit(models[-1], DataLoader(TensorDataset(x), batch_size=4))
    assert is_equal(*(model.state_dict() for model in models))


def test_outputs_have_the_loss_that_lightning_documents() -> None:
    """The loss of `training_step` divided by `accumulate_grad_batches`."""

    class Outputs(pl.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))

    ours, expected = Outputs(), Outputs()
    make, _ = SPLITS["micro-batches"]
    make_trainer(callbacks=[*make(), ours]).fit(language_model(False), loader(8))
    make_trainer(callbacks=[expected], accumulate_grad_batches=3).fit(language_model(False), loader(8))
    assert ours.losses[:8] == pytest.approx(expected.losses[:8], rel=1e-12)
