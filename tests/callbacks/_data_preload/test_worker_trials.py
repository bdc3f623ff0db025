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
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_eff.callbacks._data_preload import worker_trials


def choose(dataset: Any, batch_size: int, max_workers: int, budget_s: float) -> Any:
    loader = DataLoader(dataset, batch_size=batch_size)
    return worker_trials.choose_num_workers(loader, max_workers=max_workers, budget_s=budget_s)


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


@pytest.mark.parametrize(
    ("most", "several", "chosen"),
    [
        (0, {}, 0),
        (1, {}, 0),
        (2, {}, 2),
        (4, {}, 4),
        (8, {}, 4),
        (2, {1: 6.0, 2: 5.0}, 0),
        (2, {1: 0.95, 2: 0.91}, 0),
    ],
)
def test_more_workers_are_tried_and_must_earn_their_place(
    most: int, several: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, tried = {0: 1.0, 1: 1.1, 2: 0.6, 4: 0.3, 8: 0.29, 16: 0.01} | several, list[int]()
    monkeypatch.setattr(worker_trials.LoaderTrial, "alone", lambda _: seconds[0])
    monkeypatch.setattr(
        worker_trials.LoaderTrial, "with_workers", lambda _, count: tried.append(count) or seconds[count]
    )
    choice = choose(Sleeps(), 8, most, budget_s=1.0)
    assert choice.num_workers == chosen
    assert tried == [count for count in (1, 2, 4, 8) if count <= most]


def test_the_budget_bounds_the_samples_of_trials() -> None:
    samples = Sleeps()
    choice = choose(samples, 1000, 2, budget_s=0.3)
    assert samples.num_made.value < 1000, "fewer than one batch has"
    assert choice.seconds_per_batch[0] >= 1000 * 0.002
    assert set(choice.seconds_per_batch) == {0, 1, 2}


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
    choice = choose(ByProcess(draws=False), 4, 2, budget_s=0.4)
    assert choice.num_workers == 0
    assert "samples differ from this process" in choice.reason
    choice = choose(ByProcess(draws=True), 4, 2, budget_s=0.4)
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
    choice = choose(Hangs(), 4, 2, budget_s=0.2)
    assert choice.num_workers == 0
    assert "RuntimeError in a worker" in choice.reason


def test_no_process_is_started_where_that_would_run_the_script_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_trials.multiprocessing, "get_start_method", lambda allow_none: "spawn")
    choice = choose(Sleeps(), 8, 2, budget_s=0.3)
    assert (choice.num_workers, set(choice.seconds_per_batch)) == (0, {0})
    assert "a script without a main guard" in choice.reason


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
