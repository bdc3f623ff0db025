"""GradientAccumulation: the number of batches per step, schedules of it, and rejected settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.core.errors import ConfigError, ConflictError, ConflictWarning
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from tests.support.language import LanguageModel, assert_same_training, language_model, token_rows
from tests.support.models import Net, fit, make_loader


def steps(
    accumulation: GradientAccumulation, model: Net, num_batches: int = 10, **keywords: Any
) -> list[tuple[int, int]]:
    """Return the epoch and the batch of each step."""
    seen: list[tuple[int, int]] = []

    def look(trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > len(seen):
            seen.append((trainer.current_epoch, batch_idx))

    callbacks, loader = [accumulation, LambdaCallback(on_train_batch_end=look)], make_loader(4 * num_batches)
    trainer = fit(model, *callbacks, loader=loader, **{"max_epochs": 2} | keywords)
    assert trainer.accumulate_grad_batches == 1, "as before the fit"
    return seen


def test_the_number_of_batches_per_step_follows_from_the_global_batch(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(global_batch_size=12)
    assert steps(accumulation, net()) == [(epoch, batch) for epoch in (0, 1) for batch in (2, 5, 8, 9)]
    numbers = accumulation.outcome().numbers
    assert (numbers["accumulate_grad_batches"], numbers["cut_steps"]) == ([3], 2)


def test_epochs_shorter_than_a_window_make_one_step_each_and_a_warning(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(global_batch_size=80)
    with pytest.warns(ConflictWarning, match="20 batches"):
        assert steps(accumulation, net(), num_batches=3) == [(0, 2), (1, 2)]
    assert accumulation.outcome().numbers["cut_steps"] == 2
    limited = steps(GradientAccumulation(global_batch_size=16), net(), limit_train_batches=6)
    assert limited == [(0, 3), (0, 5), (1, 3), (1, 5)]


def test_a_schedule_changes_the_window_at_an_epoch_or_a_step(net: Callable[..., Net]) -> None:
    accumulation = GradientAccumulation(schedule={0: 8, 1: 20})
    assert steps(accumulation, net()) == [(0, 1), (0, 3), (0, 5), (0, 7), (0, 9), (1, 4), (1, 9)]
    assert accumulation.outcome().numbers["accumulate_grad_batches"] == [2, 5]
    by_step = GradientAccumulation(schedule={0: 4, 3: 12}, schedule_by="step")
    assert steps(by_step, net(), max_epochs=1) == [(0, 0), (0, 1), (0, 2), (0, 5), (0, 8), (0, 9)]


@pytest.mark.parametrize("first", [True, False])
def test_the_number_of_steps_is_known_before_the_optimizer_is_made(first: bool) -> None:
    """Also with DataPreload, which changes the loader, before or after it in the list."""

    class Knows(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.estimate = self.trainer.estimated_stepping_batches
            return [optimizer], [WarmupDecay(optimizer, total_steps=int(self.estimate))]

    callbacks = [GradientAccumulation(global_batch_size=12), DataPreload(num_workers=0)]
    model = Knows()
    trainer = fit(model, *(callbacks if first else callbacks[::-1]), max_epochs=2)
    assert model.estimate == 8 == trainer.global_step
    assert callbacks[1].outcome().numbers["num_workers"] == [0]


def test_a_remainder_is_rejected_with_a_multiple(net: Callable[..., Net]) -> None:
    for size, fits in ((10, 8), (3, 4)):
        with pytest.raises(ConfigError, match=rf"GradientAccumulation\(global_batch_size={fits}\)"):
            fit(net(), GradientAccumulation(global_batch_size=size))


@pytest.mark.parametrize(
    ("others", "keywords"),
    [
        ([], {"loader": DataLoader([*make_loader(8)], batch_size=None)}),
        ([], {"loader": {"a": make_loader(), "b": make_loader()}}),
        ([], {"accumulate_grad_batches": 2}),
        ([GradientAccumulationScheduler({0: 2})], {}),
    ],
)
def test_loaders_without_one_batch_size_and_other_accumulation_are_rejected(
    others: list[Any], keywords: dict[str, Any], net: Callable[..., Net]
) -> None:
    with pytest.raises((ConfigError, ConflictError)):
        fit(net(), GradientAccumulation(global_batch_size=8), *others, **keywords)


@pytest.mark.parametrize(
    ("settings", "effective"), [({"global_batch_size": 4}, True), ({"num_batches": 1}, False)]
)
def test_one_batch_per_step_is_effective_if_the_global_batch_size_is_set(
    settings: dict[str, int], effective: bool, net: Callable[..., Net]
) -> None:
    accumulation = GradientAccumulation(**settings)
    assert not accumulation.outcome().effective
    fit(net(), accumulation, max_steps=1)
    assert accumulation.outcome().effective is effective


SIZES = (3, 1, 4, 2, 5, 2, 6)
"""Samples of each batch of an epoch."""


def uneven_batches() -> list[tuple[Tensor, Tensor]]:
    x, y = token_rows(sum(SIZES))
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


class Stream(IterableDataset[Any]):
    """Yields batches as WebDataset does: without a length and without a batch size."""

    def __iter__(self) -> Iterator[Any]:
        return iter(uneven_batches())


class Pairs(LanguageModel):
    """Concatenates the batches of several loaders."""

    def loss(self, batch: Any) -> tuple[Tensor, int]:
        if isinstance(batch, dict):
            x, y = zip(*batch.values(), strict=True)
            batch = torch.cat(x), torch.cat(y)
        return super().loss(batch)


def loader_of(kind: str) -> Any:
    if kind == "batch sampler":
        ends = list(itertools.accumulate(SIZES, initial=0))
        rows = [list(range(*pair)) for pair in itertools.pairwise(ends)]
        return DataLoader(TensorDataset(*token_rows(sum(SIZES))), batch_sampler=rows)
    if kind == "no DataLoader":
        return Stream()
    return DataLoader(Stream(), batch_size=None)


def test_batches_of_loaders_with_different_sizes_count_equally() -> None:
    other = DataLoader(uneven_batches()[::-1], batch_size=None)
    accumulation = GradientAccumulation(num_batches=3)
    loader = CombinedLoader({"a": loader_of(""), "b": other}, "max_size_cycle")
    with pytest.warns(ConflictWarning, match="weighs the same"):
        fit(Pairs(False).double(), accumulation, loader=loader, max_steps=1)
    assert "batches count equally" in accumulation.outcome().did


@pytest.mark.parametrize(
    ("kind", "weighted"), [("batch sampler", True), ("no DataLoader", False), ("two loaders", True)]
)
def test_batches_without_a_common_size_make_the_step_of_one_batch(kind: str, *, weighted: bool) -> None:
    """T1. A mean of means, or a short last window divided by three, would differ by 1e-1."""
    torch.manual_seed(1)
    model, num_steps = Pairs(weighted).double(), 12
    loader, batches = loader_of(kind), uneven_batches()
    if kind == "two loaders":
        loader = CombinedLoader({"a": loader_of(""), "b": loader_of("")}, "max_size_cycle")
        batches = [tuple(torch.cat([part, part]) for part in batch) for batch in batches]
    accumulation = GradientAccumulation(num_batches=3)
    fit(model, accumulation, loader=loader, max_steps=num_steps)
    expected = language_model(weighted)
    (optimizer,), (schedule,) = expected.configure_optimizers()
    for step in range(num_steps):
        first = step % 3 * 3  # three windows an epoch, of 3, 3 and 1 batches
        x, y = (torch.cat(part) for part in zip(*batches[first : first + 3], strict=True))
        optimizer.zero_grad()
        expected.loss((x, y))[0].backward()
        expected.on_before_optimizer_step(optimizer)
        optimizer.step()
        schedule["scheduler"].step()
    assert_same_training(model, expected, None)
    assert accumulation.outcome().numbers["cut_steps"] == 4
