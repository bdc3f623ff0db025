"""DataPreload: training is unchanged; the choice of workers, and the loader that fetches ahead."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch.multiprocessing.reductions import shared_cache
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.callbacks import data_preload
from lightning_eff.callbacks.data_preload import (
    NUM_BATCHES,
    DataPreload,
    PrefetchLoader,
    StatefulPrefetchLoader,
    choose_num_workers,
)
from lightning_eff.core.dataloaders import is_stateful
from tests.support.models import Net, fit, make_loader, seeded
from tests.support.ranks import results_of_two_ranks

# torchdata 0.11 on torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Samples(Dataset[Any]):
    """Samples that take a while to load."""

    def __init__(self, length: int = 40, wait_s: float = 0.0) -> None:
        self.length, self.wait_s = length, wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), index % 3


def trained(preload: DataPreload | None, loader: Any, model: Any, *others: Any, **keywords: Any) -> Any:
    callbacks = [preload] if preload is not None else []
    fit(model, *callbacks, *others, loader=loader, **{"max_epochs": 2} | keywords)
    return model


@pytest.mark.parametrize(
    ("num_workers", "persistent", "own_workers"),
    [("auto", False, 0), (2, False, 1), (2, True, 0), (0, False, 1)],
)
def test_shuffled_epochs_with_dropout_are_bit_identical(
    num_workers: Any, persistent: bool, own_workers: int, net: Callable[..., Net]
) -> None:
    """Even if a hook draws between the creation of the loader's iterator and the first batch."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=own_workers)

    drawn: list[float] = []
    draws = LambdaCallback(on_train_epoch_start=lambda *_: drawn.append(torch.rand(1).item()))
    ours = DataPreload(num_workers=num_workers, persistent_workers=persistent)
    losses = [trained(preload, loader(), net(), draws).losses for preload in (None, ours)]
    assert losses[0] == losses[1]
    assert drawn[:2] == drawn[2:]
    assert len(set(losses[0])) > 15


def test_the_loader_keeps_its_own_settings(net: Callable[..., Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "0")  # else Lightning sets a function that seeds them
    loader = make_loader()
    before = dict(vars(loader))
    seen: list[dict[str, Any]] = []

    def look(trainer: Any, _: Any) -> None:
        seen.append({name: getattr(trainer.train_dataloader._tuned, name) for name in wanted})

    wanted = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "pin_memory": False}
    preload = DataPreload(num_workers=1, prefetch_factor=3, persistent_workers=True)
    trainer = fit(net(), preload, LambdaCallback(on_train_start=look), loader=loader, max_epochs=2)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(net(), loader)
    assert seen == [wanted, wanted]
    assert vars(loader) == before
    assert "process_dataloader" not in trainer.strategy.__dict__
    assert pickle.loads(pickle.dumps(preload)).outcome().did == preload.outcome().did


class WorkerIds(Samples):
    """Samples whose label is 1 if a worker loads them, else 0."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], int(get_worker_info() is not None)


def test_a_second_fit_uses_workers_too(net: Callable[..., Net]) -> None:
    seen: list[int] = []
    look = LambdaCallback(on_train_batch_start=lambda *args: seen.extend(args[2][1].tolist()))
    loader = DataLoader(WorkerIds(4), batch_size=2)
    trainer = fit(net(), DataPreload(num_workers=1), look, loader=loader, max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net(), loader)
    assert seen == [1] * 12


@pytest.mark.slow
def test_thirty_epochs_leak_no_processes_files_or_objects(net: Callable[..., Net]) -> None:
    counts: list[tuple[int, ...]] = []

    def count(trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.losses.clear()
        if trainer.current_epoch not in (9, 29):
            return
        shared_cache.free_dead_references()  # torch does so itself once there are 128
        gc.collect()
        folder = Path("/proc/self/fd")
        files = len(list(folder.iterdir())) if folder.exists() else 0
        children = len(multiprocessing.active_children())
        counts.append((children, threading.active_count(), files, len(gc.get_objects())))

    for num_workers in (0, 2):
        counts.clear()
        loader = DataLoader(Samples(12, 0.001), batch_size=4, shuffle=True)
        preload = DataPreload(num_workers=num_workers, persistent_workers=num_workers > 0)
        trained(preload, loader, net(), LambdaCallback(on_train_epoch_end=count), max_epochs=30)
        early, late = counts
        assert late[0] == early[0] == num_workers
        assert late[1] <= early[1]
        assert late[2] <= early[2]
        assert late[3] - early[3] < 40, "objects: less than two for each of 20 epochs"


class Own(Net):
    """Has a hook that moves batches."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.moved = getattr(self, "moved", 0) + 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def test_a_custom_hook_that_moves_batches_is_called_once_per_batch_and_nothing_is_moved_ahead() -> None:
    preload, model, devices = DataPreload(num_workers=0), Own(), list[Any]()
    look = LambdaCallback(on_train_start=lambda trainer, _: devices.append(trainer.train_dataloader.device))
    fit(model, preload, look, max_steps=5)
    assert model.moved == 5
    assert "Own.transfer_batch_to_device" in preload.outcome().did
    assert devices == [None]


