"""GradientAccumulation: how many batches make a step, when that changes, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.core.errors import ConfigError, ConflictError, ConflictWarning
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from tests.support.models import Net, make_loader, make_trainer


class Steps(pl.Callback):
    """Remembers at which batches a step was made."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int]] = []
        self._last = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._last:
            self._last = trainer.global_step
            self.at.append((trainer.current_epoch, batch_idx))


def steps(accumulation: GradientAccumulation, net: Any, num_batches: int = 10, **keywords: Any) -> Steps:
    seen = Steps()
    trainer = make_trainer(callbacks=[accumulation, seen], **({"max_steps": -1, "max_epochs": 2} | keywords))
    trainer.fit(net(), make_loader(4 * num_batches))
    assert trainer.accumulate_grad_batches == 1, "as it was before"
    return seen


def test_the_number_of_micro_batches_follows_from_the_global_batch(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(global_batch_size=12)
    assert steps(accumulation, net).at == [(epoch, batch) for epoch in (0, 1) for batch in (2, 5, 8, 9)]
    assert accumulation.outcome().did == "3 batches of 4 a step; 2 steps cut short by the end of an epoch"
    assert accumulation.outcome().numbers["accumulate_grad_batches"] == [3]


def test_epochs_shorter_than_a_window_make_one_step_each_and_a_warning(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(global_batch_size=80)
    with pytest.warns(ConflictWarning, match="a step is 20 batches, but an epoch has only 3"):
        assert steps(accumulation, net, num_batches=3).at == [(0, 2), (1, 2)]
    assert accumulation.outcome().numbers["cut_steps"] == 2
    limited = steps(GradientAccumulation(global_batch_size=16), net, limit_train_batches=6)
    assert limited.at == [(0, 3), (0, 5), (1, 3), (1, 5)]


def test_a_schedule_by_epoch_changes_the_window_where_an_epoch_begins(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(schedule={0: 8, 1: 20})
    assert steps(accumulation, net).at == [(0, 1), (0, 3), (0, 5), (0, 7), (0, 9), (1, 4), (1, 9)]
    assert "2 then 5 batches" in accumulation.outcome().did


def test_a_schedule_by_step_changes_it_where_a_window_begins(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(schedule={0: 4, 3: 12}, schedule_by="step")
    assert steps(accumulation, net, max_epochs=1).at == [(0, 0), (0, 1), (0, 2), (0, 5), (0, 8), (0, 9)]


@pytest.mark.parametrize("first", [True, False])
def test_the_number_of_steps_is_known_before_the_optimizer_is_made(
    net: Callable[..., Net], first: bool
) -> None:
    """Whatever the order of the list, and with a loader that is prepared too."""

    class Knows(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.estimate = self.trainer.estimated_stepping_batches
            return [optimizer], [WarmupDecay(optimizer, total_steps=int(self.estimate))]

    callbacks = [GradientAccumulation(global_batch_size=12), DataPreload(num_workers=0)]
    model = Knows()
    trainer = make_trainer(callbacks=callbacks if first else callbacks[::-1], max_steps=-1, max_epochs=2)
    trainer.fit(model, make_loader())
    assert model.estimate == 8 == trainer.global_step
    assert callbacks[1].outcome().numbers["num_workers"] == [0]


@pytest.mark.parametrize(("size", "fits"), [(10, ("8 or 12", 8)), (3, ("4", 4))])
def test_a_remainder_is_refused_with_the_numbers_that_fit(
    size: int, fits: tuple[str, int], net: Callable[..., Net]
) -> None:
    with pytest.raises(ConfigError, match="a multiple of 4") as error:
        make_trainer(callbacks=[GradientAccumulation(global_batch_size=size)]).fit(net(), make_loader())
    message = f": {fits[0]}\n  try: GradientAccumulation(global_batch_size={fits[1]})"
    assert message in str(error.value)


class Stream(IterableDataset[Any]):
    """Yields full batches, without a batch_size."""

    def __iter__(self) -> Any:
        yield torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)


def test_a_loader_without_a_batch_size_is_refused(net: Callable[..., Net]) -> None:
    with pytest.raises(ConfigError, match="a training loader with a batch_size"):
        make_trainer(callbacks=[GradientAccumulation(global_batch_size=8)]).fit(
            net(), DataLoader(Stream(), batch_size=None)
        )


def test_a_second_setting_of_the_number_is_rejected(net: Callable[..., Net]) -> None:
    with pytest.raises(ConfigError, match="1 with GradientAccumulation"):
        make_trainer(callbacks=[GradientAccumulation(global_batch_size=8)], accumulate_grad_batches=2).fit(
            net(), make_loader()
        )
    scheduler = pl.callbacks.GradientAccumulationScheduler(scheduling={0: 2})
    with pytest.raises(ConflictError, match="both would decide how many batches make a step"):
        make_trainer(callbacks=[GradientAccumulation(global_batch_size=8), scheduler]).fit(
            net(), make_loader()
        )


def test_the_loaders_own_batch_is_reported_as_no_effect(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(global_batch_size=4)
    make_trainer(callbacks=[accumulation], max_steps=1).fit(net(), make_loader())
    assert accumulation.outcome().did == "1 batch of 4 a step"
    assert not accumulation.outcome().effective


def test_several_loaders_are_refused(net: Callable[..., Net]) -> None:
    with pytest.raises(ConfigError, match="one training loader: batches of 2 loaders"):
        make_trainer(callbacks=[GradientAccumulation(global_batch_size=8)]).fit(
            net(), {"a": make_loader(), "b": make_loader()}
        )
