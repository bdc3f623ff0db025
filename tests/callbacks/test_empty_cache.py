"""EmptyCache: by the clock, by need, together on all ranks, on every kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_eff.callbacks import empty_cache
from lightning_eff.callbacks.empty_cache import EmptyCache, Released, release
from lightning_eff.core import allocator
from lightning_eff.core.allocator import AllocatorState
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from tests.support.models import Net, make_loader, make_trainer

GIB = 2**30


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the global step of each emptying; the fake cache returns 5 bytes each time."""
    steps: list[int] = []

    def fake(_: EmptyCache, trainer: Any) -> None:
        steps.append(trainer.global_step)

    monkeypatch.setattr(empty_cache, "release", lambda device: Released(5, 0.001))
    original = EmptyCache.on_train_batch_end

    def spy(self: EmptyCache, trainer: Any, *rest: Any) -> None:
        before = len(self._released)
        original(self, trainer, *rest)
        if len(self._released) > before:
            fake(self, trainer)

    monkeypatch.setattr(EmptyCache, "on_train_batch_end", spy)
    return steps


@pytest.fixture
def fake_allocator(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace the allocator by numbers that a test sets; 10 GiB of memory in all."""
    numbers = {"reserved": GIB, "allocated": GIB, "retries": 0}
    monkeypatch.setattr(allocator, "has_cache", lambda device: True)
    monkeypatch.setattr(allocator, "total_bytes", lambda device: 10 * GIB)
    monkeypatch.setattr(
        allocator,
        "state",
        lambda device: AllocatorState(numbers["reserved"], numbers["allocated"], numbers["retries"]),
    )
    return numbers


def test_empties_once_per_n_optimizer_steps(emptied: list[int], net: Callable[..., Net]) -> None:
    make_trainer(callbacks=[EmptyCache(every_n_steps=3)]).fit(net(), make_loader())
    assert emptied == [3, 6, 9]


def test_counts_optimizer_steps_not_batches(emptied: list[int], net: Callable[..., Net]) -> None:
    trainer = make_trainer(callbacks=[EmptyCache(every_n_steps=2)], accumulate_grad_batches=5, max_steps=5)
    trainer.fit(net(), make_loader())
    assert emptied == [2, 4]


def test_empties_when_the_cache_has_grown_past_its_share(
    emptied: list[int], fake_allocator: dict[str, int], net: Callable[..., Net]
) -> None:
    class Grow(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            fake_allocator["reserved"] += GIB

    callback = EmptyCache(every_n_steps=None, max_cached_share=0.35, check_every_n_steps=1)
    make_trainer(callbacks=[callback], max_steps=9).fit(Grow(), make_loader())
    # 4 GiB of 10 are more than 0.35; what an emptying could not return does not count again.
    assert emptied == [4, 8]


def test_empties_when_the_allocator_had_to_flush(
    emptied: list[int], fake_allocator: dict[str, int], net: Callable[..., Net]
) -> None:
    class Retry(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            fake_allocator["retries"] += self.global_step == 4

    callback = EmptyCache(every_n_steps=None, max_cached_share=0.9, check_every_n_steps=1)
    make_trainer(callbacks=[callback]).fit(Retry(), make_loader())
    assert emptied == [5]
    assert "expandable_segments" in callback.outcome().did


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.NoEffectWarning")
def test_looks_at_the_need_only_every_n_steps(
    emptied: list[int],
    fake_allocator: dict[str, int],
    net: Callable[..., Net],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[bool] = []
    trainer = make_trainer(
        callbacks=[EmptyCache(every_n_steps=None, max_cached_share=0.9, check_every_n_steps=4)]
    )
    monkeypatch.setattr(
        trainer.strategy, "reduce_boolean_decision", lambda decision, all: looks.append(all) or decision
    )
    trainer.fit(net(), make_loader())
    assert looks == [False, False], "two looks in ten steps, each asking whether any rank needs it"


def test_all_ranks_empty_when_one_needs_it(
    emptied: list[int],
    fake_allocator: dict[str, int],
    net: Callable[..., Net],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callback = EmptyCache(every_n_steps=None, max_cached_share=0.9, check_every_n_steps=5)
    trainer = make_trainer(callbacks=[callback])
    monkeypatch.setattr(trainer.strategy, "reduce_boolean_decision", lambda decision, all: not all)
    trainer.fit(net(), make_loader())
    assert emptied == [5, 10]


def test_a_device_without_a_cache_is_said(net: Callable[..., Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "has_cache", lambda device: False)
    with pytest.warns(NoEffectWarning, match="the allocator of cpu has no cache"):
        make_trainer(callbacks=[EmptyCache(every_n_steps=1)], max_steps=2).fit(net(), make_loader())
    with pytest.raises(ValueError, match="has no cache that can be emptied"):
        release("cpu")


def test_what_came_back_is_logged_and_reported(emptied: list[int], net: Callable[..., Net]) -> None:
    callback = EmptyCache(every_n_steps=2)
    trainer = make_trainer(callbacks=[callback])
    trainer.fit(net(), make_loader())
    assert float(trainer.callback_metrics["eff/empty_cache_returned_bytes"]) == 5.0
    assert callback.outcome().numbers == {
        "times": 5,
        "returned_bytes": 25,
        "elapsed_s": pytest.approx(0.005),
    }


@pytest.mark.skipif(not allocator.has_cache(torch.device("cpu")), reason="needs glibc's malloc_trim")
def test_freed_heap_goes_back_to_the_operating_system() -> None:
    # Blocks below glibc's mmap threshold stay in its heap, and a live one above them keeps it from shrinking.
    release("cpu")
    blocks = [torch.ones(16 * 1024) for _ in range(2000)]
    keep = blocks[-1]
    del blocks
    assert release("cpu").returned_bytes > 32 * 2**20
    assert float(keep.sum()) == 16 * 1024


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"max_cached_share": 1.5}, "max_cached_share"),
        ({"max_cached_share": -0.1}, "max_cached_share"),
        ({"check_every_n_steps": 0}, "check_every_n_steps"),
        ({"every_n_steps": None}, "every_n_steps"),
    ],
)
def test_values_out_of_range_are_named(keywords: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EmptyCache(**keywords)
    assert caught.value.key == key
