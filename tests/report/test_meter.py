"""Probe: which batches are counted, and what. Meter: which are timed, and that closing restores all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from lightning_eff.core import allocator
from lightning_eff.kernels import devices
from lightning_eff.report import throughput
from lightning_eff.report.meter import Meter, Probe, samples_and_tokens
from lightning_eff.report.recording import Recorder
from lightning_eff.report.throughput import FETCH_ACTION

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that stands still until `now` is set."""
    watch = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: watch.now))
    return watch


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
        batch = (torch.ones(5, 10), torch.zeros(5, 7, dtype=torch.long))
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
    measured = run(clock, num_batches=7, accumulate=2, num_warmup_batches=1)
    assert measured.probe.num_batches == 4, "the fourth ends with the second step"
    assert list(measured.throughput.batch_times_s) == [9.0, 10.0]


def test_figures_are_exact(clock: SimpleNamespace) -> None:
    figures = run(clock, num_batches=7).summary(dtype=torch.float32, world_size=3)
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
    assert figures["peak_bytes"] == 12345
    assert figures["peak_measured"] == "max_memory_allocated"
    assert figures["num_batches"] == 3, "live bytes are not counted, so one counted batch is enough"
    assert figures["mfu"] == figures["flops_per_s"] / 989e12 > 0
    assert measured.summary(dtype=torch.float32, world_size=1)["mfu"] == figures["flops_per_s"] / 67e12


def test_closing_in_the_middle_of_a_batch_stops_everything() -> None:
    profiler, layer = PassThroughProfiler(), nn.Linear(10, 10)
    before = dict(vars(profiler))
    measured = Meter(CPU, profiler, num_warmup_batches=0, is_counted=True)
    measured.begin_batch(torch.ones(5, 10), layer, [])
    measured.close()
    measured.close()
    layer(torch.ones(5, 10))
    assert vars(profiler) == before
    assert measured.probe._count.flops == 0
    assert measured.summary(dtype=torch.float32, world_size=1)["peak_bytes"] is None


LONG = torch.long


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(4, 7, dtype=LONG), torch.zeros(4, 7, dtype=LONG)), (4, 28)),
        ({"b": {"mask": torch.zeros(6, 5), "ids": torch.zeros(6, 9, dtype=torch.int32)}}, (6, 54)),
        ([["name"], {"image": torch.zeros(3, 2, 8, 8)}, torch.zeros(3, dtype=LONG)], (3, 0)),
        ((torch.tensor(1.0), torch.zeros(2, 3)), (2, 0)),
        ((torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)), (2, 0)),
        (torch.tensor(1.0), (1, 0)),
        (None, (1, 0)),
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


def test_flops_are_of_the_first_batch_alone() -> None:
    for recorder, num_batches in ((None, 1), (Recorder(), 2)):
        probe = Probe(recorder)
        train(probe, 4)
        assert (probe.flops, probe.num_batches) == (2 * PRODUCT, num_batches), "bytes need another batch"


def test_peak_holds_parameters_gradients_momentum_and_activations() -> None:
    first, second = Recorder(), Recorder()
    train(Probe(first), 1)
    train(Probe(second), 2)
    weight, activation, scalar = 400, 200, 4
    # In the first step, which makes the momentum: weight, its gradient, momentum, input.
    assert first.peak_bytes == 3 * weight + activation
    # In the second backward: the three weights, input, relu's gradient, the loss and its own gradient.
    assert second.peak_bytes == 3 * weight + 2 * activation + 2 * scalar


@pytest.mark.parametrize(
    ("recorder", "num_batches", "steps", "done"),
    [
        (None, 0, 0, False),
        (None, 1, 0, True),
        (Recorder(), 1, 1, False),
        (Recorder(), 2, 1, False),
        (Recorder(), 2, 2, True),
    ],
)
def test_done_after_the_first_batch_and_with_bytes_after_two_steps(
    *, recorder: Recorder | None, num_batches: int, steps: int, done: bool
) -> None:
    layer, optimizer, x = make_training()
    probe = Probe(recorder)
    for _ in range(num_batches):
        probe.begin(x, layer, [optimizer])
        probe.end()
    assert probe.is_done(steps) is done


def test_training_is_the_same_with_it() -> None:
    counted = train(Probe(Recorder()), 6)
    assert torch.equal(train(None, 6).weight, counted.weight)
    assert not torch.equal(counted.weight, make_training()[0].weight)
