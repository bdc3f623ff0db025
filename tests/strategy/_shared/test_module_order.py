"""Ranks that compare the order of a model's parts; here two watchers in one process stand for two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_eff.core.errors import ConflictError
from lightning_eff.strategy._shared.module_order import SameOrder
from tests.support.models import Deep


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, SameOrder]]]:
    """Return a maker of two models with their watchers, which a fake group lets talk."""
    sent: list[torch.Tensor] = []

    def all_reduce(numbers: torch.Tensor, *_: Any, **__: Any) -> Any:
        sent.append(numbers)

        def wait() -> None:
            numbers.copy_(torch.stack(sent[-2:]).amax(0))

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda backend: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def make(**options: bool) -> list[tuple[Any, SameOrder]]:
        models = [Deep(dropout=0.0) for _ in range(2)]
        options = {"gathers": False} | options
        return [(model, SameOrder("strategy/fsdp2", model, **options)) for model in models]

    return make


def step(model: Any, order: tuple[int, ...] = (0, 1, 2)) -> None:
    x = model.first(torch.ones(2, 8))
    for index in order:
        x = model.blocks[index](x)
    model.second(x)


def compared(pairs: Any, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Let two ranks step and compare, and read it as they would after their next step."""
    for (model, watcher), order in zip(pairs, (one, other), strict=True):
        step(model, order)
        watcher.compare()
    for _, watcher in pairs:
        watcher.read()


def test_the_same_order_is_fine_and_any_other_is_refused(ranks: Any) -> None:
    pairs = ranks()
    for order in ((0, 1, 2), (2, 0), ()):
        compared(pairs, order, order)
    for other in ((0, 2), (0, 2, 1), (0, 1, 2, 2)):
        with pytest.raises(
            ConflictError, match=r"fsdp2: the ranks run other parts[\s\S]*try: Trainer\(strategy=.ddp"
        ):
            compared(ranks(), (0, 1, 2), other)


def test_where_gradients_are_reduced_once_only_what_has_run_counts(ranks: Any) -> None:
    compared(ranks(ordered=False), (0, 1, 2), (2, 1, 0, 0))
    with pytest.raises(ConflictError):
        compared(ranks(ordered=False), (0, 1, 2), (0, 1))


def test_passes_without_gradients_count_where_weights_are_gathered_for_them(ranks: Any) -> None:
    def once_more(pairs: Any) -> None:
        with torch.no_grad():
            step(pairs[0][0])
        compared(pairs, (0,), (0,))

    once_more(ranks())
    with pytest.raises(ConflictError):
        once_more(ranks(gathers=True))
    pairs = ranks(gathers=True)
    pairs[0][0].eval()(torch.ones(2, 8))
    pairs[0][0].train()
    compared(pairs, (0,), (0,))


def test_nothing_is_left_behind_and_a_copy_is_a_copy(ranks: Any) -> None:
    (model, watcher), (_, other) = ranks()
    watcher.compare()
    other.compare()
    step(copy.deepcopy(model))
    watcher.end()
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_compiled_models_are_not_watched(ranks: Any) -> None:
    model = Deep()
    model.blocks[1].compile(backend="eager")
    watcher = SameOrder("strategy/fsdp2", model, gathers=True)
    assert not any(part._forward_pre_hooks for part in model.modules())
    watcher.compare()
    watcher.end()
