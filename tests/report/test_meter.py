"""Batch times by a clock that the test turns, waits for data, and which batches are counted and timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch import Tensor, nn

from lightning_eff.core import allocator
from lightning_eff.kernels import devices
from lightning_eff.report import meter
from lightning_eff.report.meter import FETCH_ACTION, DataWait, Meter, Probe, Throughput, samples_and_tokens
from lightning_eff.report.recording import Recorder

CPU, LONG = torch.device("cpu"), torch.long


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that stands still until `now` is set."""
    watch = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: watch.now))
    return watch


def test_rates_medians_and_shares_are_exact(clock: SimpleNamespace) -> None:
    measured = Throughput()
    summary = measured.summary()
    assert summary.pop("num_batches") == 0
    assert set(summary.values()) == {None}
    for seconds in (4.0, 1.0, 2.0, 8.0, 1.0):
        clock.now += 50.0  # before a restart: not a batch's
        measured.restart()
        clock.now += seconds
        measured.finish_batch(num_samples=6, num_tokens=60, wait_s=0.5)
    assert list(measured.batch_times_s) == [4.0, 1.0, 2.0, 8.0, 1.0]
    assert measured.summary() == {
        "batch_time_s": 2.0,
        "batch_time_p90_s": 4.0,
        "samples_per_s": 30 / 16,
        "tokens_per_s": 300 / 16,
        "data_wait_share": 2.5 / 16,
        "num_batches": 5,
    }


def test_percentiles_and_what_is_none(clock: SimpleNamespace) -> None:
    measured = Throughput()
    for seconds in (*range(1, 11), 1000):
        clock.now += seconds
        measured.finish_batch(1, 0, wait_s=1.5 * seconds)
    summary = measured.summary()
    assert (summary["batch_time_p90_s"], summary["batch_time_s"]) == (10.0, 6.0)
    assert (summary["tokens_per_s"], summary["data_wait_share"]) == (None, 1.0), "waits are at most all"


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
def test_fetches_alone_add_up_and_the_profiler_is_restored(clock: SimpleNamespace, kind: type[Any]) -> None:
    profiler = kind()
    before = dict(vars(profiler))
    wait = DataWait(profiler)
    assert type(profiler) is kind
    for fetch_s, train_s in ((1.0, 10.0), (2.0, 20.0)):
        with profiler.profile(FETCH_ACTION):
            clock.now += fetch_s
        with profiler.profile("run_training_batch"):
            clock.now += train_s
    assert (wait.take(), wait.take()) == (3.0, 0.0), "what was taken is gone"
    if kind is SimpleProfiler:
        assert len(profiler.recorded_durations["run_training_batch"]) == 2, "it does its own work"
    wait.close()
    assert vars(profiler) == before
    with profiler.profile(FETCH_ACTION):
        clock.now += 1.0
    wait.close()
    assert wait.take() == 0.0, "it hears nothing any more"


