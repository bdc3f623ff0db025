"""The position of a rank in its data, and the state that all loaders of the rank share.

`callbacks/exact_resume` creates one `ResumableRun` per fit, and the loaders in loaders.py use this object. A
checkpoint contains one `RankPosition` per rank.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_eff.core import random_states
from lightning_eff.core.errors import CheckpointError, ConfigError, Remedy
from lightning_eff.core.random_states import KINDS, RandomStates, differing

MAX_PARTS = 100
"""Maximum number of a list's elements that are searched for generators."""


@dataclass
class Position:
    """The position of one loader in its pass.

    Args:
        num_batches: Number of batches trained on in this pass.
        start: Random states when the pass began.
        first: Random states when the first indices were requested; None if these states equal the states just
            after the pass began.
        order: Kind of order, one of `sequential`, `random`, `distributed` and `distributed in order`, or the
            name of the sampler's class.
        seed: Seed of a distributed sampler.
        epoch: Epoch of the sampler, or of the run if the sampler has no epoch.
        num_samples: Length of the dataset; -1 if the dataset has no length.
        batch_size: Number of samples in a batch; -1 if the loader has no batch size.
        length: Number of batches in a pass; -1 if unknown.
        num_workers: Number of the loader's workers.
        hashes: Hashes of the indices of the first trained batches.
    """

    num_batches: int
    start: RandomStates
    first: RandomStates | None
    order: str
    seed: int
    epoch: int
    num_samples: int
    batch_size: int
    length: int
    num_workers: int
    hashes: list[int]


@dataclass
class RankPosition:
    """The positions of a rank's loaders, and its random states.

    Args:
        now: Random states when the position was saved.
        num_ahead: Number of batches that Lightning had fetched after the last trained batch; 1 for a loader
            without a length, else 0.
        is_over: Whether the epoch had ended. If so, the loaders begin a new pass.
        loaders: Positions of the loaders, in Lightning's order.
        notes: Reasons why a run that resumes at this position is not exact.
    """

    now: RandomStates
    num_ahead: int
    is_over: bool
    loaders: list[Position]
    notes: list[str]


def num_ranks() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def of_all_ranks(own: RankPosition) -> list[dict[str, Any]]:
    """Gather the positions of all ranks in plain types, for a checkpoint; all ranks must call this function.

    Random states that equal `own.now` are omitted, so a loader's position takes about 20 kB.
    """
    content = asdict(own)
    for loader in content["loaders"]:
        # Keep only the states that differ from `own.now`; `_from_plain` adds the other states.
        loader["start"] = differing(loader["start"], own.now)
        loader["first"] = loader["first"] and differing(loader["first"], own.now)
    if num_ranks() == 1:
        return [content]
    # Why not `all_gather_object`: it unpickles data from other ranks.
    written = io.BytesIO()
    torch.save(content, written)
    # NCCL sends only tensors on a GPU.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rows = gather_all_tensors(torch.frombuffer(written.getbuffer(), dtype=torch.uint8).to(device))
    files = (io.BytesIO(row.cpu().numpy().tobytes()) for row in rows)
    return [torch.load(file, weights_only=True) for file in files]


def from_checkpoint(contents: list[Any]) -> list[RankPosition]:
    """Return the positions that `of_all_ranks` wrote.

    Raises:
        CheckpointError: The contents are not saved positions.
    """
    try:
        return [_from_plain(**content) for content in contents]
    except (KeyError, TypeError) as error:
        off = Remedy("~callbacks.exact_resume", "remove ExactResume")
        raise CheckpointError(f"the checkpoint's position in the data is damaged\n  try: {off}") from error


def _from_plain(now: RandomStates, loaders: list[dict[str, Any]], **others: Any) -> RankPosition:
    positions: list[Position] = []
    for loader in loaders:
        values: dict[str, Any] = loader | {"start": now | loader["start"]}
        values["first"] = None if loader["first"] is None else now | loader["first"]
        positions.append(Position(**values))
    return RankPosition(now=now, loaders=positions, **others)


