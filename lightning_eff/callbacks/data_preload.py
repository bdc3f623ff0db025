"""Training batches ready before they are asked for: workers by measurement, and batches on the device ahead.

Workers make samples in processes of their own. They halve the wait for slow samples and multiply the time
of tiny ones, so their number is measured on the loader's own samples before training; 0 is an answer. On a
GPU a thread then copies batches over on a stream of its own while the step before computes. On a CPU it
fetches while the step computes, where there are no workers and samples wait for a disk or a network. How
much is ready is limited in batches and in bytes. What is trained on, and in which order, stays the same:
samplers and random draws of the training are untouched, and a stateful loader's position is that of the
last batch handed out.

Costs: host memory for each worker and device memory for the batches that are ready; a few seconds of
    measuring at the start, on some of the dataset's samples (`num_workers=2`, say, measures nothing).
    Samples, and samplers that draw one by one, draw other random numbers where workers or a thread fetch
    ahead; streams and stateful loaders keep the workers that they have, and are fetched when asked for.
Conflicts: none. Hooks that move batches themselves (`transfer_batch_to_device`, `on_before_batch_transfer`)
    are honoured: batches are then fetched ahead and not moved.
Source: prefetching as in NVIDIA's Apex and DALI; https://docs.pytorch.org/docs/stable/data.html
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_eff.callbacks._data_preload import worker_trials
from lightning_eff.callbacks._data_preload.lookahead import Settings
from lightning_eff.callbacks._data_preload.prefetch import Ahead, is_stateful, wrap
from lightning_eff.core import checkpoint_stamp, dataloaders, rules
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.technique import Outcome
from lightning_eff.core.text import human_bytes

MOVES = ("transfer_batch_to_device", "on_before_batch_transfer")
"""Hooks that must see a batch before it is on the device."""
WORTH_A_THREAD_S = 1e-3
"""Time that a batch waits, for a disk or a network, below which a thread is not worth it."""


class DataPreload(pl.Callback):
    """Have training batches ready.

    Args:
        num_workers: Processes that make samples; `auto` measures, and leaves a loader over a stream as it is.
        prefetch_factor: Batches that each worker keeps ready.
        persistent_workers: Keep the workers from epoch to epoch, also where the loader does not; they do not
            see what is changed in the dataset in between.
        pin_memory: Page-locked host memory, from which copies to a GPU overlap with computing; None is true
            on a GPU alone.
        num_batches_ahead: Batches that are fetched, and on a GPU moved, before they are asked for.
        max_bytes_ahead: Bytes of these batches; one is allowed whatever its size. None for no limit.
        max_measure_s: Seconds that measuring may take, the start of workers not counted.

    Raises:
        ConfigError: A number is outside its range.

    Example:
        >>> trainer = pl.Trainer(callbacks=[DataPreload(num_workers=2)], logger=False, accelerator="cpu")
        >>> DataPreload(num_workers=-1)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: num_workers=-1: expected 'auto' or a whole number of at least 0
    """

    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    def __init__(
        self,
        *,
        num_workers: int | str = "auto",
        prefetch_factor: int = 2,
        persistent_workers: bool = False,
        pin_memory: bool | None = None,
        num_batches_ahead: int = 2,
        max_bytes_ahead: int | None = 268435456,
        max_measure_s: float = 4.0,
    ) -> None:
        if num_workers != "auto" and not (isinstance(num_workers, int) and num_workers >= 0):
            raise ConfigError(
                key="num_workers", value=num_workers, allowed="'auto' or a whole number of at least 0"
            )
        for name, value, least in (
            ("prefetch_factor", prefetch_factor, 1),
            ("num_batches_ahead", num_batches_ahead, 0),
            ("max_bytes_ahead", max_bytes_ahead, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(name, value, allowed=f"a whole number of at least {least}")
        if max_measure_s <= 0.0:
            raise ConfigError(key="max_measure_s", value=max_measure_s, allowed="a number above 0")
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self.num_batches_ahead = num_batches_ahead
        self.max_bytes_ahead = max_bytes_ahead
        self.max_measure_s = max_measure_s
        self._forget()

    def _forget(self) -> None:
        self._loaders: list[Ahead] = []
        self._choices: list[worker_trials.Choice | None] = []
        self._measured: dict[Any, worker_trials.Choice | None] = {}
        self._final: Outcome | None = None
        self._epoch = 0
        self._kept_to_itself = self._untried = ""
        self._unhook: Callable[[], None] | None = None
        self._validation_s = 0.0
        self._validation_began_s = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        rules.enforce(self, trainer, pl_module)
        self._forget()
        self._unhook = dataloaders.add_loader_transform(trainer, lambda loader: self._prepare(loader, trainer, pl_module))

    def _prepare(self, loader: Any, trainer: pl.Trainer, module: pl.LightningModule) -> Ahead:
        if self._loaders and trainer.current_epoch != self._epoch:
            self._drop()  # those of the epoch before, in place of which Lightning asks for new ones
        self._epoch = trainer.current_epoch
        device = trainer.strategy.root_device
        choice = self._choose(loader, trainer)
        num_workers = getattr(loader, "num_workers", 0) if choice is None else choice.num_workers
        tuned = self._tuned(loader, num_workers, device) if choice is not None else None
        self._kept_to_itself = _mover(trainer, module)
        moved = device.type == "cuda" and not self._kept_to_itself
        # Workers fetch ahead themselves, and what they give has only to be moved.
        goes_ahead = moved if num_workers > 0 else _may_have_a_thread(choice, trainer, moved=moved)
        settings = Settings(
            num_batches=self.num_batches_ahead if goes_ahead else 0,
            max_bytes=self.max_bytes_ahead,
            device=device if moved and self.num_batches_ahead else None,
            limit=lambda: trainer.num_training_batches,
        )
        ahead = wrap(loader, settings, tuned)
        ahead.seen.num_workers = num_workers
        self._loaders.append(ahead)
        self._choices.append(choice)
        return ahead

    def _choose(self, loader: Any, trainer: pl.Trainer) -> worker_trials.Choice | None:
        """Return how many workers to use; None to leave the loader as it is. Rank 0 decides for all."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            self._untried = "its samples have no index to try"
            return None
        if is_stateful(loader):
            self._untried = "its position is that of its own workers"
            return None
        if isinstance(self.num_workers, int):
            self._untried = "as asked for"
            return worker_trials.Choice(self.num_workers, {}, 0.0)
        key = (type(loader.dataset), loader.batch_size)
        if key not in self._measured:
            self._measured[key] = self._measure(loader, trainer)
        return self._measured[key]

    def _measure(self, loader: DataLoader[Any], trainer: pl.Trainer) -> worker_trials.Choice | None:
        most = worker_trials.num_cores(getattr(trainer, "num_devices", 1))
        measured: worker_trials.Choice | None = None
        if worker_trials.can_be_tried(loader):
            try:
                measured = worker_trials.choose(loader, max_workers=most, budget_s=self.max_measure_s)
                self._untried = measured.reason
            except worker_trials.SAMPLE_ERRORS as error:
                self._untried = f"a trial failed ({type(error).__name__}: {error})".splitlines()[0]
        else:
            self._untried = "its samples have no index to try"
        own = loader.num_workers if measured is None else measured.num_workers
        decided = int(trainer.strategy.broadcast(own))
        return None if measured is None else replace(measured, num_workers=decided)

    def _tuned(self, loader: DataLoader[Any], num_workers: int, device: torch.device) -> DataLoader[Any]:
        """Return a loader over the same dataset and sampler for the training; the user's stays as it is."""
        tuned = copy.copy(loader)
        on_gpu = device.type == "cuda" if self.pin_memory is None else self.pin_memory
        wanted: dict[str, Any] = {
            "_iterator": None,
            "num_workers": num_workers,
            "prefetch_factor": self.prefetch_factor if num_workers else None,
            "persistent_workers": (self.persistent_workers or loader.persistent_workers) and num_workers > 0,
            "pin_memory": on_gpu or loader.pin_memory,
            "timeout": loader.timeout if num_workers else 0,
        }
        for name, value in wanted.items():
            object.__setattr__(tuned, name, value)  # a loader forbids some of them, once it is made
        return tuned

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began_s = time.perf_counter()
        for loader in self._loaders:
            loader.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_s += time.perf_counter() - self._validation_began_s
        for loader in self._loaders:
            loader.pause(paused=False)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for loader in self._loaders:
            loader.close()  # what is iterated from now on is the next epoch

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._stop()
        self._restore()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()
        self._restore()

    def _stop(self) -> None:
        for loader in self._loaders:
            loader.end()

    def _drop(self) -> None:
        self._stop()
        self._loaders, self._choices = [], []

    def _restore(self) -> None:
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
            self._final = self.outcome()
            self._drop()  # what is left of the callback holds no data

    def outcome(self) -> Outcome:
        """Say what was chosen, on what figures, and the share of the time that training waits for data."""
        if self._final is not None:
            return self._final
        if not self._loaders:
            return Outcome(did="no training data yet", effective=False)
        said = [self._words(*each) for each in zip(self._loaders, self._choices, strict=True)]
        shares = self._shares()
        parts = [*dict.fromkeys(said), *([_words_on_waiting(*shares)] if shares else [])]
        if self._kept_to_itself:
            parts.append(f"not moved ahead: {self._kept_to_itself} moves batches itself")
        return Outcome(
            did="; ".join(parts),
            effective=any(_works_ahead(loader) for loader in self._loaders),
            numbers={
                "num_workers": [loader.seen.num_workers for loader in self._loaders],
                "seconds_per_batch": [c.seconds_per_batch if c else {} for c in self._choices],
                "max_ready_bytes": max(loader.seen.max_ready_bytes for loader in self._loaders),
                "data_wait_share_before": shares[0] if shares else None,
                "data_wait_share": shares[1] if shares else None,
            },
        )

    def _words(self, loader: Ahead, choice: worker_trials.Choice | None) -> str:
        words = f"{loader.seen.num_workers} workers"
        if choice is not None and choice.seconds_per_batch:
            tried = [f"{s * 1e3:.2f} ms with {count}" for count, s in choice.seconds_per_batch.items()]
            words += f" (a batch takes {', '.join(tried)})"
            words += f", no more: {choice.reason}" if choice.reason else ""
        else:
            words += f", not measured: {self._untried}"
        if loader.seen.draws:
            words += "; fetched when asked for: samples draw random numbers in this process"
        elif loader.seen.num_ahead:
            words += f"; up to {human_bytes(loader.seen.max_ready_bytes)} ready"
        return words

    def _shares(self) -> tuple[float, float] | None:
        """Return the share of waiting for data, as it would be in this process alone and as it was."""
        taken = min((loader.seen.num_taken for loader in self._loaders), default=0)
        if taken < 3 or not all(choice is not None and choice.seconds_per_batch for choice in self._choices):
            return None
        first = min(loader.seen.first_taken_s for loader in self._loaders)
        last = max(loader.seen.last_taken_s for loader in self._loaders)
        waited_s = sum(loader.seen.wait_s for loader in self._loaders)
        total_s = max(1e-9, last - first - self._validation_s)
        alone_s = sum(c.seconds_per_batch[0] for c in self._choices if c is not None) * (taken - 1)
        return alone_s / (alone_s + max(0.0, total_s - waited_s)), min(1.0, waited_s / total_s)


def _works_ahead(loader: Ahead) -> bool:
    return loader.seen.num_workers > 0 or loader.seen.num_ahead > 0


def _may_have_a_thread(choice: worker_trials.Choice | None, trainer: pl.Trainer, *, moved: bool) -> bool:
    """Say whether a thread may fetch samples that this process makes, and is worth it."""
    precision = str(trainer.precision)
    other_default_dtype = precision.endswith("-true") and precision != "32-true"
    if choice is None or other_default_dtype:
        return False  # a stream may depend on the training; a default format holds in all threads
    return moved or choice.idle_s >= WORTH_A_THREAD_S


def _words_on_waiting(before: float, after: float) -> str:
    return f"{after:.1%} of the time waiting for data, by estimate {before:.1%} in this process alone"


def _mover(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    """Return the hook of the user's own that moves batches to the device, if there is one."""
    datamodule: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    for each in (module, datamodule):
        for hook in MOVES:
            if each is not None and is_overridden(hook, each):
                return f"{type(each).__name__}.{hook}"
    return ""
