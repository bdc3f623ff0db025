"""Live bytes and their record, compared to counts by hand: aliases, frees, categories, phases, modules."""

from __future__ import annotations

import functools
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_eff.report.live_bytes import LiveBytes
from lightning_eff.report.meter import Probe
from lightning_eff.report.peak import Peak
from lightning_eff.report.recording import CATEGORIES, Recorder

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)


def test_a_storage_counts_once_until_its_last_alias_is_gone() -> None:
    with LiveBytes() as live:
        x = torch.zeros(10)
        others = [x.view(2, 5), x[3:], x.unsqueeze(0).expand(7, 10), x.detach(), x.view(2, 5).t()]
        x.add_(1).mul_(2)
        x[2:5] += 1
        torch.exp(x, out=x)
        assert live.now_bytes == live.peak_bytes == 40
        double, small = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.uint8)
        meta = torch.zeros(1000, device="meta") + 1
    assert live.now_bytes == live.peak_bytes == 40 + 80 + 10
    del x, double, small
    assert live.now_bytes == 40
    del others
    assert (live.now_bytes, live.peak_bytes, len(meta)) == (0, 130, 1000)


def test_freed_storages_are_subtracted_and_the_peak_stays() -> None:
    with LiveBytes() as live:
        x = torch.zeros(100)
        y = (x + 1) * 2
        assert (live.now_bytes, live.peak_bytes) == (800, 1200), "a temporary is in the peak"
        del x, y
        for size in range(1, 200):  # memory that is used again is a new storage
            x = torch.zeros(size)
            assert live.now_bytes == 4 * size
            del x
        x = torch.empty(0)
        x.resize_(1000)
        assert live.now_bytes == 4000, "its new size"
        table = nn.Embedding(100, 8, sparse=True)
        table(torch.tensor([3])).sum().backward()  # a sparse gradient is no error
    del x, table
    assert live.now_bytes == 0


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


def record(model: nn.Module, optimizer: torch.optim.Optimizer | None, num_steps: int) -> Recorder:
    recorder, x = Recorder(), torch.ones(5, 10)
    probe = Probe(recorder)
    for _ in range(num_steps):
        probe.begin(x, model, [optimizer] if optimizer else [])
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        probe.end()
    return recorder


def test_categories_of_a_layer_by_hand() -> None:
    """A weight of 400 bytes, an input and activations of 200 each, a loss and its gradient of 4."""
    layer = nn.Sequential(nn.Linear(10, 10, bias=False), nn.ReLU())
    peak = Peak.of(record(layer, SGD(layer.parameters()), 2))
    nothing = dict.fromkeys(CATEGORIES, 0)
    # In the second backward pass, when the weight's gradient is computed from relu's.
    assert (peak.num_bytes, peak.phase, peak.operation) == (1608, "backward", "mm")
    assert peak.by_category == nothing | {
        "parameters": 400, "optimizer state": 400, "gradients": 400, "batch": 200, "activations": 8,
        "temporaries": 200,
    }  # fmt: skip
    # When relu is computed of what the linear layer returned, which is not needed afterwards.
    assert peak.by_phase["forward"] == nothing | {
        "parameters": 400, "optimizer state": 400, "batch": 200, "activations": 200, "temporaries": 200,
    }  # fmt: skip
    assert peak.by_phase["step"] == nothing | {
        "parameters": 400, "optimizer state": 400, "gradients": 400, "batch": 200,
    }  # fmt: skip


