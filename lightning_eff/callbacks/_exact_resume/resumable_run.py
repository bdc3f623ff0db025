"""What the loaders of one rank share: its random states, and a position to resume."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from lightning_eff.callbacks._exact_resume.exact_loader import (
    ExactLoader,
    StatefulExactLoader,
    has_epoch,
    order_of,
    sampler_of,
)
from lightning_eff.callbacks._exact_resume.index_stream import IndexStream
from lightning_eff.callbacks._exact_resume.position import Position, RankPosition
from lightning_eff.core import random_states
from lightning_eff.core.dataloaders import is_stateful
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.random_states import KINDS, RandomStates


class ResumableRun:
    """The loaders of one rank.

    Args:
        device: Whose generator is kept, next to the CPU's.
        replays: Whether batches of workers are loaded again and dropped, rather than skipped.
        refuses_changes: Whether other data or another batch size than the checkpoint's is an error.
        rank: Of this process.
        num_ranks: Of this run.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        replays: bool = True,
        refuses_changes: bool = True,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.device, self.replays, self.refuses_changes = device, replays, refuses_changes
        self.rank, self.num_ranks = rank, num_ranks
        self.loaders: list[ExactLoader] = []
        self.num_ahead: Callable[[], int] = int  # none
        """Returns how many batches were handed out that are not trained on yet."""
        self.epoch: Callable[[], int] = int
        """Returns the number of the epoch, for a sampler that does not show its own."""
        self.pending: RankPosition | None = None
        """The position to resume, until its first batch is asked for."""
        self.num_saved_ranks = 1
        self.is_begun = False
        """Whether a pass has begun at the pending position."""
        self.is_before_epoch = False
        """Whether the pass of the epoch after the saved one is not to begin yet."""
        self.num_remaining: list[int] = []
        """Batches that other ranks than the checkpoint's have left of the epoch, a number for each loader."""
        self.did: list[str] = []
        self.inexact: list[str] = []
        """What will differ from the run that was saved."""
        self.is_order_checked = True
        """Whether hashes of indices have proved the order of every loader."""
        self.report: Callable[[], None] | None = None
        """Called when the first batch of a resumed run has been fetched: all is known then."""
        self.refusal = ""
        """How the data has changed: raised after `iter(loader)`, whose errors Lightning hides."""
        self.isolated: RandomStates | None = None
        """States to which training returns after the validation that runs now."""
        self._num_requests = 0
        self._undo = ExitStack()

    def observe(self, loader: Any) -> Any:
        """Let the passes of a loader with indices begin at a later one; return the loader."""
        has_indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if has_indices and not is_stateful(loader):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            sampler = getattr(loader, name)
            sampler = sampler.source if isinstance(sampler, IndexStream) else sampler
            # DataLoader.__setattr__ forbids it once it is made
            object.__setattr__(loader, name, IndexStream(sampler, self.capture, self.restore, self.inexact))
            self._undo.callback(object.__setattr__, loader, name, sampler)
        return loader

    def wrap(self, loader: Any) -> ExactLoader:
        """Return the loader as one of this run's."""
        self.loaders.append((StatefulExactLoader if is_stateful(loader) else ExactLoader)(loader, self))
        return self.loaders[-1]

    def unwrap(self) -> None:
        """Give all loaders their own samplers back."""
        self._undo.close()
        self.loaders.clear()

    def capture(self) -> RandomStates:
        """Return the random states of this process, and of the loaders' own generators."""
        return random_states.capture(self.device, self._generators())

    def restore(self, states: RandomStates) -> None:
        """Set them."""
        random_states.restore(states, self.device, self._generators())

    def position(
        self, *, is_over: bool = False, is_in_step: bool = False, notes: Sequence[str] = ()
    ) -> RankPosition:
        """Return where this rank is.

        Args:
            is_over: Whether the epoch has ended.
            is_in_step: Whether the last batch is still trained on: a resumed run begins with it.
            notes: What of the save a resumed run cannot repeat.
        """
        if self.pending is not None:  # nothing was trained on since
            changed = [] if self.num_saved_ranks == self.num_ranks else ["saved before other ranks went on"]
            return replace(self.pending, notes=[*self.pending.notes, *changed])
        num_ahead = self.num_ahead()
        loaders = [loader.position(num_ahead + is_in_step) for loader in self.loaders]
        now = self.capture() if self.isolated is None else self.isolated
        if not is_over and any(loader.is_shared for loader in self.loaders):
            notes = [
                *notes,
                "saved in an epoch that another number of ranks had begun: its rest is not known",
            ]
        return RankPosition(now, num_ahead, is_over, loaders, list(notes))

    def resume(self, positions: list[RankPosition]) -> None:
        """Begin the next passes at the positions that a checkpoint has of each rank.

        Another number of ranks shares the rest of the epoch among them; random states are then other ones.
        """
        self.num_saved_ranks = len(positions)
        self.pending = positions[min(self.rank, len(positions) - 1)]
        self.is_begun, self.refusal = False, ""
        self.did, self.num_remaining, self.is_order_checked = [], [], True
        self.inexact[:] = self.pending.notes  # the loaders' streams share the list
        if self.num_ranks == len(positions):
            return
        self.inexact.append(f"saved on {len(positions)} ranks, now {self.num_ranks}: other random numbers")
        if self.rank >= len(positions):
            self.pending.now = self.capture()

    @property
    def num_pending_ahead(self) -> int:
        """Return how many batches had been fetched, and not trained on, at the pending position."""
        return 0 if self.pending is None else self.pending.num_ahead

    def begin(self, loader: ExactLoader) -> Position | None:
        """Set the random states that a pass of a resumed run begins with; return where it begins."""
        if self.pending is None:
            return None
        self.is_begun = True
        if getattr(loader.loader, "persistent_workers", False):
            self.inexact.append("persistent workers do not keep their random states")
        if loader is self.loaders[0]:
            self._num_requests = 0
        index = self.loaders.index(loader)
        if self.pending.is_over or index >= len(self.pending.loaders):
            if loader is self.loaders[0]:
                self.restore(self.pending.now)
            return None
        position = self.pending.loaders[index]
        self._compare(
            position, loader.position(0), num_loaders=(len(self.pending.loaders), len(self.loaders))
        )
        if (sampler := has_epoch(loader.loader)) is not None:
            sampler.set_epoch(position.epoch)
        if not self.replays and getattr(loader.loader, "num_workers", 0) > 0:
            self.inexact.append("augmentation in workers differs until the epoch's end (workers=fast)")
        self.restore(position.start)
        return position

    def before_batch(self, loader: ExactLoader) -> None:
        """Set the random states of the save, before the first batch that had not been fetched then.

        Raises:
            ConfigError: The dataset or the batch size has changed in the middle of an epoch.
        """
        if self.refusal:
            raise ConfigError(key="state_dict", value="in mid-epoch", allowed=self.refusal)
        if self.pending is None or not self.is_begun or loader is not self.loaders[0]:
            return
        self._num_requests += 1
        if self.pending.is_over:
            self.pending = None
        elif self._num_requests > self.num_pending_ahead:
            self.restore(self.pending.now)
            self.pending = None

    def check_order(self, loader: ExactLoader, saved: Position) -> None:
        """Compare the indices of a pass with the saved ones."""
        if loader.stream is None or not saved.hashes:
            self.is_order_checked = False
        elif loader.stream.hashes[: len(saved.hashes)] != saved.hashes:
            self.inexact.append("the sampler does not repeat the indices of the saved epoch")

    def repeat_saved_epoch(self) -> None:
        """Draw the first indices of the epoch that a checkpoint ended with, and compare them."""
        saved = [] if self.pending is None or self.num_saved_ranks != self.num_ranks else self.pending.loaders
        for loader, position in zip(self.loaders, saved, strict=False):
            if loader.stream is not None and position.hashes:
                if (sampler := has_epoch(loader.loader)) is not None:
                    sampler.set_epoch(position.epoch)
                self.restore(position.start)
                indices = iter(loader.stream.source)  # some samplers draw now, others with the first index
                self._begin_order(loader, position)
                deque(itertools.islice(loader.stream.hashed(indices), len(position.hashes)), maxlen=0)
            self.check_order(loader, position)

    def _begin_order(self, loader: ExactLoader, saved: Position) -> None:
        """Set the random states with which a pass was asked for its first indices."""
        self.restore(saved.first or saved.start)
        if saved.first is None:  # the seed of workers is drawn first
            generator = getattr(loader.loader, "generator", None)
            torch.empty((), dtype=torch.int64).random_(generator=generator)

    def first_batch(self, loader: ExactLoader, saved: Position | None) -> None:
        """Compare the order of a loader; report when each loader has been asked for a batch."""
        if saved is not None:
            self.check_order(loader, saved)
        if self.report is not None and loader is self.loaders[-1]:
            self.report()
            self.report = None

    def remaining(self, loader: ExactLoader, saved: Position) -> list[list[int]] | None:
        """Return this rank's batches of what other ranks left of the epoch; None for the ranks that saved."""
        if self.num_saved_ranks == self.num_ranks:
            return None
        runs = (self.num_saved_ranks, saved.order), (self.num_ranks, order_of(sampler_of(loader.loader)))
        if any(ranks > 1 and not order.startswith("distributed") for ranks, order in runs):
            self.inexact.append("ranks do not share one order: samples of this epoch may be seen again")
            return None
        order = self._order(loader, saved)
        if order is None:
            text = f"the order of {saved.order} is not known on other ranks"
            self.inexact.append(f"{text}: samples of this epoch may be seen again")
            return None
        rest = order[saved.num_batches * saved.batch_size * self.num_saved_ranks :]
        rest += rest[: -len(rest) % self.num_ranks]  # as many for each rank, as torch's sampler does it
        own = rest[self.rank :: self.num_ranks]
        batches = [own[i : i + saved.batch_size] for i in range(0, len(own), saved.batch_size)]
        if batches and getattr(loader, "drop_last", False) and len(batches[-1]) < saved.batch_size:
            batches.pop()
        self.num_remaining.append(len(batches))
        return batches

    def _order(self, loader: ExactLoader, saved: Position) -> list[int] | None:
        """Return the order of all samples of the epoch in which a checkpoint was saved."""
        samples: Any = range(saved.num_samples)
        if saved.order in ("sequential", "distributed in order"):
            return list(samples)
        if saved.order == "distributed":
            sampler = DistributedSampler[int](samples, num_replicas=1, rank=0, seed=saved.seed)
            sampler.set_epoch(saved.epoch)
            return list(sampler)
        if saved.order != "random":
            return None
        current = self.capture()
        self._begin_order(loader, saved)
        order = list(RandomSampler(samples, generator=getattr(loader.loader, "generator", None)))
        self.restore(current)
        return order

    def _compare(self, saved: Position, current: Position, *, num_loaders: tuple[int, int]) -> None:
        """Find what has changed since the save: refused before the first batch, or not exact."""
        changes = [(*num_loaders, "loaders")]
        changes += [(saved.num_samples, current.num_samples, "samples")]
        changes += [(saved.batch_size, current.batch_size, "samples in a batch")]
        if self.num_saved_ranks == self.num_ranks:
            changes += [(saved.length, current.length, "batches in an epoch")]
            if saved.order != current.order:
                self.inexact.append(f"the sampler was {saved.order} and is {current.order}")
            if saved.num_workers != current.num_workers:
                counts = f"{saved.num_workers} workers are now {current.num_workers}"
                self.inexact.append(f"{counts}: samples draw other random numbers")
        before, now, text = next((change for change in changes if change[0] != change[1]), (0, 0, ""))
        if text and self.refuses_changes:
            epoch = "as in the epoch in which the checkpoint was saved"
            self.refusal = f"{before} {text}, {epoch}, and not {now}"
        elif text:
            self.inexact.append(f"{before} {text} are now {now}")

    def _generators(self) -> dict[str, torch.Generator | np.random.Generator]:
        """Return the generators that users gave their loaders, samplers and datasets, each once."""
        found: dict[int, Any] = {}
        for loader in self.loaders:
            values = [getattr(loader.loader, "generator", None)]
            for sampler in (getattr(loader.loader, "batch_sampler", None), sampler_of(loader.loader)):
                values += _held(sampler)
            found |= {id(value): value for value in values if isinstance(value, KINDS)}
        named = {f"generator.{index}": value for index, value in enumerate(found.values())}
        datasets = [getattr(loader.loader, "dataset", None) for loader in self.loaders]
        own = {id(value): value for each in datasets for value in _held(each) if isinstance(value, KINDS)}
        return named | {f"dataset.{i}": own[key] for i, key in enumerate(own) if key not in found}


def _held(owner: Any) -> list[Any]:
    """Return the attributes of an object, and of the samplers and datasets among them."""
    values: list[Any] = []
    owners, seen = [owner], set[int]()
    while owners:
        owner = owners.pop()
        if id(owner) not in seen:
            seen.add(id(owner))
            held = list(getattr(owner, "__dict__", {}).values())
            values += held
            owners += [value for value in held if isinstance(value, (Sampler, Dataset))]
    return values
