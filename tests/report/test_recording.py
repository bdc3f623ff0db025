"""A record of storages: categories by hand, phases, and the module in which each was made."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_eff.report.meter import Probe
from lightning_eff.report.peak import Peak
from lightning_eff.report.recording import CATEGORIES, Recorder

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)


class Net(nn.Module):
    """Two layers around an activation."""

    def __init__(self, *, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 20, bias=False), nn.Linear(20, 10, bias=False)
        self.recomputed = recomputed

    def both(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.recomputed else self.both(x)


def record(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None, num_steps: int) -> Recorder:
    recorder = Recorder()
    probe = Probe(count_flops=False, count_bytes=True, live=recorder)
    for _ in range(num_steps):
        probe.begin(x, model, [optimizer] if optimizer else [])
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        probe.end()
    assert probe.peak_bytes == recorder.peak_bytes
    return recorder


def test_categories_of_a_layer_by_hand() -> None:
    """A weight of 400 bytes, an input and activations of 200 each, a loss and its gradient of 4."""
    layer = nn.Sequential(nn.Linear(10, 10, bias=False), nn.ReLU())
    recorder = record(layer, torch.ones(5, 10), SGD(layer.parameters()), 2)
    peak = Peak.of(recorder)
    nothing = dict.fromkeys(CATEGORIES, 0)
    # In the second backward pass, when the gradient of the weight is made of that of relu.
    assert (peak.num_bytes, peak.phase, peak.operation) == (1608, "backward", "mm")
    assert peak.by_category == nothing | {
        "parameters": 400, "optimizer state": 400, "gradients": 400, "batch": 200, "activations": 8,
        "temporaries": 200,
    }  # fmt: skip
    # When relu is computed of what the linear layer returned, which nobody needs afterwards.
    assert peak.by_phase["forward"] == nothing | {
        "parameters": 400, "optimizer state": 400, "batch": 200, "activations": 200, "temporaries": 200,
    }  # fmt: skip
    assert peak.by_phase["step"] == nothing | {
        "parameters": 400, "optimizer state": 400, "gradients": 400, "batch": 200,
    }  # fmt: skip


def test_buffers_and_existing_tensors_have_their_categories() -> None:
    norm = nn.BatchNorm1d(10)
    recorder = record(norm, torch.ones(5, 10), None, 1)
    peak = Peak.of(recorder)
    assert peak.by_category["buffers"] == 40 + 40 + 8
    assert peak.by_category["parameters"] == 80
    names = {each.path for each in recorder.allocations if each.category == "buffers"}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}


def test_a_tied_weight_is_one_storage() -> None:
    net = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    net[1].weight = net[0].weight
    assert Peak.of(record(net, torch.ones(5, 10), SGD(net.parameters()), 2)).by_category["parameters"] == 400


def test_operations_are_in_their_modules_in_the_backward_pass_too() -> None:
    net = Net()
    recorder = record(net, torch.ones(5, 10), None, 1)
    made = [(each.phase, each.operation, each.path) for each in recorder.allocations if each.operation]
    assert made == [
        ("forward", "mm", "first"),
        ("forward", "relu", "(root)"),
        ("forward", "mm", "second"),
        ("forward", "sum", ""),
        ("forward", "ones_like", ""),  # the loss's gradient, made before the backward pass begins
        ("backward", "mm", "second.weight"),
        ("backward", "mm", "second"),
        ("backward", "threshold_backward", "(root)"),
        ("backward", "mm", "first.weight"),
    ]


def test_recomputed_tensors_are_activations_again() -> None:
    """In the backward pass relu's result of 400 bytes is there again, which the forward pass had dropped."""
    plain, recomputed = (record(Net(recomputed=each), torch.ones(5, 10), None, 1) for each in (False, True))
    kept = {each.operation for each in plain.allocations if each.category == "activations"}
    assert kept == {"relu", "sum", "ones_like"}
    again = [each for each in recomputed.allocations if each.recomputed and each.category == "activations"]
    assert [(each.operation, each.path, each.phase) for each in again] == [("relu", "", "backward")]
    assert not any(
        each.operation == "relu" and each.category == "activations" and not each.recomputed
        for each in recomputed.allocations
    )


@pytest.mark.parametrize("block_bytes", [1, 512])
def test_the_replay_is_the_count(block_bytes: int) -> None:
    net = Net()
    recorder = record(net, torch.ones(5, 10), SGD(net.parameters()), 2)
    peak = Peak.of(recorder, block_bytes=block_bytes)
    assert sum(peak.by_category.values()) == peak.num_bytes == sum(peak.by_phase[peak.phase].values())
    assert sum(holder.num_bytes for holder in peak.holders) == peak.num_bytes
    assert (
        max(sum(v for v in point.values() if isinstance(v, int)) for point in peak.timeline) == peak.num_bytes
    )
    if block_bytes == 1:
        assert peak.num_bytes == recorder.peak_bytes
    else:
        assert peak.num_bytes % 512 == 0
        assert 0 <= peak.num_bytes - recorder.peak_bytes < 512 * len(recorder.allocations)


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (5, 5), (7, 6), (10, 8), (200, 24)])
def test_a_timeline_has_a_maximum_of_points(
    most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    recorder = record(net, torch.ones(5, 10), SGD(net.parameters()), 1)
    monkeypatch.setattr("lightning_eff.report.peak.POINTS", most)
    assert len(recorder.events) == 24
    assert len(Peak.of(recorder).timeline) == expected


def test_layers_that_differ_in_number_are_one_holder() -> None:
    net = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3)))
    holders = Peak.of(record(net, torch.ones(5, 10), None, 1)).holders
    weights = next(each for each in holders if each.category == "parameters")
    assert (weights.path, weights.count, weights.num_bytes) == ("*.weight", 3, 1200)


def test_a_record_of_nothing_has_no_peak() -> None:
    assert Peak.of(Recorder()).num_bytes == 0


def test_module_hooks_are_removed_afterwards() -> None:
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    record(Net(), torch.ones(5, 10), None, 1)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before
    assert not torch.nn.modules.module._global_forward_hooks