def test_holders_at_the_peak_are_named_as_an_engineer_would() -> None:
    net = nn.Sequential(OrderedDict(up=nn.Linear(4, 8, bias=False), lm_head=nn.Linear(8, 64, bias=False)))
    recorder, target = Recorder(), torch.zeros(16, dtype=torch.long)
    with recorder.begin([], net, []), recorder:
        logits = net(torch.ones(16, 4))
        F.cross_entropy(logits, target).backward()
    names = [each.name for each in Peak.of(recorder).holders if each.num_bytes >= 16 * 8 * 4]
    assert sorted(names) == [
        "gradient of the log-probabilities [16, 64]", "gradient of the logits [16, 64]",
        "lm_head.weight [64, 8]", "log-probabilities [16, 64]",
        "logits of lm_head [16, 64]", "output of up [16, 8]",
    ]  # fmt: skip
    scores = torch.ones(2, 3, 6, 6)
    recorder = Recorder()
    with recorder.begin([scores], net, []), recorder:
        kept = scores.softmax(-1)
    names = [each.name for each in Peak.of(recorder).holders]
    assert {"batch [2, 3, 6, 6]", f"attention scores {list(kept.shape)}"} <= {*names}


def test_buffers_and_existing_tensors_have_their_categories() -> None:
    recorder = record(nn.BatchNorm1d(10), None, 1)
    peak = Peak.of(recorder)
    assert peak.by_category["buffers"] == 40 + 40 + 8
    assert peak.by_category["parameters"] == 80
    names = {each.path for each in recorder.allocations if each.category == "buffers"}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}
    # Tensors of an earlier step count too, and views of the batch do not.
    net, x = nn.Linear(10, 10, bias=False), torch.ones(5, 10)
    optimizer = SGD(net.parameters())
    net.weight.grad = torch.zeros(10, 10)
    optimizer.state[net.weight]["momentum_buffer"] = torch.zeros(10, 10)
    recorder = Recorder()
    recorder.begin([x, {"again": x[:2]}], net, [optimizer]).close()
    assert recorder.peak_bytes == 3 * 400 + 200


def test_operations_are_in_their_modules_in_the_backward_pass_too() -> None:
    recorder = record(Net(), None, 1)
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
    """The backward pass computes relu's result of 400 bytes again, which the forward pass had dropped."""
    plain, recomputed = (record(Net(recomputed=each), None, 1) for each in (False, True))
    kept = {each.operation for each in plain.allocations if each.category == "activations"}
    assert kept == {"relu", "sum", "ones_like"}
    found = [each for each in recomputed.allocations if each.category == "activations"]
    again = [(each.operation, each.path, each.phase) for each in found if each.recomputed]
    assert again == [("relu", "", "backward")]
    assert not any(each.operation == "relu" and not each.recomputed for each in found)


@pytest.mark.parametrize("block_bytes", [1, 512])
def test_the_replay_is_the_count(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    recorder = record(net, SGD(net.parameters()), 2)
    peak = Peak.of(recorder, block_bytes=block_bytes)
    assert sum(peak.by_category.values()) == peak.num_bytes == sum(peak.by_phase[peak.phase].values())
    assert sum(holder.num_bytes for holder in peak.holders) == peak.num_bytes
    for most in (200, 7, 1):
        monkeypatch.setattr("lightning_eff.report.peak.POINTS", most)
        timeline = Peak.of(recorder, block_bytes=block_bytes).timeline
        assert 0 < len(timeline) <= most
        assert max(sum(point[name] for name in CATEGORIES) for point in timeline) == peak.num_bytes
        numbers = [point["event"] for point in timeline]
        assert numbers == sorted({*numbers})
        assert 1 <= numbers[0] <= numbers[-1] <= len(recorder.events)
    more = peak.num_bytes - recorder.peak_bytes
    assert more == 0 if block_bytes == 1 else 0 < more < 512 * len(recorder.allocations)
    assert peak.num_bytes % block_bytes == 0


def test_tied_weights_are_one_storage_and_layers_one_holder() -> None:
    net = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    net[1].weight = net[0].weight
    peak = Peak.of(record(net, None, 1))
    assert peak.by_category["parameters"] == 1200
    weights = next(each for each in peak.holders if each.category == "parameters")
    assert (weights.name, weights.count, weights.num_bytes) == ("*.weight [10, 10]", 3, 1200)
    assert Peak.of(Recorder()).num_bytes == 0, "a record of nothing"
