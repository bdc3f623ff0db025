"""RankDivergenceCheck on one rank; two ranks are in tests/test_strategies.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_eff.core.errors import ConflictError
from lightning_eff.strategy._shared.collectives import RankDivergenceCheck
from tests.support.models import Deep


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, RankDivergenceCheck]]]:
    """Return a factory of two models with their checks, connected by a fake all_reduce."""
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

    def make(**options: bool) -> list[tuple[Any, RankDivergenceCheck]]:
        models = [Deep(dropout=0.0) for _ in range(2)]
        options = {"gathers": False} | options
        return [(model, RankDivergenceCheck("strategy/fsdp2", model, **options)) for model in models]

    return make


def step(model: Any, order: tuple[int, ...] = (0, 1, 2)) -> None:
    x = model.first(torch.ones(2, 8))
    for index in order:
        x = model.blocks[index](x)
    model.second(x)


def compared(pairs: Any, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Step two ranks, and read the comparison as they do after their next step."""
    for (model, check), order in zip(pairs, (one, other), strict=True):
        step(model, order)
        check.compare()
    for _, check in pairs:
        check.read()


def test_ranks_must_run_the_same_modules_in_one_order(ranks: Any) -> None:
    """With `ordered=False`, only the set of modules counts."""
    pairs = ranks()
    for order in ((0, 1, 2), (2, 0), ()):
        compared(pairs, order, order)
    compared(ranks(ordered=False), (0, 1, 2), (2, 1, 0, 0))
    for ordered, other in ((True, (0, 2)), (True, (0, 2, 1)), (True, (0, 1, 2, 2)), (False, (0, 1))):
        with pytest.raises(ConflictError, match="different modules"):
            compared(ranks(ordered=ordered), (0, 1, 2), other)


def test_passes_without_gradients_count_if_weights_are_gathered(ranks: Any) -> None:
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


def test_end_removes_the_hooks_and_copies_are_not_checked(ranks: Any) -> None:
    (model, check), (_, other) = ranks()
    check.compare()
    other.compare()
    step(copy.deepcopy(model))
    check.end()
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_compiled_models_are_not_checked(ranks: Any) -> None:
    model = Deep()
    model.blocks[1].compile(backend="eager")
    check = RankDivergenceCheck("strategy/fsdp2", model, gathers=True)
    assert not any(part._forward_pre_hooks for part in model.modules())
    check.compare()
    check.end()
