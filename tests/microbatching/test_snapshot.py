"""The state that a second attempt of a step restores; and an update that is undone."""

from __future__ import annotations

import copy
import random
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_eff.core.call_state import version
from lightning_eff.microbatching.snapshot import (
    MAX_ITEMS,
    MAX_PLAIN_BYTES,
    OptimizerSnapshot,
    StepSnapshot,
    atomic_update,
)
from tests.support.ranks import is_equal

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("mu", None)
        self.register_buffer("links", torch.eye(3).to_sparse())
        with torch.inference_mode():
            self.register_buffer("best", torch.ones(2))
        self.mean, self.rows = MeanMetric(), CatMetric()
        self.own = torch.Generator().manual_seed(1)
        self.layer.own = torch.Generator().manual_seed(2)
        self.count, self.seen, self.ema = 0, [1.0], 0.0
        self.plain, self.held = torch.zeros(2), {"sum": 0.0, "last": deque([1.0], maxlen=2), "seen": {1}}


def state(model: Model) -> list[Any]:
    numbers = [torch.rand(2), *(torch.rand(2, generator=owner.own) for owner in (model, model.layer))]
    plain = [random.random(), float(np.random.rand())]
    metrics = [float(model.mean.compute()), model.rows.compute()]
    buffers = dict(model.named_buffers())
    values = [buffer.to_dense().clone() for buffer in buffers.values()]
    plain += [model.count, model.ema, model.plain.tolist(), copy.deepcopy(model.held)]
    return [*numbers, *values, plain, metrics, list(model.seen), list(buffers), sorted(vars(model))]


def change(model: Model) -> None:
    model.norm(torch.rand(4, 2))
    model.table.add_(1.0)
    model.table = model.table + 1.0
    model.mean.mean_value += 1.0  # in place, as some metrics do
    model.mean(torch.tensor(5.0))
    model.rows(torch.tensor([5.0]))
    torch.rand(2, generator=model.own), torch.rand(2, generator=model.layer.own)
    random.random(), np.random.rand()
    model.mu = torch.ones(3)
    model.register_buffer("late", torch.ones(1))
    model.count += 1
    model.ema = 0.9 * model.ema + 1.0
    model.seen[0] += 1.0
    model.seen.append(2.0)
    model.plain += 1.0
    model.held["sum"] += 1.0
    model.held["last"].append(2.0)
    model.held["seen"].add(2)
    model.fresh = 1


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_everything_is_restored_as_often_as_requested() -> None:
    model = Model()
    model.mean(torch.tensor(1.0))
    model.rows(torch.tensor([1.0]))
    snapshot = StepSnapshot(model, CPU)
    snapshot.keep()
    expected, table = state(model), model.table
    for _ in range(3):
        snapshot.restore()
        change(model)
        change(model)
        snapshot.restore()
        assert is_equal(state(model), expected)
        assert model.table is table


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_buffers_of_a_scripted_module_are_restored() -> None:
    model = torch.jit.script(nn.BatchNorm1d(2))
    expected = copy.deepcopy(model.state_dict())
    snapshot = StepSnapshot(model, CPU)
    snapshot.keep()
    model(torch.rand(4, 2))
    snapshot.restore()
    assert is_equal(dict(model.state_dict()), dict(expected))


@pytest.mark.parametrize("name", ["wide", "plain"])
def test_a_change_to_a_tensor_that_is_not_copied_is_an_error(name: str) -> None:
    model = Model()
    model.register_buffer("wide", torch.ones(1).expand(6))
    model.plain = torch.zeros(MAX_PLAIN_BYTES)  # four bytes each
    snapshot = StepSnapshot(model, CPU)
    snapshot.keep()
    snapshot.restore()
    getattr(model, name)[:1].add_(1.0)
    with pytest.raises(RuntimeError, match=name):
        snapshot.restore()


def test_an_unchanged_tensor_is_neither_written_nor_named() -> None:
    """It may be read-only memory, or share its count of changes with a tensor that is restored."""
    model = nn.Linear(8, 2)
    model.weight.requires_grad_(False)
    model.register_buffer("mask", torch.zeros(1, 8))
    model.anchor, model.big, model.file = model.weight.detach(), model.mask.expand(4, 8), torch.ones(2)
    before = version(model.file), version(model.weight)
    snapshot = StepSnapshot(model, CPU)
    snapshot.keep()
    model.mask.data.add_(1.0)
    for _ in range(2):
        snapshot.restore()
    assert model.mask.sum() == 0
    assert (version(model.file), version(model.weight)) == before


def test_containers_of_a_data_set_are_not_copied_and_dead_proxies_are_ignored() -> None:
    model, module = nn.Linear(1, 1), nn.Linear(1, 1)
    model.few, model.many = [[0]] * 2, [[0]] * (MAX_ITEMS + 1)
    model.parents = [weakref.proxy(module)]
    del module
    snapshot = StepSnapshot(model, CPU)
    snapshot.keep()
    model.few[0].append(1)
    model.many[0].append(1)
    snapshot.restore()
    assert (model.few[0], model.many[0]) == ([0], [0, 1])


class Counting(torch.optim.SGD):
    """Has a count in its groups and lists in its state, and changes gradients in place."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        for parameter in group["params"]:
            parameter.grad.add_(parameter.detach(), alpha=0.1 / group["step"])
            self.state[parameter].setdefault("history", []).append(float(parameter.grad.norm()))
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Counting])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_update_is_undone(kind: Any, steps: int) -> None:
    results = []
    for undone in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = kind(layer.parameters(), lr=0.1)
        layer(torch.ones(1, 3)).sum().backward()
        for _ in range(steps):
            optimizer.step()
        if undone:
            before = OptimizerSnapshot(optimizer)
            optimizer.param_groups[0]["lr"] = 3.0
            optimizer.step()
            before.restore()
        optimizer.step()
        results.append([*layer.parameters(), optimizer.state_dict()])
    assert is_equal(*results)


class Fails(torch.optim.SGD):
    """Runs out of memory after it has changed the parameters."""

    times = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        super().step()
        self.times += 1
        if self.times == 1:
            raise torch.OutOfMemoryError
        return loss


def test_a_closure_is_evaluated_once_if_the_update_is_retried() -> None:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    calls: list[int] = []
    optimizer = Fails(layer.parameters(), lr=0.1, momentum=0.9)
    with atomic_update(optimizer, CPU, is_first=True):
        optimizer.step(lambda: calls.append(1))
    assert calls == [1]
    assert optimizer.times == 2
    with atomic_update(optimizer, torch.device("meta"), is_first=False):  # as on a GPU after the first update
        assert "step" not in vars(optimizer)