def run(
    clock: SimpleNamespace,
    *,
    num_batches: int,
    accumulate: int = 1,
    device: torch.device = CPU,
    num_warmup_batches: int = 2,
    is_counted: bool = True,
) -> Meter:
    """Train a layer on batches of 5, each 1 s of waiting and 3 s of work, 1 s longer from batch to batch."""
    layer, profiler = nn.Linear(10, 10, bias=False), PassThroughProfiler()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    measured = Meter(device, profiler, num_warmup_batches=num_warmup_batches, is_counted=is_counted)
    for index in range(num_batches):
        with profiler.profile(FETCH_ACTION):
            clock.now += 1.0
        batch = (torch.ones(5, 10), torch.zeros(5, 7, dtype=LONG))
        measured.begin_batch(batch, layer, [optimizer])
        layer(batch[0]).sum().backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        clock.now += 3.0 + index
        measured.end_batch(batch, num_steps=(index + 1) // accumulate)
    measured.close()
    return measured


def test_batches_are_timed_after_those_that_are_counted_and_the_warmup(clock: SimpleNamespace) -> None:
    measured = run(clock, num_batches=7)
    assert measured.probe.num_batches == 2
    assert list(measured.throughput.batch_times_s) == [8.0, 9.0, 10.0]
    figures = measured.summary(dtype=torch.float32, world_size=3)
    # Forward, and the weight's gradient: two products of 5 x 10 x 10.
    flops_per_sample = 2 * 2 * 10 * 10
    assert figures.pop("peak_bytes") >= 2 * 400 + 200
    assert figures == {
        "batch_time_s": 9.0,
        "batch_time_p90_s": 9.0,
        "samples_per_s": 3 * 15 / 27,
        "tokens_per_s": 3 * 105 / 27,
        "data_wait_share": 3 / 27,
        "num_batches": 3,
        "world_size": 3,
        "first_batch_s": 7.0,
        "flops_per_sample": flops_per_sample,
        "flops_per_s": pytest.approx(flops_per_sample * 15 / 27, rel=1e-15),
        "mfu": None,
        "peak_measured": "live bytes of the first batches",
    }
    measured = run(clock, num_batches=7, accumulate=2, num_warmup_batches=1)
    assert measured.probe.num_batches == 4, "the fourth ends with the second step"
    assert list(measured.throughput.batch_times_s) == [9.0, 10.0]


def test_what_was_not_measured_is_none(clock: SimpleNamespace) -> None:
    figures = run(clock, num_batches=5, is_counted=False).summary(dtype=torch.float32, world_size=1)
    assert [figures[name] for name in ("flops_per_sample", "flops_per_s", "mfu", "peak_bytes")] == [None] * 4
    assert figures["samples_per_s"] == 10 / 15
    figures = run(clock, num_batches=2).summary(dtype=torch.float32, world_size=2)
    assert figures["flops_per_sample"] == 2 * 2 * 10 * 10, "too short to time"
    assert [figures[name] for name in ("samples_per_s", "tokens_per_s", "flops_per_s")] == [None, None, None]
    assert figures["num_batches"] == 0


def test_the_peak_of_an_allocator_is_used_if_it_has_one(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(allocator, "reset_peak", reset.append)
    monkeypatch.setattr(allocator, "peak_bytes", lambda device: 12345)
    monkeypatch.setattr(devices, "of", lambda device: devices.DEVICES["h200"])
    device = torch.device("cuda", 0)
    measured = run(clock, num_batches=4, device=device, num_warmup_batches=0)
    figures = measured.summary(dtype=torch.bfloat16, world_size=1)
    assert reset == [device]
    assert (figures["peak_bytes"], figures["peak_measured"]) == (12345, "max_memory_allocated")
    assert figures["num_batches"] == 3, "live bytes are not counted, so one counted batch is enough"
    assert figures["mfu"] == figures["flops_per_s"] / 989e12 > 0
    assert measured.summary(dtype=torch.float32, world_size=1)["mfu"] == figures["flops_per_s"] / 67e12


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(4, 7, dtype=LONG), torch.zeros(4, 7, dtype=LONG)), (4, 28)),
        ({"b": {"mask": torch.zeros(6, 5), "ids": torch.zeros(6, 9, dtype=torch.int32)}}, (6, 54)),
        ([["name"], {"image": torch.zeros(3, 2, 8, 8)}, torch.zeros(3, dtype=LONG)], (3, 0)),
        ((torch.tensor(1.0), torch.zeros(2, 3)), (2, 0)),
        ((torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)), (2, 0)),
        ("text", (1, 0)),
    ],
)
def test_samples_and_tokens_of_nested_batches(batch: object, expected: tuple[int, int]) -> None:
    assert samples_and_tokens(batch) == expected


PRODUCT = 2 * 5 * 10 * 10
"""One matrix product of the layer below: five samples, ten channels in and out."""


def make_training() -> tuple[nn.Linear, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return layer, optimizer, torch.randn(5, 10)


def train(probe: Probe | None, num_batches: int) -> nn.Linear:
    """Train as the Meter does: count until the probe is done."""
    layer, optimizer, x = make_training()
    for step in range(num_batches):
        probing = probe is not None and not probe.is_done(step)
        if probing:
            probe.begin((x, {"none": None}), layer, [optimizer])
        optimizer.zero_grad()
        layer(x).relu().sum().backward()
        optimizer.step()
        if probing:
            probe.end()
    return layer


def test_flops_are_of_the_first_batch_and_bytes_of_two_steps() -> None:
    alone, recorder = Probe(), Recorder()
    probe = Probe(recorder)
    train(alone, 4)
    counted = train(probe, 4)
    assert (alone.flops, alone.num_batches) == (2 * PRODUCT, 1)
    assert (probe.flops, probe.num_batches) == (2 * PRODUCT, 2)
    # In the second backward: the three weights, input, relu's gradient, the loss and its own gradient.
    assert recorder.peak_bytes == 3 * 400 + 2 * 200 + 2 * 4
    assert torch.equal(train(None, 4).weight, counted.weight), "counting changes nothing"


def test_closed_in_the_middle_of_a_batch_it_counts_no_more() -> None:
    layer, optimizer, x = make_training()
    recorder = Recorder()
    probe = Probe(recorder)
    probe.begin(x, layer, [optimizer])
    y = layer(x)
    probe.close()
    probe.close()
    z = layer(x)
    assert (probe.num_batches, probe.flops, recorder.flops) == (0, 0, PRODUCT)
    assert recorder.now_bytes == 400 + 200 + 200
    assert torch.equal(y, z)
