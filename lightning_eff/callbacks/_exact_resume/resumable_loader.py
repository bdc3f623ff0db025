"""A training loader that begins where an earlier process stopped.

A pass is begun again from the random states of its start, its first batches are left out, and then the states
of the save are set: the sampler draws the same order, workers get the same seeds, and the next step draws what
it would have drawn. Indices are skipped without loading their samples, but where samples may draw random
numbers in workers, or where there are no indices, the batches are loaded and dropped.

torch 2.13: `iter(loader)` asks the sampler for its pass and then draws the seed of the workers; the sampler
draws its order when it is asked for the first indices, which workers are at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_eff.callbacks._exact_resume import random_states
from lightning_eff.callbacks._exact_resume.index_stream import IndexStream
from lightning_eff.callbacks._exact_resume.position import Position, RankPosition
from lightning_eff.callbacks._exact_resume.random_states import RandomStates


class ResumableRun:
    """What the loaders of one rank share: its random states, and a position to resume.

    Args:
        device: Whose generator is kept, next to the CPU's.
        replays: Whether batches of workers are loaded again and dropped, rather than skipped.
    """

    def __init__(self, device: torch.device | None = None, *, replays: bool = True) -> None:
        self.device, self.replays = device, replays
        self.loaders: list[ResumableLoader] = []
        self.pending: RankPosition | None = None
        """The position to resume, until its first batch is asked for."""
        self.inexact: list[str] = []
        """What will differ from the run that was saved."""
        self._after_start: RandomStates = {}
        self._num_requests = 0

    def wrap(self, loader: Any) -> ResumableLoader:
        """Return the loader as one of this run's."""
        resumable = ResumableLoader(loader, self)
        self.loaders.append(resumable)
        return resumable

    def unwrap(self) -> None:
        """Restore all loaders."""
        for loader in self.loaders:
            loader.restore_sampler()
        self.loaders = []

    def capture(self) -> RandomStates:
        """Return the random states of this process, and of the loaders' own generators."""
        return random_states.capture(self.device, self._generators())

    def restore(self, states: RandomStates) -> None:
        """Set them."""
        random_states.restore(states, self.device, self._generators())

    def position(self, *, num_ahead: int = 0, is_over: bool = False) -> RankPosition:
        """Return where this rank is.

        Args:
            num_ahead: Batches that were handed out, and are not trained on yet.
            is_over: Whether the epoch has ended.
        """
        loaders = [loader.position(num_ahead) for loader in self.loaders]
        return RankPosition(self.capture(), num_ahead, is_over, loaders)

    def begin(self, loader: ResumableLoader) -> Position | None:
        """Set the random states that a pass of a resumed run begins with; return where it begins."""
        if self.pending is None:
            return None
        if loader is self.loaders[0]:
            self._num_requests = 0
        if self.pending.is_over:
            if loader is self.loaders[0]:
                self.restore(self.pending.now)
            return None
        position = self.pending.loaders[self.loaders.index(loader)]
        sampler = sampler_of(loader.loader)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(position.epoch)
        self.restore(position.start)
        return position

    def begun(self) -> None:
        """Keep the random states between a pass's start and its first batch: hooks run in between."""
        if self.pending is not None:
            self._after_start = self.capture() if self.pending.is_over else self.pending.now

    def before_batch(self, loader: ResumableLoader) -> None:
        """Set the random states of the save, before the first batch that had not been fetched then."""
        if self.pending is None or loader is not self.loaders[0]:
            return
        self._num_requests += 1
        if self._num_requests > (0 if self.pending.is_over else self.pending.num_ahead):
            self.restore(self._after_start)
            self.pending = None

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that users gave their loaders and samplers, each once."""
        found: dict[int, torch.Generator] = {}
        for loader in self.loaders:
            sampler = sampler_of(loader.loader)
            for owner in (loader.loader, sampler, getattr(loader.loader, "batch_sampler", None)):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator):
                    found[id(generator)] = generator
        return list(found.values())


class ResumableLoader:
    """Any training loader, with a position; all other attributes are its own.

    Args:
        loader: The loader.
        run: What the loaders of this rank share.
    """

    _OWN = ("loader", "run", "num_batches", "_start", "_stream", "_owner")

    def __init__(self, loader: Any, run: ResumableRun) -> None:
        self.loader, self.run = loader, run
        self.num_batches = 0
        self._start: RandomStates | None = None
        self._stream: IndexStream | None = None
        self._owner: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        run, stream = self.run, self._stream
        position = run.begin(self)
        self._start = run.capture() if position is None else position.start
        self.num_batches = num_dropped = 0 if position is None else position.num_batches
        if stream is not None:
            stream.first_states = None if position is None else position.first
            is_replayed = run.replays and getattr(self.loader, "num_workers", 0) > 0
            stream.num_skipped = 0 if is_replayed else num_dropped
            num_dropped -= stream.num_skipped
        iterator = iter(self.loader)
        run.begun()
        return self._batches(iterator, num_dropped)

    def _batches(self, iterator: Iterator[Any], num_dropped: int) -> Iterator[Any]:
        for _ in range(num_dropped):
            next(iterator, None)
        while True:
            self.run.before_batch(self)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.num_batches += 1
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # without asking for a length

    def observe_sampler(self, owner: DataLoader[Any]) -> None:
        """Let the passes of `owner`, the innermost loader, begin at a later index."""
        name = _sampler_name(owner)
        self._stream, self._owner = IndexStream(getattr(owner, name), self.run.capture, self.run.restore), owner
        object.__setattr__(owner, name, self._stream)  # DataLoader.__setattr__ forbids it once it is made

    def restore_sampler(self) -> None:
        """Give the loader back its own sampler."""
        if self._stream is not None and self._owner is not None:
            object.__setattr__(self._owner, _sampler_name(self._owner), self._stream.sampler)
            self._stream = None

    def position(self, num_ahead: int) -> Position:
        """Return the position, `num_ahead` batches before what was handed out."""
        sampler, dataset = sampler_of(self.loader), getattr(self.loader, "dataset", None)
        return Position(
            num_batches=max(0, self.num_batches - num_ahead),
            start=self.run.capture() if self._start is None else self._start,
            first=None if self._stream is None else self._stream.first_states,
            order=order_of(sampler),
            seed=sampler.seed if isinstance(sampler, DistributedSampler) else 0,
            epoch=int(getattr(sampler, "epoch", 0)),
            num_samples=len(dataset) if isinstance(dataset, Sized) else -1,
            batch_size=getattr(self.loader, "batch_size", None) or -1,
        )

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)


def sampler_of(loader: Any) -> Any:
    """Return the sampler of single indices that decides a loader's order."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, IndexStream):
        batches = batches.sampler
    sampler = getattr(batches, "sampler", None) or batches or getattr(loader, "sampler", None)
    return sampler.sampler if isinstance(sampler, IndexStream) else sampler


def order_of(sampler: Any) -> str:
    """Return what decides the order of samples, as `Position.order` names it."""
    kinds = {SequentialSampler: "sequential", RandomSampler: "random", DistributedSampler: "distributed"}
    return kinds.get(type(sampler), type(sampler).__name__)


def _sampler_name(loader: DataLoader[Any]) -> str:
    """Return the attribute that a loader's passes take indices from."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"
