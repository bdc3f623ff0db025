"""A training loader that begins where an earlier process stopped.

A pass is begun again from the random states of its start, its first batches are left out, and then the
states of the save are set: the sampler draws the same order, workers get the same seeds, and the next step
draws what it would have drawn. Indices are skipped without loading their samples, but where samples may draw
random numbers in workers, or where there are no indices, the batches are loaded and dropped.

torch 2.13: `iter(loader)` asks the sampler for its pass and then draws the seed of the workers; the sampler
draws its order when it is asked for the first indices, which workers are at once.

A loader with a state of its own (torchdata, litdata, Hugging Face) keeps its position itself. Where Lightning
does not know a loader's length it fetches a batch ahead, so the state before that batch is the one to save.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from lightning_eff.callbacks._exact_resume.index_stream import LATE_DRAWS, IndexStream
from lightning_eff.callbacks._exact_resume.position import Position
from lightning_eff.core.dataloaders import LoaderWrapper, is_stateful
from lightning_eff.core.random_states import RandomStates, differing, has_global

if TYPE_CHECKING:
    from lightning_eff.callbacks._exact_resume.resumable_run import ResumableRun


class ExactLoader(LoaderWrapper):
    """Any training loader, with a position.

    Args:
        loader: The loader.
        run: What the loaders of this rank share.
    """

    OWN = ("loader", "run", "num_batches", "is_over", "is_shared", "_start", "_begun", "_first", "_states")

    def __init__(self, loader: Any, run: ResumableRun) -> None:
        super().__init__(loader)
        self.run = run
        self.num_batches = 0
        self.is_over = False
        self.is_shared = False
        """Whether this pass is the rest of an epoch that another number of ranks had begun."""
        self._start: RandomStates | None = None
        self._begun: RandomStates | None = None
        self._first: RandomStates | None = None
        self._states: tuple[Any, Any] = (None, None)

    @property
    def stream(self) -> IndexStream | None:
        """Return the stream of the loader's indices; None where it has none."""
        samplers = (getattr(self.loader, name, None) for name in ("batch_sampler", "sampler"))
        return next((sampler for sampler in samplers if isinstance(sampler, IndexStream)), None)

    def __iter__(self) -> Iterator[Any]:
        run, stream = self.run, self.stream
        position = run.begin(self)
        if run.is_before_epoch:
            return iter(())  # `ExactResume` asks again, when the samplers know their epoch
        self.is_over = False
        self._start = run.capture() if position is None else position.start
        self._first = None if position is None else position.first
        self.num_batches = num_dropped = 0 if position is None else position.num_batches
        if is_stateful(self.loader):
            num_dropped = 0
        if stream is not None:
            stream.first_states, stream.is_asked = self._first, False
            # Before its first batch a sampler had drawn nothing, and draws in the resumed run.
            stream.is_resumed = position is not None and self.num_batches + run.num_pending_ahead > 0
            stream.remaining = None if position is None else run.remaining(self, position)
            self.is_shared = stream.remaining is not None
            is_replayed = run.replays and getattr(self.loader, "num_workers", 0) > 0
            is_skipped = self.is_shared or not is_replayed
            stream.num_skipped = num_dropped if is_skipped else 0
            num_dropped -= stream.num_skipped
        iterator = iter(self.loader)
        is_lazy = stream is not None and stream.first_states is None  # without workers
        self._begun = run.capture() if is_lazy or stream is None else None
        if stream is not None and position is not None:
            if is_lazy:
                stream.first_states = self._begun
            if not stream.is_asked:
                run.inexact.append("the loader begins a pass with its first batch: samples are seen again")
        if num_dropped:
            self._drop(iterator, num_dropped)
        saved = None if self.is_shared else position
        return self._batches(iterator, saved, is_begun=num_dropped > 0)

    def _batches(self, iterator: Iterator[Any], saved: Position | None, *, is_begun: bool) -> Iterator[Any]:
        is_ahead = is_stateful(self.loader) and sized_len(self.loader) is None
        while True:
            self.run.before_batch(self)
            if self.stream is None and not is_begun:
                self._first, is_begun = self.run.capture(), True
            try:
                batch = next(iterator)
            except StopIteration:
                self.is_over = True
                return
            self.num_batches += 1
            if self.run.report is not None:
                self.run.first_batch(self, saved)
            if is_ahead:
                self._states = self._states[1], self.loader.state_dict()
            yield batch

    def _drop(self, iterator: Iterator[Any], num_dropped: int) -> None:
        """Load batches that were trained on, and drop them."""
        start = time.perf_counter()
        num_first = int(self.stream is None)  # a stream may draw its order with its first batch
        if num_first:
            if self._first is not None:
                self.run.restore(self._first)
            next(iterator, None)
        states = self.run.capture()
        for _ in range(num_dropped - num_first):
            next(iterator, None)
        self.run.did.append(f"loaded {num_dropped} batches again in {time.perf_counter() - start:.1f} s")
        changed = differing(self.run.capture(), states)
        if self.stream is None and changed:
            self.run.inexact.append("samples without indices draw random numbers in this process")
        elif has_global(changed):
            self.run.inexact.append(LATE_DRAWS)

    def position(self, num_ahead: int) -> Position:
        """Return the position, `num_ahead` batches before what was handed out."""
        sampler, dataset = sampler_of(self.loader), getattr(self.loader, "dataset", None)
        # Mostly the states after the pass began, which a resumed run meets again: then they are left out.
        first = self._first if self.stream is None else self.stream.first_states
        is_needed = first is not None and (self._begun is None or differing(first, self._begun))
        return Position(
            num_batches=max(0, self.num_batches - num_ahead),
            start=self.run.capture() if self._start is None else self._start,
            first=first if is_needed else None,
            order=order_of(sampler),
            seed=sampler.seed if isinstance(sampler, DistributedSampler) else 0,
            epoch=int(getattr(has_epoch(self.loader), "epoch", self.run.epoch())),
            num_samples=len(dataset) if isinstance(dataset, Sized) else -1,
            batch_size=getattr(self.loader, "batch_size", None) or -1,
            length=-1 if (length := sized_len(self.loader)) is None else length,
            num_workers=getattr(self.loader, "num_workers", 0),
            hashes=[] if self.stream is None else self.stream.hashes[: max(0, self.num_batches - num_ahead)],
        )

    def own_state(self) -> dict[str, Any]:
        """Return the state of a loader that has one, after the last batch that was trained on."""
        if not is_stateful(self.loader):
            return {}
        return self._states[0] if self.run.num_ahead() else self.loader.state_dict()

    def restore_own_state(self, state: dict[str, Any]) -> None:
        """Give a loader that has a state its state back."""
        if is_stateful(self.loader):
            self.loader.load_state_dict(state)
            self._states = state, state
            if self.run.pending is not None and self.run.pending.is_over:
                for _ in self.loader:  # to the end of the pass: the next one is the next epoch's
                    pass


class StatefulExactLoader(ExactLoader):
    """Around a loader with a state: Lightning saves as many states as there are such loaders without us."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state."""
        return self.own_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it back."""
        self.restore_own_state(state_dict)


def sampler_of(loader: Any) -> Any:
    """Return the sampler of single indices that decides a loader's order."""
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if sampler is None else sampler
    sampler = sampler.source if isinstance(sampler, IndexStream) else sampler
    return getattr(sampler, "sampler", sampler)


def has_epoch(loader: Any) -> Any:
    """Return the sampler whose epoch decides a loader's order, or the batch sampler around it; else None."""
    samplers = (sampler_of(loader), getattr(loader, "batch_sampler", None))
    return next((sampler for sampler in samplers if hasattr(sampler, "set_epoch")), None)


def order_of(sampler: Any) -> str:
    """Return what decides the order of samples, as `Position.order` names it."""
    if type(sampler) is DistributedSampler:
        return "distributed" if sampler.shuffle else "distributed in order"
    return {SequentialSampler: "sequential", RandomSampler: "random"}.get(
        type(sampler), type(sampler).__name__
    )
