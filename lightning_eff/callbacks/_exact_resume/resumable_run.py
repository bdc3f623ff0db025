"""Where a rank is in its data, and what its loaders share: random states, and a position to resume.

It calls nothing of the loaders (loaders.py) but `position`: they ask it.
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


@dataclass
class Position:
    """The position of one loader in its pass.

    Args:
        num_batches: Trained on in this pass.
        start: Random states when the pass began.
        first: Random states when its sampler was asked for the first indices; None for those after the start.
        order: What decides the order: `sequential`, `random`, `distributed`, `distributed in order`, or the
            sampler's class.
        seed: Of a distributed sampler.
        epoch: Of a sampler that has one.
        num_samples: Length of the dataset; -1 where it has none.
        batch_size: Samples in a batch; -1 where the loader has none.
        length: Batches in a pass; -1 where it is not known.
        num_workers: Of the loader.
        hashes: Of the indices of the first batches that were trained on.
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
        now: Random states at the save.
        num_ahead: Batches that Lightning had fetched beyond the last one trained on: one, where it does not
            know the loader's length.
        is_over: Whether the epoch had ended: the loaders begin a new pass.
        loaders: In Lightning's order.
        notes: What of the save a resumed run cannot repeat.
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
    """Return the position of each rank, which all ask for it, in the plain types of a checkpoint.

    They are about 16 kB for one loader, since random states that equal those at the save are left out.
    """
    content = asdict(own)
    for loader in content["loaders"]:
        loader["start"] = differing(loader["start"], own.now)
        loader["first"] = loader["first"] and differing(loader["first"], own.now)
    if num_ranks() == 1:
        return [content]
    # Why not `all_gather_object`: it unpickles what another rank sent.
    written = io.BytesIO()
    torch.save(content, written)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rows = gather_all_tensors(torch.frombuffer(written.getbuffer(), dtype=torch.uint8).to(device))
    files = (io.BytesIO(row.cpu().numpy().tobytes()) for row in rows)
    return [torch.load(file, weights_only=True) for file in files]


def from_checkpoint(contents: list[Any]) -> list[RankPosition]:
    """Return the positions that `of_all_ranks` wrote.

    Raises:
        CheckpointError: They are something else.
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
        self.loaders: list[Any] = []
        """Each an `ExactLoader`."""
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
        self.undo = ExitStack()
        """Gives loaders their own samplers back."""
        self._num_requests = 0

    def unwrap(self) -> None:
        """Give all loaders their own samplers back."""
        self.undo.close()
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
        notes = list(notes)
        if not is_over and any(loader.is_shared for loader in self.loaders):
            notes.append("saved in an epoch that another number of ranks had begun: its rest is not known")
        return RankPosition(now, num_ahead, is_over, loaders, notes)

    def resume(self, positions: list[RankPosition]) -> None:
        """Begin the next passes at the positions that a checkpoint has of each rank.

        Another number of ranks shares the rest of the epoch among them; random states are then other ones.
        """
        self.num_saved_ranks = len(positions)
        self.pending = positions[min(self.rank, len(positions) - 1)]
        self.is_begun, self.refusal = False, ""
        self.did, self.num_remaining, self.is_order_checked = [], [], True
        self.inexact = list(self.pending.notes)
        if self.num_ranks == len(positions):
            return
        self.inexact.append(f"saved on {len(positions)} ranks, now {self.num_ranks}: other random numbers")
        if self.rank >= len(positions):
            self.pending.now = self.capture()

    def begin(self, loader: object) -> Position | None:
        """Note that a pass of a loader begins; return the position where it does in a resumed run."""
        if self.pending is None:
            return None
        self.is_begun, index = True, self.loaders.index(loader)
        if not index:
            self._num_requests = 0
        if self.pending.is_over or index >= len(self.pending.loaders):
            if not index:
                self.restore(self.pending.now)
            return None
        return self.pending.loaders[index]

    @property
    def num_pending_ahead(self) -> int:
        """Return how many batches had been fetched, and not trained on, at the pending position."""
        return 0 if self.pending is None else self.pending.num_ahead

    def before_batch(self, loader: object) -> None:
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

    def _generators(self) -> dict[str, torch.Generator | np.random.Generator]:
        """Return the generators that users gave their loaders, samplers and datasets, each once."""
        found: dict[int, Any] = {}
        for loader in self.loaders:
            values = [getattr(loader.loader, "generator", None)]
            for name in ("batch_sampler", "sampler"):
                values += _held(getattr(loader.loader, name, None))
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
