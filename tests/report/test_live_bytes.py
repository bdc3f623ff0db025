"""Live bytes by hand: what counts once, what adds nothing, what leaves, and the most there was."""

from __future__ import annotations

import torch
from torch import nn

from lightning_eff.report.live_bytes import LiveBytes


def test_a_result_counts_its_storage() -> None:
    with LiveBytes() as live:
        x = torch.zeros(10)
        y = torch.zeros(10, dtype=torch.float64)
        z = torch.zeros(10, dtype=torch.uint8)
    assert live.now_bytes == live.peak_bytes == 40 + 80 + 10
    assert len((x, y, z)) == 3


def test_views_and_aliases_count_once() -> None:
    with LiveBytes() as live:
        x = torch.zeros(10)
        others = [x.view(2, 5), x[3:], x.unsqueeze(0).expand(7, 10), x.detach(), x.view(2, 5).t()]
    assert live.now_bytes == live.peak_bytes == 40
    assert len(others) == 5


def test_an_alias_keeps_its_storage_alive() -> None:
    with LiveBytes() as live:
        x = torch.zeros(10)
        part = x[:1]
    del x
    assert live.now_bytes == 40
    del part
    assert live.now_bytes == 0


def test_in_place_operations_add_nothing() -> None:
    with LiveBytes() as live:
        x = torch.zeros(10)
        x.add_(1).mul_(2)
        x[2:5] += 1
        torch.exp(x, out=x)
    assert live.now_bytes == live.peak_bytes == 40


def test_freed_storages_are_subtracted_and_the_peak_stays() -> None:
    with LiveBytes() as live:
        x = torch.zeros(100)
        y = x + 1
        del x
        assert live.now_bytes == 400
        z = torch.zeros(25)
        del y
    assert (live.now_bytes, live.peak_bytes) == (100, 800)
    del z
    assert (live.now_bytes, live.peak_bytes) == (0, 800)


def test_a_temporary_is_in_the_peak() -> None:
    with LiveBytes() as live:
        x = torch.zeros(100)
        y = (x + 1) * 2
    assert (live.now_bytes, live.peak_bytes) == (800, 1200)
    assert y.shape == x.shape


def test_reused_memory_counts_as_a_new_storage() -> None:
    with LiveBytes() as live:
        for size in range(1, 200):
            x = torch.zeros(size)
            assert live.now_bytes == 4 * size
            del x
    assert (live.now_bytes, live.peak_bytes) == (0, 4 * 199)


def test_tensors_made_outside_count_when_added() -> None:
    x = torch.zeros(10)
    live = LiveBytes()
    with live:
        y = x * 2
        _ = x.view(10)
    assert live.now_bytes == 80, "a view of it is the first that is seen"
    live.add([x, x.view(2, 5), None, "no tensor", 3, nn.Parameter(torch.zeros(5))])
    assert live.now_bytes == 80
    assert live.peak_bytes == 100
    assert y.shape == x.shape


def test_operations_outside_are_not_counted() -> None:
    live = LiveBytes()
    with live:
        x = torch.zeros(10)
    y = torch.zeros(10)
    assert live.now_bytes == 40
    with live:
        z = torch.zeros(10)
    assert live.now_bytes == 80
    assert len((x, y, z)) == 3


def test_a_training_step_is_counted_to_the_byte() -> None:
    layer, x = nn.Linear(10, 10, bias=False), torch.ones(5, 10)
    live = LiveBytes()
    live.add([x, *layer.parameters()])
    assert live.now_bytes == 200 + 400
    with live:
        hidden = layer(x).relu()
        loss = hidden.sum()
        # What the linear layer returned is dead: relu remembers its own result.
        assert (live.now_bytes, live.peak_bytes) == (600 + 200 + 4, 600 + 200 + 200)
        loss.backward()
    # At the most: all of it, relu's gradient, the weight's, and the scalar that backward starts with.
    assert live.peak_bytes == 804 + 200 + 400 + 4
    assert live.now_bytes == 804 + 400
    del loss, hidden
    layer.zero_grad()
    assert live.now_bytes == 600


def test_tensors_saved_by_autograd_are_alive() -> None:
    x = torch.ones(10, requires_grad=True)
    live = LiveBytes()
    with live:
        loss = x.exp().sum()
        assert live.now_bytes == 40 + 4, "no name holds the exponential; its backward does"
        loss.backward()
    assert live.now_bytes == 4 + 40, "the exponential is freed with the graph; a gradient took its place"


def test_the_count_is_the_same_in_every_run() -> None:
    peaks = set()
    for _ in range(5):
        with LiveBytes() as live:
            model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
            model(torch.ones(16, 32)).sum().backward()
        assert live.now_bytes == 2 * 4 * (32 * 64 + 64 + 64 * 8 + 8), "weights and gradients"
        peaks.add(live.peak_bytes)
    assert len(peaks) == 1


def test_a_storage_that_grows_counts_its_new_size() -> None:
    with LiveBytes() as live:
        x = torch.empty(0)
        x.resize_(1000)
    assert live.now_bytes == 4000
    del x
    assert live.now_bytes == 0


def test_a_meta_tensor_has_no_memory() -> None:
    with LiveBytes() as live:
        x = torch.zeros(1000, device="meta")
        y = x + 1
    assert (live.now_bytes, live.peak_bytes, y.shape) == (0, 0, x.shape)
