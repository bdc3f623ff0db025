"""Batch times by a clock that the test turns, and the wait for data, heard from a real profiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_eff.report import throughput
from lightning_eff.report.throughput import FETCH_ACTION, DataWait, Throughput


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that stands still until `now` is set."""
    watch = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: watch.now))
    return watch


def test_rates_medians_and_shares_are_exact(clock: SimpleNamespace) -> None:
    measured = Throughput()
    summary = measured.summary()
    assert summary.pop("num_batches") == 0
    assert set(summary.values()) == {None}
    for seconds in (4.0, 1.0, 2.0, 8.0, 1.0):
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


def test_time_before_a_restart_does_not_count(clock: SimpleNamespace) -> None:
    measured = Throughput()
    clock.now += 50.0
    measured.restart()
    clock.now += 2.0
    measured.finish_batch(4, 0, 0.0)
    clock.now += 30.0
    measured.restart()
    clock.now += 3.0
    measured.finish_batch(4, 0, 0.0)
    assert list(measured.batch_times_s) == [2.0, 3.0]
    assert measured.summary()["samples_per_s"] == 8 / 5


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
def test_the_profiler_is_restored(kind: type[Any]) -> None:
    profiler = kind()
    before = dict(vars(profiler))
    wait = DataWait(profiler)
    assert {"start", "stop"} <= set(vars(profiler))
    assert type(profiler) is kind
    wait.close()
    assert vars(profiler) == before
    with profiler.profile(FETCH_ACTION):
        pass
    wait.close()
    assert wait.take() == 0.0, "it hears nothing any more"


def test_fetches_alone_add_up_until_they_are_taken(clock: SimpleNamespace) -> None:
    profiler = SimpleProfiler()
    wait = DataWait(profiler)
    for fetch_s, train_s in ((1.0, 10.0), (2.0, 20.0)):
        with profiler.profile(FETCH_ACTION):
            clock.now += fetch_s
        with profiler.profile("run_training_batch"):
            clock.now += train_s
    assert (wait.take(), wait.take()) == (3.0, 0.0), "what was taken is gone"
    assert len(profiler.recorded_durations["run_training_batch"]) == 2, "the profiler does its own work"
