"""DataPreload: the same run, sooner; loaders, processes and threads as they were before."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch.multiprocessing.reductions import shared_cache
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_eff.callbacks.data_preload import DataPreload
from tests.support.models import Net, fit, make_loader, seeded
from tests.support.ranks import run_two_ranks

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
def test_shuffled_epochs_with_dropout_are_to_the_bit_those_without_it(
    num_workers: Any, persistent: bool, own_workers: int, net: Callable[..., Net]
) -> None:
    """Also where something draws between the loader's iterator and its first batch."""

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


@pytest.mark.slow
def test_thirty_epochs_grow_nothing(net: Callable[..., Net]) -> None:
    counts: list[tuple[int, ...]] = []

    def count(trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.losses.clear()
        if trainer.current_epoch not in (9, 29):
            return
        shared_cache.free_dead_references()  # torch does so for itself from 128 of them on
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
    """Moves its batches itself, and notes where they were."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.moved = getattr(self, "moved", 0) + 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def test_a_hook_that_moves_batches_is_called_once_for_each_and_nothing_moves_before_it() -> None:
    preload, model, devices = DataPreload(num_workers=0), Own(), list[Any]()
    look = LambdaCallback(on_train_start=lambda trainer, _: devices.append(trainer.train_dataloader.device))
    fit(model, preload, look, max_steps=5)
    assert model.moved == 5
    assert "Own.transfer_batch_to_device" in preload.outcome().did
    assert devices == [None]


def test_every_loader_of_a_combined_one_is_prepared() -> None:
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
    for preload in (None, DataPreload(num_workers=0), DataPreload(num_workers=1)):
        results.append(trained(preload, combined(), seeded(Two, dropout=0.0), max_epochs=2).losses)
        if preload:
            assert len(preload.outcome().numbers["num_workers"]) == 2
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 20


class Numbers(IterableDataset[Any]):
    """A stream that continues from epoch to epoch, and notes how far it was read."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            time.sleep(0.0015)
            yield torch.full((8,), float(self.position)), self.position % 3


def test_a_stream_keeps_its_workers_and_is_read_when_it_is_asked(net: Callable[..., Net]) -> None:
    results = []
    for preload in (None, DataPreload()):
        stream = Numbers()
        model = trained(preload, DataLoader(stream, batch_size=2), net(), limit_train_batches=5)
        results.append((model.losses, stream.position))
    assert results[0] == results[1]
    assert preload is not None
    assert not preload.outcome().effective


def test_loaders_that_are_made_again_are_prepared_again(net: Callable[..., Net]) -> None:
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
    assert max(children) <= 2, "one is there, one may be going"


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


def test_a_loader_with_a_deadline_for_its_workers_may_lose_them(net: Callable[..., Net]) -> None:
    loader = DataLoader(Samples(), batch_size=4, num_workers=1, timeout=30)
    assert len(trained(DataPreload(num_workers=0), loader, net(), max_epochs=1).losses) == 10
    assert loader.timeout == 30


def main(folder: str) -> None:
    """Train in each of two ranks, without and with it."""
    losses = []
    for preload in (None, DataPreload(), DataPreload(num_workers=2)):
        torch.manual_seed(1)
        loader = DataLoader(Samples(wait_s=0.001), batch_size=4, shuffle=True)
        two = {"strategy": "ddp", "devices": 2, "max_epochs": 2}
        losses.append(trained(preload, loader, Net(dropout=0.0), **two).losses)
    torch.save(losses, Path(folder) / f"rank{torch.distributed.get_rank()}.pt")


@pytest.mark.slow
def test_two_ranks_agree_and_see_the_samples_that_they_would_see(tmp_path: Path) -> None:
    done = run_two_ranks(__name__, tmp_path)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}.pt").exists(), done.stderr[-3000:]
        plain, measured, two = torch.load(tmp_path / f"rank{rank}.pt")
        assert plain == measured == two
