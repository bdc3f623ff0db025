"""Have training batches ready: a measured number of workers, and batches on the GPU ahead of use.

Workers make samples in processes of their own. They halve the wait for slow samples and multiply the time of
tiny ones, so their number is measured on the loader's own samples before training; 0 is a possible result.
Batches that workers made are copied to a GPU on a side stream while the previous step computes. The data and
their order stay the same: samplers and random draws of the training are untouched, and a stateful loader's
position is that of the last batch handed out.

Why no thread that fetches ahead: its samples would draw random numbers in between the training's, and
workers do the same for any sample that is slow enough to matter.

Saves: waiting for data: the report shows the fraction of the time before and after.
Costs: host memory for each worker and device memory for the batches that are ready; a few seconds of
    measuring at the start, on some of the dataset's samples (`num_workers=2`, say, measures nothing).
    Samples, and samplers that draw one by one, draw other random numbers where workers fetch ahead; streams
    and stateful loaders keep the workers that they have.
When not: samples are tiny: it measures that, and uses no workers.
Conflicts: none. Hooks that move batches themselves (`transfer_batch_to_device`, `on_before_batch_transfer`)
    are honoured: batches are then not moved ahead.
Source: prefetching as in NVIDIA's Apex and DALI; https://docs.pytorch.org/docs/stable/data.html
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_eff.callbacks._data_preload.prefetch import PrefetchLoader, StatefulPrefetchLoader
from lightning_eff.callbacks._data_preload.worker_trials import WorkerChoice, choose_num_workers
from lightning_eff.core import dataloaders
from lightning_eff.core.arguments import Count, CountOrZero, Positive, check_arguments
from lightning_eff.core.machine import num_cores
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome

TRANSFER_HOOKS = ("transfer_batch_to_device", "on_before_batch_transfer")
"""Hooks that must be called before a batch is on the device."""


class DataPreload(Managed):
    """Have training batches ready.

    Args:
        num_workers: Processes that make samples; `auto` measures, and leaves a loader over a stream as it is.
        prefetch_factor: Batches that each worker keeps ready.
        persistent_workers: Keep the workers from epoch to epoch, also where the loader does not; changes of
            the dataset in between do not reach them.
        pin_memory: Page-locked host memory, from which copies to a GPU overlap with computing; None is true
            on a GPU alone.
        num_batches_ahead: Batches of workers that are on the GPU before they are asked for.
        max_measure_s: Seconds that measuring may take, the start of workers not counted.

    Raises:
        ConfigError: A number is outside its range.

    Example:
        >>> trainer = pl.Trainer(callbacks=[DataPreload(num_workers=2)], logger=False, accelerator="cpu")
        >>> DataPreload(num_workers=-1)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: num_workers=-1: expected 'auto', or a whole number ...
    """

    @check_arguments
    def __init__(
        self,
        *,
        num_workers: Literal["auto"] | CountOrZero = "auto",
        prefetch_factor: Count = 2,
        persistent_workers: bool = False,
        pin_memory: bool | None = None,
        num_batches_ahead: CountOrZero = 1,
        max_measure_s: Positive = 4.0,
    ) -> None:
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self.num_batches_ahead = num_batches_ahead
        self.max_measure_s = max_measure_s
        self._reset()

    def _reset(self) -> None:
        self._prepared: list[tuple[PrefetchLoader, int, WorkerChoice]] = []
        """Each loader with its number of workers, and how that was chosen."""
        self._measured: dict[Any, WorkerChoice] = {}
        self._final: Outcome | None = None
        self._epoch = 0
        self._transfer_hook = ""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        self._reset()
        datamodule: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        owners = [pl_module, *([datamodule] if datamodule is not None else [])]
        hooks = [(o, hook) for o in owners for hook in TRANSFER_HOOKS if is_overridden(hook, o)]
        self._transfer_hook = f"{type(hooks[0][0]).__name__}.{hooks[0][1]}" if hooks else ""
        self.cleanup.callback(self._finish)
        unhook = dataloaders.add_loader_transform(trainer, lambda loader: self._prepare(loader, trainer))
        self.cleanup.callback(unhook)

    def _prepare(self, loader: Any, trainer: pl.Trainer) -> PrefetchLoader:
        """Return the loader that the training iterates in place of `loader`."""
        if trainer.current_epoch != self._epoch:
            for earlier, *_ in self._prepared:  # Lightning replaces them
                earlier.end()
            self._prepared = []
        self._epoch = trainer.current_epoch
        device = trainer.strategy.root_device
        choice = self._choose(loader, trainer)
        num_workers, tuned = choice.num_workers, None
        if num_workers is None:
            num_workers = getattr(loader, "num_workers", 0)
        else:
            tuned = copy.copy(loader)  # over the same dataset and sampler; the user's own stays as it is
            is_pinned = device.type == "cuda" if self.pin_memory is None else self.pin_memory
            is_kept = (self.persistent_workers or loader.persistent_workers) and num_workers > 0
            values = {
                "_iterator": None,
                "num_workers": num_workers,
                "prefetch_factor": self.prefetch_factor if num_workers else None,
                "persistent_workers": is_kept,
                "pin_memory": is_pinned or loader.pin_memory,
                "timeout": loader.timeout if num_workers else 0,
            }
            for name, value in values.items():
                object.__setattr__(tuned, name, value)  # DataLoader.__setattr__ forbids some once it is made
        # What this process makes is not fetched ahead: its random draws would mix with the training's.
        is_ahead = device.type == "cuda" and num_workers > 0 and not self._transfer_hook
        kind = StatefulPrefetchLoader if dataloaders.is_stateful(loader) else PrefetchLoader
        prepared = kind(
            loader,
            tuned,
            num_ahead=self.num_batches_ahead if is_ahead else 0,
            device=device if is_ahead and self.num_batches_ahead else None,
            limit=lambda: trainer.num_training_batches,
        )
        self._prepared.append((prepared, num_workers, choice))
        return prepared

    def _choose(self, loader: Any, trainer: pl.Trainer) -> WorkerChoice:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return WorkerChoice(None, {}, "its dataset has no indices")
        if dataloaders.is_stateful(loader):
            return WorkerChoice(None, {}, "a stateful loader's position depends on its workers")
        if isinstance(self.num_workers, int):
            return WorkerChoice(self.num_workers, {}, "set by num_workers")
        key = (type(loader.dataset), loader.batch_size)  # alike loaders, and those of later epochs, once
        if key not in self._measured:
            most = num_cores(getattr(trainer, "num_devices", 1))
            measured = choose_num_workers(loader, max_workers=most, budget_s=self.max_measure_s)
            # Every rank takes part; rank 0 decides.
            self._measured[key] = trainer.strategy.broadcast(measured)
        return self._measured[key]

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for loader, *_ in self._prepared:
            loader.close()  # the next iteration is the next epoch's

    def _finish(self) -> None:
        """Keep the outcome, and drop the loaders with their data."""
        self._final = self.outcome()
        for loader, *_ in self._prepared:
            loader.end()
        self._prepared = []

    def outcome(self) -> Outcome:
        """Return what was chosen, and its measurements."""
        if self._final is not None:
            return self._final
        if not self._prepared:
            return Outcome(did="no training data yet", effective=False)
        texts: list[str] = []
        for loader, count, choice in self._prepared:
            text = "1 worker" if count == 1 else f"{count} workers"
            if choice.seconds_per_batch:
                tried = [f"{s * 1e3:.2f} ms with {n}" for n, s in choice.seconds_per_batch.items()]
                text += f" (a batch takes {', '.join(tried)})"
                text += f", no more: {choice.reason}" if choice.reason else ""
            else:
                text += f", not measured: {choice.reason}"
            text += "; batches on the GPU ahead of use" if loader.num_ahead else ""
            texts.append(text)
        parts = list(dict.fromkeys(texts))
        if self._transfer_hook:
            parts.append(f"not moved ahead: {self._transfer_hook} moves batches itself")
        nums_workers = [count for _, count, _ in self._prepared]
        seconds = [choice.seconds_per_batch for *_, choice in self._prepared]
        numbers = {"num_workers": nums_workers, "seconds_per_batch": seconds}
        return Outcome(did="; ".join(parts), effective=any(nums_workers), numbers=numbers)