def test_every_loader_of_a_combined_loader_is_prepared() -> None:
    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch["a"] is None:
                return super().training_step(batch["b"], batch_idx)
            return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    def combined() -> CombinedLoader:
        first = DataLoader(Samples(16, 0.001), batch_size=4, shuffle=True)
        second = DataLoader(Samples(24), batch_size=4, shuffle=True)
        return CombinedLoader({"a": first, "b": second}, mode="max_size")

    results = []
    for preload in (None, DataPreload(num_workers=1)):
        results.append(trained(preload, combined(), seeded(Two, dropout=0.0), max_epochs=2).losses)
        if preload:
            assert len(preload.outcome().numbers["num_workers"]) == 2
    assert results[0] == results[1]
    assert len(results[0]) == 20


class Numbers(IterableDataset[Any]):
    """A stream that continues in the next epoch, and counts how far it was read."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            time.sleep(0.0015)
            yield torch.full((8,), float(self.position)), self.position % 3


def test_a_stream_keeps_its_workers_and_is_not_read_ahead(net: Callable[..., Net]) -> None:
    results = []
    for preload in (None, DataPreload()):
        stream = Numbers()
        model = trained(preload, DataLoader(stream, batch_size=2), net(), limit_train_batches=5)
        results.append((model.losses, stream.position))
    assert results[0] == results[1]
    assert preload is not None
    assert not preload.outcome().effective


class Doubling(DataLoader[Any]):
    """Changes its batches."""

    def __iter__(self) -> Any:
        return ((2 * inputs, targets) for inputs, targets in super().__iter__())


def test_a_loader_with_its_own_iter_keeps_its_workers(net: Callable[..., Net]) -> None:
    def loader() -> Any:
        return Doubling(Samples(), batch_size=4, shuffle=True, num_workers=1)

    models = [
        trained(preload, loader(), net(), max_epochs=1) for preload in (None, DataPreload(num_workers=0))
    ]
    assert models[0].losses == models[1].losses


def test_loaders_that_are_created_again_end_the_workers_of_earlier_ones(net: Callable[..., Net]) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return make_loader(8)

    children: list[int] = []
    count = LambdaCallback(
        on_train_epoch_end=lambda *_: children.append(len(multiprocessing.active_children()))
    )
    again = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    trained(DataPreload(num_workers=1), Data(), net(), count, **again)
    assert len(children) == 3
    assert max(children) <= 2, "one worker, and one that may be ending"


def test_looking_at_a_batch_and_validating_on_the_same_loader_change_nothing(net: Callable[..., Net]) -> None:
    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.loader = DataLoader(Samples(wait_s=0.001), batch_size=4)
            self.train_dataloader = self.val_dataloader = lambda: self.loader

    def peek(trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            next(iter(trainer.train_dataloader))

    kept, checks = DataPreload(num_workers=2, persistent_workers=True), {"val_check_interval": 4}
    results = []
    for preload in (None, DataPreload(num_workers=0), kept):
        look = LambdaCallback(on_train_batch_end=peek)
        results.append(trained(preload, Data(), net(dropout=0.0), look, max_epochs=2, **checks).losses)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 20


def test_a_loader_with_a_timeout_may_get_no_workers(net: Callable[..., Net]) -> None:
    loader = DataLoader(Samples(), batch_size=4, num_workers=1, timeout=30)
    assert len(trained(DataPreload(num_workers=0), loader, net(), max_epochs=1).losses) == 10
    assert loader.timeout == 30


def main(folder: str) -> list[list[float]]:
    """Train on this rank, without and with DataPreload."""
    losses = []
    for preload in (None, DataPreload(), DataPreload(num_workers=2)):
        torch.manual_seed(1)
        loader = DataLoader(Samples(wait_s=0.001), batch_size=4, shuffle=True)
        two = {"strategy": "ddp", "devices": 2, "max_epochs": 2}
        losses.append(trained(preload, loader, Net(dropout=0.0), **two).losses)
    return losses


@pytest.mark.slow
def test_two_ranks_choose_alike_and_train_on_the_same_samples(tmp_path: Path) -> None:
    for plain, measured, two in results_of_two_ranks(__name__, tmp_path):
        assert plain == measured == two


class Source:
    """Yields tensors."""

    def __init__(self, length: int, fails_at: int = -1) -> None:
        self.length = length
        self.fails_at = fails_at

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            if index == self.fails_at:
                raise OSError(f"no sample {index}")
            yield torch.tensor([index])


def prefetched(source: Any, num_ahead: int = 2, **settings: Any) -> PrefetchLoader:
    kind = StatefulPrefetchLoader if is_stateful(source) else PrefetchLoader
    return kind(source, num_ahead=num_ahead, **settings)


@pytest.mark.parametrize(("num_ahead", "length"), [(0, 2), (1, 0), (3, 1), (3, 9)])
def test_every_batch_comes_once_and_in_order_in_every_pass(num_ahead: int, length: int) -> None:
    loader = prefetched(Source(length), num_ahead)
    for _ in range(3):
        assert [int(batch) for batch in loader] == list(range(length))
    assert len(loader) == length


def test_an_error_of_the_loader_is_raised() -> None:
    with pytest.raises(OSError, match="no sample 5"):
        list(prefetched(Source(9, fails_at=5), 3))


def test_the_state_of_a_stateful_loader_is_that_after_the_last_batch_handed_out() -> None:
    def make() -> StatefulDataLoader:
        return StatefulDataLoader(TensorDataset(torch.arange(12)), batch_size=1)

    loader = prefetched(make(), 3)
    assert isinstance(loader, StatefulPrefetchLoader)
    assert isinstance(loader, _Stateful)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    loader.close()
    for other in (prefetched(make(), 3), make()):
        other.load_state_dict(state)
        assert [int(batch[0]) for batch in other] == list(range(5, 12))


def test_attributes_are_read_from_the_loader_and_set_on_it() -> None:
    plain = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    loader = copy.copy(prefetched(plain))
    loader.worker_init_fn = len
    assert (loader.batch_sampler, plain.worker_init_fn) == (plain.batch_sampler, len)
    assert not isinstance(loader, _Stateful)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = loader.nonsense


class OnDevice(torch.Tensor):
    """A tensor that tells a stream when the stream uses it."""

    def record_stream(self, stream: Any) -> None:
        stream.uses(int(self))


def on_fake_device(monkeypatch: pytest.MonkeyPatch, move: Any) -> Mock:
    """Record the calls of the streams `main` and `side` of a simulated GPU."""
    streams = Mock()
    streams.side.record_event.side_effect = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.side)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.main)
    monkeypatch.setattr(data_preload, "move_data_to_device", move)
    return streams


def test_batches_are_copied_on_a_side_stream_and_the_main_stream_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = on_fake_device(monkeypatch, lambda batch, device: batch.as_subclass(OnDevice))
    loader = prefetched(Source(2), 1, device=torch.device("cuda", 0))
    assert [int(batch) for batch in loader] == [0, 1]
    assert streams.mock_calls == [
        call.side.record_event(), call.side.record_event(),
        call.main.wait_event(1), call.main.uses(0), call.main.wait_event(2), call.main.uses(1),
    ]  # fmt: skip


def choose(dataset: Any, batch_size: int, max_workers: int, budget_s: float) -> Any:
    loader = DataLoader(dataset, batch_size=batch_size)
    return choose_num_workers(loader, max_workers=max_workers, budget_s=budget_s, num_batches=float("inf"))


@pytest.mark.parametrize(
    ("limits", "num_batches"),
    [
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "limit_train_batches": 4}, 12),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 15),
        ({"max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 2}, 6),
    ],
)
def test_trials_take_their_time_from_the_batches_of_the_whole_run(
    limits: dict[str, Any], num_batches: int, net: Callable[..., Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Mock(return_value=data_preload.WorkerChoice(0, {}))
    monkeypatch.setattr(data_preload, "choose_num_workers", choice)
    trained(DataPreload(), DataLoader(Samples(), batch_size=4), net(), **limits)
    assert choice.call_args.kwargs["num_batches"] == num_batches


class Counted(Dataset[int]):
    length = 4_000

    def __len__(self) -> int:
        return self.length


class Noting(Counted):
    """Records which samples were requested in this process and in others, and draws random numbers."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.is_read = multiprocessing.Array("b", 100)

    def __getitem__(self, index: int) -> int:
        self.requests.append(index)
        self.is_read[index] = True
        _ = torch.rand(1), np.random.rand(), random.random()
        return index


