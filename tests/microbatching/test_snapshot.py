"""What a second attempt restores, one by one; and an update that is undone."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_eff.microbatching.atomic_update import atomic_update
from lightning_eff.microbatching.snapshot import OptimizerSnapshot, StepSnapshot

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.zeros(3))
        self.mean, self.rows = MeanMetric(), CatMetric()
        self.own = torch.Generator().manual_seed(1)
        self.count, self.seen = 0, [1.0]


def state(model: Model) -> list[Any]:
    numbers = [torch.rand(2), torch.rand(2, generator=model.own)]
    plain = [random.random(), float(np.random.rand())]
    metrics = [float(model.mean.compute()), model.rows.compute()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [*numbers, *buffers, plain, metrics, model.count, list(model.seen), sorted(vars(model))]


def change(model: Model) -> None:
    model.norm(torch.rand(4, 2))
    model.table.add_(1.0)
    model.mean.mean_value += 1.0  # in place, as some metrics do
    model.mean(torch.tensor(5.0))
    model.rows(torch.tensor([5.0]))
    torch.rand(2, generator=model.own)
    random.random(), np.random.rand()
    model.count += 1
    model.seen.append(2.0)
    model.fresh = 1


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_everything_is_restored_as_often_as_requested() -> None:
    model = Model()
    model.mean(torch.tensor(1.0))
    model.rows(torch.tensor([1.0]))
    snapshot = StepSnapshot(model, CPU)
    snapshot.keep()
    expected = state(model)
    for _ in range(3):
        snapshot.restore()
        change(model)
        change(model)
        snapshot.restore()
        for one, other in zip(state(model), expected, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_replaced_buffer_is_restored() -> None:
    model = Model()
    snapshot = StepSnapshot(model, CPU)
    before = model.table
    snapshot.keep()
    model.table = model.table + 1.0
    snapshot.restore()
    assert model.table is before


def test_a_change_of_a_buffer_that_cannot_be_copied_is_an_error() -> None:
    model = Model()
    model.register_buffer("wide", torch.ones(1).expand(6))
    snapshot = StepSnapshot(model, CPU)
    snapshot.keep()
    snapshot.restore()
    model.wide[:1].add_(1.0)
    with pytest.raises(RuntimeError, match="the buffer wide of Model changed, and its kind"):
        snapshot.restore()


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "SGD", "NAdam"])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_update_is_undone(name: str, steps: int) -> None:
    results = []
    for undone in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1)
        layer(torch.ones(1, 3)).sum().backward()
        for _ in range(steps):
            optimizer.step()
        if undone:
            before = OptimizerSnapshot(optimizer)
            optimizer.param_groups[0]["lr"] = 3.0
            optimizer.step()
            before.restore()
        optimizer.step()
        results.append([*layer.parameters(), optimizer.param_groups[0]["lr"], len(optimizer.state)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Fails(torch.optim.SGD):
    """Runs out of memory when it has changed something."""

    times = 0

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        super().step()
        self.times += 1
        if self.times == 1:
            raise torch.OutOfMemoryError
        return loss


def test_a_closure_is_evaluated_once_though_the_update_is_tried_twice() -> None:
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


def test_an_optimizer_that_evaluates_its_closure_several_times_does_so() -> None:
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 1)
        lbfgs = torch.optim.LBFGS(layer.parameters(), max_iter=4)
        calls: list[int] = []

        def closure(layer: nn.Linear = layer, lbfgs: Any = lbfgs, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            lbfgs.zero_grad()
            loss = (layer(torch.ones(2, 3)) - 1.0).square().sum()
            loss.backward()
            return loss

        with atomic_update(lbfgs, CPU, is_first=True) if wrapped else nullcontext():
            lbfgs.step(closure)
        assert "step" not in vars(lbfgs)
        results.append((len(calls), layer.weight.detach()))
    assert results[0][0] == results[1][0] > 1
    assert torch.equal(results[0][1], results[1][1])
