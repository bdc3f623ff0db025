"""Batch times and data waits on a clock that the test controls; the batches that are counted and timed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.core import allocator
from lightning_eff.kernels import devices
from lightning_eff.report.meter import Meter, samples_and_tokens
from tests.support.fetching import Fetching

CPU, LONG = torch.device("cpu"), torch.long


def run(
    clock: SimpleNamespace,
    *,
    num_batches: int,
    accumulate: int = 1,
    device: torch.device = CPU,
    num_warmup_batches: int = 2,
    is_counted: bool = True,
) -> Meter:
    """Train a layer on batches of 5; a batch is 1 s of waiting and 3 s of work, and each is 1 s longer."""
    layer, loop = nn.Linear(10, 10, bias=False), Fetching()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    measured = Meter(device, loop, num_warmup_batches=num_warmup_batches, is_counted=is_counted)
    for index in range(num_batches):
        loop.fetch(lambda: setattr(clock, "now", clock.now + 1.0))
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
    assert figures["peak_bytes"] >= 2 * 400 + 200
    assert figures["mfu"] is None, "the peak of a CPU is an estimate"
    counts = {"num_batches": 3, "world_size": 3, "first_batch_s": 7.0}
    rates = {"samples_per_s": 3 * 15 / 27, "tokens_per_s": 3 * 105 / 27, "data_wait_share": 3 / 27}
    rates |= {"flops_per_sample": flops_per_sample, "flops_per_s": flops_per_sample * 15 / 27}
    rates |= {"batch_time_s": 9.0, "batch_time_p90_s": 9.8}
    assert {name: figures[name] for name in (*counts, *rates)} == pytest.approx(counts | rates, rel=1e-15)
    measured = run(clock, num_batches=7, accumulate=2, num_warmup_batches=1)
    assert measured.probe.num_batches == 4, "the fourth ends with the second step"
    assert list(measured.throughput.batch_times_s) == [9.0, 10.0]


TIMES = ("batch_time_s", "batch_time_p90_s", "samples_per_s", "data_wait_share", "flops_per_s")
COUNTED = ("flops_per_sample", "flops_per_s", "mfu", "peak_bytes")


@pytest.mark.parametrize(
    ("num_batches", "is_counted", "missing", "expected"),
    [
        (13, False, COUNTED, {"batch_time_s": 11.5, "batch_time_p90_s": 15.1, "num_batches": 10}),
        (2, True, TIMES, {"flops_per_sample": 2 * 2 * 10 * 10, "num_batches": 0}),  # too short to time
    ],
)
def test_what_was_not_measured_is_none(
    clock: SimpleNamespace, num_batches: int, *, is_counted: bool, missing: Any, expected: dict[str, Any]
) -> None:
    measured = run(clock, num_batches=num_batches, is_counted=is_counted)
    figures = measured.summary(dtype=torch.float32, world_size=1)
    assert {figures[name] for name in missing} == {None}
    assert figures | expected == figures


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
    unknown = dataclasses.replace(devices.DEVICES["h200"], is_estimate=True)
    monkeypatch.setattr(devices, "of", lambda device: unknown)
    assert measured.summary(dtype=torch.float32, world_size=1)["mfu"] is None


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((torch.zeros(4, 7, dtype=LONG), torch.zeros(4, 7, dtype=LONG)), (4, 28)),
        ({"b": {"mask": torch.zeros(6, 5), "ids": torch.zeros(6, 9, dtype=torch.int32)}}, (6, 54)),
        ((torch.tensor(1.0), torch.zeros(2, 3)), (2, 0)),
        ("text", (1, 0)),
    ],
)
def test_samples_and_tokens_of_nested_batches(batch: object, expected: tuple[int, int]) -> None:
    assert samples_and_tokens(batch) == expected
