"""Trials: how many workers are chosen, on which figures and samples, and that nothing is left changed."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_eff.callbacks import data_preload
from lightning_eff.callbacks.data_preload import NUM_BATCHES, choose_num_workers


def choose(dataset: Any, batch_size: int, max_workers: int, budget_s: float) -> Any:
    return choose_num_workers(
        DataLoader(dataset, batch_size=batch_size), max_workers=max_workers, budget_s=budget_s
    )


class Counted(Dataset[int]):
    length = 40_000  # of which trials may take a twentieth

    def __len__(self) -> int:
        return self.length


class Noting(Counted):
    """Notes which samples were requested in this process, and draws random numbers."""

    def __init__(self) -> None:
        self.requests: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.requests.append(index)
        _ = torch.rand(1), np.random.rand(), random.random()
        return index


def test_a_trial_reads_samples_by_index_and_leaves_sampler_and_random_states_alone() -> None:
    dataset = Noting()
    sampler = RandomSampler(dataset)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    sampler.__iter__ = lambda: pytest.fail("the sampler was asked")  # pyright: ignore[reportAttributeAccessIssue]
    choice = choose_num_workers(loader, max_workers=0, budget_s=60.0)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert choice.num_workers == 0
    assert set(dataset.requests) == set(range(5 * 2 * NUM_BATCHES))


class Sleeps(Counted):
    """Takes 2 ms for a sample, and counts those of all processes."""

    def __init__(self) -> None:
        self.num_made = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        with self.num_made.get_lock():
            self.num_made.value += 1
        return index


@pytest.mark.parametrize(
    ("most", "several", "chosen"),
    [
        (1, {}, 0),
        (16, {}, 4),
        (2, {1: 6.0, 2: 5.0}, 0),
        (2, {1: 0.95, 2: 0.91}, 0),
    ],
)
def test_more_workers_are_tried_while_they_help(
    most: int, several: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, tried = {0: 1.0, 1: 1.1, 2: 0.6, 4: 0.3, 8: 0.29, 16: 0.01} | several, list[int]()

    def trial(loader: Any, count: int, size: int, budget_s: float) -> tuple[list[Any], float]:
        tried.append(count)
        return [1], seconds[count]

    monkeypatch.setattr(data_preload, "_trial", trial)
    assert choose(range(4000), 8, most, budget_s=1.0).num_workers == chosen
    assert tried == [count for count in (0, 1, 2, 4, 8) if count <= most]


def test_the_budget_bounds_the_samples_of_trials() -> None:
    samples = Sleeps()
    choice = choose(samples, 1000, 2, budget_s=0.3)
    assert samples.num_made.value < 1000, "fewer than one batch has"
    assert choice.seconds_per_batch[0] >= 1000 * 0.002
    assert set(choice.seconds_per_batch) == {0, 1, 2}


def test_no_worker_is_tried_for_a_loader_that_takes_no_time() -> None:
    loader = DataLoader(range(20_000), batch_size=32)
    choice = choose_num_workers(loader, max_workers=8, budget_s=4.0)
    assert (choice.num_workers, set(choice.seconds_per_batch)) == (0, {0})


class ByProcess(Counted):
    """Depends on the process that makes it, as what reads from a shared handle does."""

    def __init__(self, *, draws: bool) -> None:
        self.home = os.getpid()
        self.draws = draws

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        noise = torch.rand(1).item() if self.draws else 0.0
        return index + noise + (0.5 if os.getpid() != self.home else 0.0)


def test_workers_with_other_samples_are_not_used_unless_samples_are_random() -> None:
    choice = choose(ByProcess(draws=False), 4, 2, budget_s=0.4)
    assert (choice.num_workers, set(choice.seconds_per_batch)) == (0, {0})
    assert choice.reason
    choice = choose(ByProcess(draws=True), 4, 2, budget_s=0.4)
    assert (choice.reason, set(choice.seconds_per_batch)) == ("", {0, 1, 2})


class Hangs(Counted):
    """Asks a thread that a forked process does not have."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def __getitem__(self, index: int) -> int:
        return self.pool.submit(int, index).result()


@pytest.mark.slow  # PyTorch asks its workers every five seconds
def test_a_worker_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preload, "WORKER_TIMEOUT_S", 0.5)
    choice = choose(Hangs(), 4, 2, budget_s=0.2)
    assert choice.num_workers == 0
    assert "a trial failed (RuntimeError" in choice.reason


def test_no_process_is_started_where_that_would_run_the_script_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preload.multiprocessing, "get_start_method", lambda allow_none: "spawn")
    choice = choose(Sleeps(), 8, 2, budget_s=0.3)
    assert (choice.num_workers, set(choice.seconds_per_batch)) == (0, {0})
    assert "spawn" in choice.reason


def test_samples_that_have_no_number_or_are_none_leave_the_loader_as_it_is() -> None:
    for dataset in ({"a": 1}, []):
        choice = choose_num_workers(DataLoader(dataset, sampler=list(dataset)), max_workers=0, budget_s=0.1)  # pyright: ignore[reportArgumentType]
        assert choice.num_workers is None
        assert choice.reason
