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

import contextlib
import itertools
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from typing_extensions import override

from lightning_eff.callbacks._exact_resume.resumable_run import (
    Position,
    ResumableRun,
    from_checkpoint,
    num_ranks,
    of_all_ranks,
)
from lightning_eff.core.dataloaders import LoaderWrapper, is_stateful
from lightning_eff.core.random_states import RandomStates, differing, has_global

LATE_DRAWS = "the sampler draws random numbers while it is read: samples may be seen again"
NUM_HASHED = 16
"""Batches at the start of a pass whose indices are hashed, to prove its order."""


class IndexStream:
    """A loader's batch sampler; a pass may begin after its first batches without loading them.

    A loader asks for the pass before it draws the seed of its workers, and for the first indices after it:
    the random states at both moments are needed to draw the same order again.

    Args:
        source: The loader's batch sampler, or its sampler where it does not batch. Not `sampler`, under
            which Lightning looks for the sampler inside, to set its epoch.
        run: What the loaders of this rank share.
    """

    is_resumed = False
    """Whether the next pass begins with the states in `first_states`."""
    num_skipped = 0
    """Batches of indices that a resumed pass leaves out."""
    is_asked = False
    """Whether the loader has asked for the indices of its current pass."""
    remaining: list[Any] | None = None
    """All batches of indices of the next pass, in place of the sampler's."""
    first_states: RandomStates | None = None
    """The random states when the current pass was asked for its first indices."""

    def __init__(self, source: Any, run: ResumableRun) -> None:
        self.source: Any
        self.hashes: list[int]
        vars(self).update(source=source, run=run, hashes=[])

    def __iter__(self) -> Iterator[Any]:
        remaining, self.remaining, self.is_asked = self.remaining, None, True
        return self._pass(self.hashed(iter(self.source))) if remaining is None else iter(remaining)

    def hashed(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield the sampler's indices, and keep hashes of the first batches in `hashes`."""
        self.hashes.clear()
        for batch in itertools.islice(indices, NUM_HASHED):
            with contextlib.suppress(TypeError, AttributeError):  # of objects, which are not hashed
                text = json.dumps(batch, default=lambda array: array.tolist())
                self.hashes.append(zlib.crc32(text.encode()))
            yield batch
        yield from indices

    def _pass(self, indices: Iterator[Any]) -> Iterator[Any]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        is_resumed, self.is_resumed = self.is_resumed, False
        run: ResumableRun = self.run
        current = run.capture()
        if is_resumed:
            self.first_states = self.first_states or current
            run.restore(self.first_states)
            # A sampler draws its order with its first index: if none is skipped, with the one that is used.
            taken = list(itertools.islice(indices, 1))
            first = run.capture()
            deque(itertools.islice(indices, max(0, num_skipped - 1)), maxlen=0)
            if has_global(differing(run.capture(), first)):
                run.inexact.append(LATE_DRAWS)
            # Workers are asked for more at once: then a sampler's own generator is where it is to be.
            run.restore({k: v for k, v in current.items() if num_skipped or "." not in k})
            yield from () if num_skipped else taken
        else:
            self.first_states = current
        yield from indices

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if "source" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.source, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value) if hasattr(IndexStream, name) else setattr(self.source, name, value)

    # Users ask `isinstance(loader.batch_sampler, ...)`.
    __class__ = property(lambda self: type(self.source))  # pyright: ignore[reportIncompatibleMethodOverride]

    @override
    def __reduce__(self) -> Any:  # a spawned worker has no use for the states
        return (_same, (self.source,))


def _same(source: Any) -> Any:
    return source


