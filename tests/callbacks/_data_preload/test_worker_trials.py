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
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from lightning_eff.callbacks._data_preload import worker_trials


class Noting(Dataset[int]):
    """Notes which samples were asked for in this process, and draws random numbers."""

    def __init__(self, length: int = 100) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        _ = torch.rand(1), np.random.rand(), random.random()
        return index


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({0: 1.0}, 0),
        ({0: 1.0, 1: 1.2, 2: 0.6}, 2),
        ({0: 1.0, 1: 6.0, 2: 5.0}, 0),
        ({0: 1.0, 1: 0.95, 2: 0.91}, 0),
        ({0: 1.0, 1: 0.8, 2: 0.4, 4: 0.38, 8: 0.2}, 8),
        ({0: 1.0, 1: 0.8, 2: 0.4, 4: 0.38, 8: 0.37}, 2),
    ],
)
def test_more_workers_must_earn_their_place(seconds: dict[int, float], chosen: int) -> None:
    assert worker_trials.best_num_workers(seconds) == chosen


def test_a_trial_asks_for_samples_by_index_and_leaves_sampler_and_random_states_alone() -> None:
    dataset = Noting()
    sampler = RandomSampler(dataset)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    sampler.__iter__ = lambda: pytest.fail("the sampler was asked")  # pyright: ignore[reportAttributeAccessIssue]
    choice = worker_trials.choose_num_workers(loader, max_workers=0, budget_s=60.0)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert choice.num_workers == 0
    assert set(dataset.asked) == {0, *range(5, 5 * (2 * worker_trials.MIN_BATCHES + 1))}


class Sleeps(Dataset[int]):
    """Takes 2 ms for a sample, and counts those of all processes."""

    def __init__(self) -> None:
        self.num_made = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        with self.num_made.get_lock():
            self.num_made.value += 1
        return index


@pytest.mark.parametrize(("most", "chosen"), [(0, 0), (1, 0), (2, 2), (4, 4), (8, 4)])
def test_more_workers_are_tried_until_they_do_not_help(
    most: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, tried = {0: 1.0, 1: 1.1, 2: 0.6, 4: 0.3, 8: 0.29, 16: 0.01}, list[int]()
    monkeypatch.setattr(worker_trials.LoaderTrial, "alone", lambda _: seconds[0])
    monkeypatch.setattr(
        worker_trials.LoaderTrial, "with_workers", lambda _, count: tried.append(count) or seconds[count]
    )
    choice = worker_trials.choose_num_workers(
        DataLoader(Sleeps(), batch_size=8), max_workers=most, budget_s=1.0
    )
    assert choice.num_workers == chosen
    assert tried == [count for count in (1, 2, 4, 8) if count <= most]


def test_the_budget_bounds_the_samples_of_trials_and_no_process_is_left() -> None:
    samples = Sleeps()
    choice = worker_trials.choose_num_workers(
        DataLoader(samples, batch_size=1000), max_workers=2, budget_s=0.3
    )
    assert samples.num_made.value < 1000, "fewer than one batch has"
    assert choice.seconds_per_batch[0] >= 1000 * 0.002
    assert set(choice.seconds_per_batch) == {0, 1, 2}
    for _ in range(3000):
        if not multiprocessing.active_children():
            break
        time.sleep(0.01)
    assert multiprocessing.active_children() == []


class ByProcess(Dataset[int]):
    """Depends on the process that makes it, as what reads from a shared handle does."""

    def __init__(self, *, draws: bool) -> None:
        self.home = os.getpid()
        self.draws = draws

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        noise = torch.rand(1).item() if self.draws else 0.0
        return index + noise + (0.5 if os.getpid() != self.home else 0.0)


def test_workers_whose_samples_are_others_are_not_used_unless_samples_are_drawn() -> None:
    choice = worker_trials.choose_num_workers(
        DataLoader(ByProcess(draws=False), batch_size=4), max_workers=2, budget_s=0.4
    )
    assert choice.num_workers == 0
    assert "samples differ from this process" in choice.reason
    choice = worker_trials.choose_num_workers(
        DataLoader(ByProcess(draws=True), batch_size=4), max_workers=2, budget_s=0.4
    )
    assert choice.reason == ""
    assert set(choice.seconds_per_batch) == {0, 1, 2}


class Hangs(Dataset[int]):
    """Asks a thread that a forked process does not have."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return self.pool.submit(int, index).result()


@pytest.mark.slow  # PyTorch asks its workers every five seconds
def test_a_worker_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_trials, "WORKER_TIMEOUT_S", 0.5)
    choice = worker_trials.choose_num_workers(DataLoader(Hangs(), batch_size=4), max_workers=2, budget_s=0.2)
    assert choice.num_workers == 0
    assert "RuntimeError in a worker" in choice.reason


def test_no_process_is_started_where_that_would_run_the_script_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_trials.multiprocessing, "get_start_method", lambda allow_none: "spawn")
    choice = worker_trials.choose_num_workers(DataLoader(Sleeps(), batch_size=8), max_workers=2, budget_s=0.3)
    assert (choice.num_workers, set(choice.seconds_per_batch)) == (0, {0})
    assert "a script without a main guard" in choice.reason


class Stream(IterableDataset[int]):
    """Would be consumed by a trial."""

    def __iter__(self) -> Any:
        return iter(range(3))


class Unsized(Dataset[int]):
    """Does not know how many it has."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("loader", "answer"),
    [
        (DataLoader(TensorDataset(torch.arange(4))), True),
        (DataLoader(Stream()), False),
        (DataLoader(TensorDataset(torch.arange(0))), False),
        (DataLoader(Unsized(), sampler=range(3)), False),
    ],
)
def test_what_can_be_tried(loader: Any, answer: bool) -> None:
    choice = worker_trials.choose_num_workers(loader, max_workers=0, budget_s=0.01)
    assert (choice is not None) is answer


def test_batches_have_the_loaders_size_however_it_makes_them() -> None:
    dataset = Noting(7)
    forms = {
        "batch_size": DataLoader(dataset, batch_size=3),
        "batch_sampler": DataLoader(dataset, batch_sampler=BatchSampler(range(7), 3, drop_last=False)),
        "batches in a list": DataLoader(dataset, batch_sampler=[[0, 1, 2], [3, 4, 5], [6]]),
        "no batches": DataLoader(dataset, batch_size=None),
    }
    asked = []
    for loader in forms.values():
        dataset.asked = []
        worker_trials.choose_num_workers(loader, max_workers=0, budget_s=60.0)
        asked.append(dataset.asked[:4])
    assert asked == [[0, 3, 4, 5], [0, 3, 4, 5], [0, 3, 4, 5], [0, 1, 2, 3]]


def test_cores_are_divided_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_trials.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert [worker_trials.num_cores(n) for n in (1, 4, 12, 100)] == [12, 3, 1, 1]
    monkeypatch.delattr(worker_trials.os, "sched_getaffinity")
    monkeypatch.setattr(worker_trials.os, "cpu_count", lambda: None)
    assert worker_trials.num_cores() == 1