class ResumableRun:
    """The loaders of one rank, and the state that they share.

    Args:
        device: The device whose generator is saved, in addition to the CPU's generator.
        replays: Whether workers load the already trained batches again, instead of skipping these batches.
        refuses_changes: Whether a dataset length or batch size that differs from the checkpoint is an error.
        rank: Rank of this process.
        num_ranks: Number of ranks of this run.
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
        self.loaders: list[Any] = []
        """The `ExactLoader`s of this rank."""
        self.num_ahead: Callable[[], int] = int  # int() is 0
        """Function that returns the number of batches that were handed out but not trained on yet."""
        self.epoch: Callable[[], int] = int
        """Function that returns the number of the epoch, for samplers without an attribute `epoch`."""
        self.pending: RankPosition | None = None
        """The position at which to resume; None after its random states have been restored."""
        self.num_saved_ranks = 1
        self.is_begun = False
        """Whether a pass has begun at the pending position."""
        self.is_before_epoch = False
        """Whether the loaders must wait for the epoch's start hooks before they begin the epoch's pass."""
        self.num_remaining: list[int] = []
        """If the number of ranks has changed, the number of remaining batches of the epoch, per loader."""
        self.did: list[str] = []
        self.inexact: list[str] = []
        """Differences from the saved run."""
        self.is_order_checked = True
        """Whether hashes of indices have verified the order of every loader."""
        self.report: Callable[[], None] | None = None
        """Function to call after the first batch of a resumed run, when all differences are known."""
        self.refusal = ""
        """Reason to stop the run. `before_batch` raises the error, since Lightning hides errors in `iter`."""
        self.isolated: RandomStates | None = None
        """Random states before the validation that is running; training continues with these states."""
        self.undo = ExitStack()
        """Restores the loaders' original samplers."""
        self._num_requests = 0

    def unwrap(self) -> None:
        """Restore the original samplers of all loaders."""
        self.undo.close()
        self.loaders.clear()

    def capture(self) -> RandomStates:
        """Return the random states of this process, and of the loaders' own generators."""
        return random_states.capture(self.device, self._generators())

    def restore(self, states: RandomStates) -> None:
        """Set the random states that `capture` returned."""
        random_states.restore(states, self.device, self._generators())

    def position(
        self, *, is_over: bool = False, is_in_step: bool = False, notes: Sequence[str] = ()
    ) -> RankPosition:
        """Return the position of this rank.

        Args:
            is_over: Whether the epoch has ended.
            is_in_step: Whether the last batch is still in training; a resumed run then repeats this batch.
            notes: Reasons why a run that resumes at this position is not exact.
        """
        if self.pending is not None:  # no batch was trained on since the resume
            changed = [] if self.num_saved_ranks == self.num_ranks else ["saved before other ranks continued"]
            # The position is still the position in the checkpoint.
            return replace(self.pending, notes=[*self.pending.notes, *changed])
        num_ahead = self.num_ahead()
        loaders = [loader.position(num_ahead + is_in_step) for loader in self.loaders]
        now = self.capture() if self.isolated is None else self.isolated
        notes = list(notes)
        if not is_over and any(loader.is_shared for loader in self.loaders):
            notes.append("saved in an epoch begun on another number of ranks: its other batches are unknown")
        return RankPosition(now, num_ahead, is_over, loaders, notes)

    def resume(self, positions: list[RankPosition]) -> None:
        """Let the next passes begin at the saved positions; a checkpoint has one position per saved rank.

        If the number of ranks has changed, the ranks of this run divide the remaining samples of the epoch.
        The random numbers then differ from the numbers of an uninterrupted run.
        """
        self.num_saved_ranks = len(positions)
        # A rank without a saved position uses the last rank's, because all ranks divide the same samples.
        self.pending = positions[min(self.rank, len(positions) - 1)]
        self.is_begun, self.refusal = False, ""
        self.did, self.num_remaining, self.is_order_checked = [], [], True
        self.inexact = list(self.pending.notes)
        if self.num_ranks == len(positions):
            return
        self.inexact.append(f"saved on {len(positions)} ranks, now {self.num_ranks}: other random numbers")
        if self.rank >= len(positions):
            # Two ranks with equal random states would draw the same numbers.
            self.pending.now = self.capture()

    def begin(self, loader: object) -> Position | None:
        """Register the start of a loader's pass; return the saved position at which it continues, or None."""
        if self.pending is None:
            return None
        self.is_begun, index = True, self.loaders.index(loader)
        if not index:
            self._num_requests = 0
        if self.pending.is_over or index >= len(self.pending.loaders):
            if not index:
                # The next epoch begins with the random states that were saved.
                self.restore(self.pending.now)
            return None
        return self.pending.loaders[index]

    @property
    def num_pending_ahead(self) -> int:
        """Number of batches that had been fetched but not trained on at the pending position."""
        return 0 if self.pending is None else self.pending.num_ahead

    def before_batch(self, loader: object) -> None:
        """Restore the saved random states before the first batch that the saved run had not yet fetched.

        Raises:
            ConfigError: The dataset or the batch size has changed since a save in the middle of an epoch.
        """
        if self.refusal:
            raise ConfigError(key="state_dict", value="in mid-epoch", allowed=self.refusal)
        # Lightning requests one batch from each loader in turn, so requests to the first loader count steps.
        if self.pending is None or not self.is_begun or loader is not self.loaders[0]:
            return
        self._num_requests += 1
        if self.pending.is_over:
            self.pending = None
        # Batches that Lightning had fetched ahead drew their random numbers before the save.
        elif self._num_requests > self.num_pending_ahead:
            self.restore(self.pending.now)
            self.pending = None

    def _generators(self) -> dict[str, torch.Generator | np.random.Generator]:
        """Return the users' generators in loaders, samplers and datasets, without duplicates."""
        found: dict[int, Any] = {}
        for loader in self.loaders:
            values = [getattr(loader.loader, "generator", None)]
            for name in ("batch_sampler", "sampler"):
                values += _held(getattr(loader.loader, name, None))
            found |= {id(value): value for value in values if isinstance(value, KINDS)}
        named = {f"generator.{index}": value for index, value in enumerate(found.values())}
        datasets = [getattr(loader.loader, "dataset", None) for loader in self.loaders]
        own = {id(value): value for each in datasets for value in _held(each) if isinstance(value, KINDS)}
        # A generator that a loader shares with its dataset gets one name, so that it is restored only once.
        return named | {f"dataset.{i}": own[key] for i, key in enumerate(own) if key not in found}


def _held(owner: Any) -> list[Any]:
    """Return the attribute values of an object and, recursively, of its samplers, datasets and transforms."""
    values: list[Any] = []
    owners, seen = [owner], set[int]()
    while owners:
        owner = owners.pop()
        if id(owner) not in seen:
            seen.add(id(owner))
            parts: Any = owner[:MAX_PARTS] if isinstance(owner, (list, tuple)) else None
            held: dict[str, Any] = getattr(owner, "__dict__", {}) if parts is None else {}
            values += [*held.values(), *(parts or ())]
            inner = (Sampler, Dataset, list, tuple)
            owners += [value for n, value in held.items() if isinstance(value, inner) or "transform" in n]
            owners += parts or ()
    return values