class DropFirst:
    """A `collate_fn` whose first batches stay in their workers, which load them only for what they draw.

    Handing a small batch to the main process takes longer than loading it.

    Args:
        collate_fn: The loader's own; it may draw too.
        num_dropped: Batches of the pass.
        num_workers: Take turns: worker w has the batches w, w + num_workers, ...
    """

    def __init__(self, collate_fn: Callable[[Any], Any], num_dropped: int, num_workers: int) -> None:
        self.collate_fn, self.num_dropped, self.num_workers = collate_fn, num_dropped, num_workers
        self.num_batches = 0
        """Of this worker."""

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        worker: Any = get_worker_info()
        index = self.num_batches * self.num_workers + worker.id
        self.num_batches += 1
        return None if index < self.num_dropped else batch


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
        position = self._begin()
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
            stream.remaining = None if position is None else self._remaining(position)
            self.is_shared = stream.remaining is not None
            is_replayed = run.replays and getattr(self.loader, "num_workers", 0) > 0
            is_skipped = self.is_shared or not is_replayed
            stream.num_skipped = num_dropped if is_skipped else 0
            num_dropped -= stream.num_skipped
        iterator = self._iterator(num_dropped)
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

    def _iterator(self, num_dropped: int) -> Iterator[Any]:
        """Begin a pass of the loader, whose workers keep the first batches to themselves."""
        loader: Any = self.loader
        if (
            not num_dropped
            or self.stream is None
            or not isinstance(loader, DataLoader)
            or not loader.in_order
        ):
            return iter(loader)
        with patch.object(
            loader, "collate_fn", DropFirst(loader.collate_fn, num_dropped, loader.num_workers)
        ):
            return iter(loader)

    def _batches(self, iterator: Iterator[Any], saved: Position | None, *, is_begun: bool) -> Iterator[Any]:
        is_ahead = is_stateful(self.loader) and sized_len(self.loader) is None
        is_begun |= self.stream is not None
        while True:
            self.run.before_batch(self)
            if not is_begun:
                self._first, is_begun = self.run.capture(), True
            try:
                batch = next(iterator)
            except StopIteration:
                self.is_over = True
                return
            self.num_batches += 1
            if self.run.report is not None:
                self._first_batch(saved)
            if is_ahead:
                self._states = self._states[1], self.loader.state_dict()
            yield batch

    def _begin(self) -> Position | None:
        """Set the random states that a pass of a resumed run begins with; return where it begins."""
        run, loader = self.run, self.loader
        if run.pending is not None and getattr(loader, "persistent_workers", False):
            run.inexact.append("persistent workers do not keep their random states")
        saved = run.begin(self)
        if saved is None:
            return None
        self._compare(saved)
        if (sampler := sampler_with_epoch(loader)) is not None:
            sampler.set_epoch(saved.epoch)
        if not run.replays and getattr(loader, "num_workers", 0) > 0:
            run.inexact.append("augmentation in workers differs until the epoch's end (workers=fast)")
        run.restore(saved.start)
        return saved

    def _compare(self, saved: Position) -> None:
        """Find what has changed since the save: rejected before the first batch, or not exact."""
        run, current = self.run, self.position(0)
        num_saved = 0 if run.pending is None else len(run.pending.loaders)
        changes = [(num_saved, len(run.loaders), "loaders")]
        changes += [(saved.num_samples, current.num_samples, "samples")]
        changes += [(saved.batch_size, current.batch_size, "samples in a batch")]
        if run.num_saved_ranks == run.num_ranks:
            changes += [(saved.length, current.length, "batches in an epoch")]
            if saved.order != current.order:
                run.inexact.append(f"the sampler was {saved.order} and is {current.order}")
            if saved.num_workers != current.num_workers:
                counts = f"{saved.num_workers} workers are now {current.num_workers}"
                run.inexact.append(f"{counts}: samples draw other random numbers")
        before, now, text = next((change for change in changes if change[0] != change[1]), (0, 0, ""))
        if text and run.refuses_changes:
            epoch = "as in the epoch in which the checkpoint was saved"
            run.refusal = f"{before} {text}, {epoch}, and not {now}"
        elif text:
            run.inexact.append(f"{before} {text} are now {now}")

    def _remaining(self, saved: Position) -> list[list[int]] | None:
        """Return this rank's batches of what other ranks left of the epoch; None for the ranks that saved."""
        run = self.run
        if run.num_saved_ranks == run.num_ranks:
            return None
        runs = (run.num_saved_ranks, saved.order), (run.num_ranks, order_of(sampler_of(self.loader)))
        if any(ranks > 1 and not order.startswith("distributed") for ranks, order in runs):
            run.inexact.append("ranks do not share one order: samples of this epoch may be seen again")
            return None
        order = self._order(saved)
        if order is None:
            text = f"the order of {saved.order} is not known on other ranks"
            run.inexact.append(f"{text}: samples of this epoch may be seen again")
            return None
        rest = order[saved.num_batches * saved.batch_size * run.num_saved_ranks :]
        rest += rest[: -len(rest) % run.num_ranks]  # as many for each rank, as torch's sampler does it
        own = rest[run.rank :: run.num_ranks]
        batches = [own[i : i + saved.batch_size] for i in range(0, len(own), saved.batch_size)]
        if batches and getattr(self.loader, "drop_last", False) and len(batches[-1]) < saved.batch_size:
            batches.pop()
        run.num_remaining.append(len(batches))
        return batches

    def _order(self, saved: Position) -> list[int] | None:
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
        current = self.run.capture()
        self._begin_order(saved)
        order = list(RandomSampler(samples, generator=getattr(self.loader, "generator", None)))
        self.run.restore(current)
        return order

    def _begin_order(self, saved: Position) -> None:
        """Set the random states with which a pass was asked for its first indices."""
        self.run.restore(saved.first or saved.start)
        if saved.first is None:  # the seed of workers is drawn first
            generator = getattr(self.loader, "generator", None)
            torch.empty((), dtype=torch.int64).random_(generator=generator)

    def _first_batch(self, saved: Position | None) -> None:
        """Compare the order with the saved one; report when each loader has been asked for a batch."""
        if saved is not None:
            self.check_order(saved)
        if self.run.report is not None and self is self.run.loaders[-1]:
            self.run.report()
            self.run.report = None

    def check_order(self, saved: Position) -> None:
        """Compare the indices of a pass with the saved ones."""
        if self.stream is None or not saved.hashes:
            self.run.is_order_checked = False
        elif self.stream.hashes[: len(saved.hashes)] != saved.hashes:
            self.run.inexact.append("the sampler does not repeat the indices of the saved epoch")

    def repeat_epoch(self, saved: Position) -> None:
        """Draw the first indices of the epoch that a checkpoint ended with, and compare them."""
        if self.stream is not None and saved.hashes:
            if (sampler := sampler_with_epoch(self.loader)) is not None:
                sampler.set_epoch(saved.epoch)
            self.run.restore(saved.start)
            indices = iter(self.stream.source)  # some samplers draw now, others with the first index
            self._begin_order(saved)
            deque(itertools.islice(self.stream.hashed(indices), len(saved.hashes)), maxlen=0)
        self.check_order(saved)

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
            epoch=int(getattr(sampler_with_epoch(self.loader), "epoch", self.run.epoch())),
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