def test_a_trial_reads_samples_by_index_and_changes_neither_dataset_nor_sampler_nor_random_states() -> None:
    dataset = Noting()
    sampler = RandomSampler(dataset)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    sampler.__iter__ = lambda: pytest.fail("the sampler was asked")  # pyright: ignore[reportAttributeAccessIssue]
    choice = choose_num_workers(loader, max_workers=0, budget_s=60.0, num_batches=float("inf"))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert choice.num_workers == 0
    assert not dataset.requests, "trials run in other processes"
    assert sum(dataset.is_read[:]) == 5 * 2 * NUM_BATCHES


@pytest.mark.parametrize(
    ("most", "several", "chosen"),
    [
        (1, {}, 0),
        (16, {}, 4),
        (2, {1: 6.0, 2: 5.0}, 0),
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
    assert tried == [0, *(count for count in (0, 1, 2, 4, 8) if count <= most)]


class Sleeps(Counted):
    """Takes 2 ms per sample, and counts the samples of all processes."""

    def __init__(self) -> None:
        self.num_made = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        with self.num_made.get_lock():
            self.num_made.value += 1
        return index


def test_the_budget_limits_the_samples_of_trials() -> None:
    samples = Sleeps()
    choice = choose(samples, 1000, 2, budget_s=0.3)
    assert samples.num_made.value < 1000, "fewer than in one batch"
    assert choice.seconds_per_batch[0] >= 1000 * 0.002
    assert set(choice.seconds_per_batch) == {0, 1, 2}


def test_no_workers_are_tried_if_loading_takes_no_time() -> None:
    loader = DataLoader(range(2_000), batch_size=32)
    choice = choose_num_workers(loader, max_workers=8, budget_s=4.0, num_batches=len(loader))
    assert (choice.num_workers, set(choice.seconds_per_batch)) == (0, {0})


class SharedHandle(Counted):
    """Reads a file that was opened before the workers started, so they share the position in the file."""

    def __init__(self, file: Any, *, draws: bool) -> None:
        self.file, self.draws = file, draws

    def __getitem__(self, index: int) -> Any:
        self.file.seek(8 * index)
        time.sleep(0.002)
        return self.file.read(8), torch.rand(1).item() if self.draws else 0.0


def test_workers_whose_samples_differ_are_not_used_unless_samples_are_random(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(Counted.length).tobytes())
    with path.open("rb", buffering=0) as file:
        choice = choose(SharedHandle(file, draws=False), 4, 2, budget_s=0.4)
        assert (choice.num_workers, set(choice.seconds_per_batch)) == (0, {0, 1})
        assert choice.reason
        choice = choose(SharedHandle(file, draws=True), 4, 2, budget_s=0.4)
        assert (choice.reason, set(choice.seconds_per_batch)) == ("", {0, 1, 2})


class Hangs(Counted):
    """Waits for a thread that a forked process does not have."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def __getitem__(self, index: int) -> int:
        return self.pool.submit(int, index).result()


@pytest.mark.slow  # PyTorch checks its workers every five seconds
def test_a_hung_worker_ends_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preload, "WORKER_TIMEOUT_S", 0.5)
    choice = choose(Hangs(), 4, 2, budget_s=0.2)
    assert choice.num_workers is None
    assert "a trial failed (RuntimeError" in choice.reason


def test_no_workers_are_tried_if_they_would_run_the_script_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preload.multiprocessing, "get_start_method", lambda allow_none: "spawn")
    choice = choose(Sleeps(), 8, 2, budget_s=0.3)
    assert (choice.num_workers, choice.seconds_per_batch) == (None, {})
    assert "spawn" in choice.reason


def test_a_dataset_without_indices_or_samples_keeps_the_loaders_own_workers() -> None:
    for dataset in ({"a": 1}, []):
        loader = DataLoader(dataset, sampler=list(dataset))  # pyright: ignore[reportArgumentType]
        choice = choose_num_workers(loader, max_workers=0, budget_s=0.1, num_batches=1)
        assert choice.num_workers is None
        assert choice.reason