class StandaloneLoader(ExactLoader):
    """A loader whose state is its position and the random states of each rank.

    It does for Fabric's loader what that does with each pass: Fabric begins one when its first batch is
    asked for, which would be after the random states are set.
    """

    OWN = (*ExactLoader.OWN, "fabric_loader", "num_passes")

    def __init__(self, loader: Any, *, replays: bool) -> None:
        inner = getattr(loader, "_dataloader", None)
        self.fabric_loader = None if inner is None else loader
        self.num_passes = 0
        run = ResumableRun(
            getattr(self.fabric_loader, "device", None),
            replays=replays,
            rank=dist.get_rank() if num_ranks() > 1 else 0,
            num_ranks=num_ranks(),
        )
        super().__init__(observe(loader if inner is None else inner, run), run)
        run.loaders.append(self)

    @override
    def __iter__(self) -> Iterator[Any]:
        if self.fabric_loader is None:
            return super().__iter__()
        sampler = sampler_of(self.loader)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.num_passes)
        self.num_passes += 1
        batches, device = super().__iter__(), self.fabric_loader.device
        return batches if device is None else (move_data_to_device(batch, device) for batch in batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each rank, and the loader's own state; all ranks call it."""
        is_between = self.is_over or self._start is None
        positions = of_all_ranks(self.run.position(is_over=is_between))
        num_passes = self.num_passes - (not is_between)
        return {"positions": positions, "own": self.own_state(), "num_passes": num_passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass begin there."""
        self.restore_own_state(state_dict["own"])
        self.run.resume(from_checkpoint(state_dict["positions"]))
        self.num_passes = state_dict["num_passes"]


def observe(loader: Any, run: ResumableRun) -> Any:
    """Let the passes of a loader with indices begin at a later one; return the loader."""
    has_indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if has_indices and not is_stateful(loader):
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        sampler = sampler.source if isinstance(sampler, IndexStream) else sampler
        # DataLoader.__setattr__ forbids it once it is made
        object.__setattr__(loader, name, IndexStream(sampler, run))
        run.undo.callback(object.__setattr__, loader, name, sampler)
    return loader


def wrap(loader: Any, run: ResumableRun) -> ExactLoader:
    """Return the loader as one of a run's."""
    run.loaders.append((StatefulExactLoader if is_stateful(loader) else ExactLoader)(loader, run))
    return run.loaders[-1]


def sampler_of(loader: Any) -> Any:
    """Return the sampler of single indices that decides a loader's order."""
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if sampler is None else sampler
    sampler = sampler.source if isinstance(sampler, IndexStream) else sampler
    return getattr(sampler, "sampler", sampler)


def sampler_with_epoch(loader: Any) -> Any:
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
