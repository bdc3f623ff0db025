"""A training loader that begins where an earlier process stopped.

`callbacks/exact_resume` wraps each loader of a Trainer in an `ExactLoader`; `resumable` wraps a loader for
Fabric or a custom loop. A resumed pass runs in three steps:

1. Restore the random states from the start of the saved pass. The sampler then draws the same order, and
   workers get the same seeds.
2. Skip the batches that were already trained on, and draw only their indices. If workers may draw random
   numbers, or if the dataset has no indices, the skipped batches are loaded and dropped.
3. Restore the random states that were saved, so that the next training step draws the same numbers.

In torch 2.13, `iter(loader)` first calls `iter(sampler)` and then draws the workers' seed. The sampler draws
its order when the first indices are requested. A loader with workers requests indices immediately.

A stateful loader (torchdata, litdata, Hugging Face) tracks its own position. If a loader has no length,
Lightning fetches one batch ahead. The checkpoint must then have the loader's state from before that batch.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
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
"""To verify the order, the indices of this number of batches are hashed at the start of each pass."""


class IndexStream:
    """Wraps a loader's batch sampler, so that a resumed pass can skip batches without loading their samples.

    A loader calls `iter` on this stream, then draws its workers' seed, then requests the first indices. To
    repeat the saved order, the random states at `iter` and at the first request must equal the saved states.

    Args:
        source: The loader's batch sampler, or its sampler if the loader does not batch. The name `sampler` is
            avoided, because Lightning calls `set_epoch` on an attribute with that name.
        run: State shared by this rank's loaders.
    """

    is_resumed = False
    """Whether the next pass continues a saved pass; `first_states` then has that pass's random states."""
    num_skipped = 0
    """Number of batches that a resumed pass skips."""
    is_asked = False
    """Whether the loader has called `iter` on this stream in its current pass."""
    remaining: list[Any] | None = None
    """Indices of each batch of the next pass. If this list is None, the sampler draws the indices."""
    first_states: RandomStates | None = None
    """Random states when the loader requested the first indices of the current pass."""

    def __init__(self, source: Any, run: ResumableRun) -> None:
        self.source: Any
        self.hashes: list[int]
        # Set attributes through `vars`, because `__setattr__` would forward an assignment to the source.
        vars(self).update(source=source, run=run, hashes=[])

    def __iter__(self) -> Iterator[Any]:
        remaining, self.remaining, self.is_asked = self.remaining, None, True
        return self._pass(self.hashed(iter(self.source))) if remaining is None else iter(remaining)

    def hashed(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield the sampler's indices, and store the hashes of the first `NUM_HASHED` batches in `hashes`."""
        self.hashes.clear()
        for batch in itertools.islice(indices, NUM_HASHED):
            with contextlib.suppress(TypeError, AttributeError):  # indices of other types get no hash
                # Hash JSON text: indices may be ints, arrays or lists, and equal indices give equal text.
                text = json.dumps(batch, default=lambda array: array.tolist())
                self.hashes.append(zlib.crc32(text.encode()))
            yield batch
        yield from indices

    def _pass(self, indices: Iterator[Any]) -> Iterator[Any]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        is_resumed, self.is_resumed = self.is_resumed, False
        run: ResumableRun = self.run
        # The random states of training, which are restored below after the skipped indices are drawn.
        current = run.capture()
        if is_resumed:
            self.first_states = self.first_states or current
            run.restore(self.first_states)
            # Samplers draw their order when the first index is requested, so request one index under these
            # random states. The index is the first skipped index; if nothing is skipped, it is yielded below.
            taken = list(itertools.islice(indices, 1))
            first = run.capture()
            deque(itertools.islice(indices, max(0, num_skipped - 1)), maxlen=0)
            if has_global(differing(run.capture(), first)):
                run.inexact.append(LATE_DRAWS)
            # If nothing is skipped, do not restore the user's own generators ("generator.0"), because the
            # request of the first index has just advanced the sampler's generator to the right position.
            run.restore({k: v for k, v in current.items() if num_skipped or "." not in k})
            yield from () if num_skipped else taken
        else:
            self.first_states = current
        yield from indices

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if "source" not in self.__dict__:  # during a copy
            raise AttributeError(name)
        return getattr(self.source, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value) if hasattr(IndexStream, name) else setattr(self.source, name, value)

    # Users' code and libraries check `isinstance(loader.batch_sampler, ...)`, which must still succeed.
    __class__ = property(lambda self: type(self.source))  # pyright: ignore[reportIncompatibleMethodOverride]

    @override
    def __reduce__(self) -> Any:  # spawned workers get only the source, without random states
        return (copy.copy, (self.source,))


class ExactLoader(LoaderWrapper):
    """Wraps any training loader, and adds a position that can be saved and restored.

    Args:
        loader: The loader to wrap.
        run: State shared by this rank's loaders.
    """

    OWN = ("loader", "run", "num_batches", "is_over", "is_shared", "_start", "_begun", "_first", "_states")

    def __init__(self, loader: Any, run: ResumableRun) -> None:
        super().__init__(loader)
        self.run = run
        self.num_batches = 0
        self.is_over = False
        self.is_shared = False
        """Whether this pass covers this rank's part of an epoch that began on a different number of ranks."""
        self._start: RandomStates | None = None
        self._begun: RandomStates | None = None
        self._first: RandomStates | None = None
        self._states: tuple[Any, Any] = (None, None)

    @property
    def stream(self) -> IndexStream | None:
        """Return the loader's index stream; None if the loader has no stream."""
        samplers = (getattr(self.loader, name, None) for name in ("batch_sampler", "sampler"))
        return next((sampler for sampler in samplers if isinstance(sampler, IndexStream)), None)

    def __iter__(self) -> Iterator[Any]:
        run, stream = self.run, self.stream
        position = self._begin()
        if run.is_before_epoch:
            return iter(())  # `ExactResume` calls `iter` again after `set_epoch`
        self.is_over = False
        self._start = run.capture() if position is None else position.start
        self._first = None if position is None else position.first
        self.num_batches = 0 if position is None else position.num_batches
        num_dropped = 0 if is_stateful(self.loader) else self.num_batches
        if stream is not None:
            stream.first_states, stream.is_asked = self._first, False
            # If the checkpoint was saved before the first batch, the sampler had not drawn its order yet.
            stream.is_resumed = position is not None and self.num_batches + run.num_pending_ahead > 0
            stream.remaining = None if position is None else self._remaining(position)
            self.is_shared = stream.remaining is not None
            is_replayed = run.replays and getattr(self.loader, "num_workers", 0) > 0
            # Skip batches by index. If workers may draw random numbers, load and drop the batches instead.
            is_skipped = self.is_shared or not is_replayed
            stream.num_skipped = num_dropped if is_skipped else 0
            num_dropped -= stream.num_skipped
        iterator = iter(self.loader)
        # Without workers, the loader has not requested the first indices yet.
        is_lazy = stream is not None and stream.first_states is None
        self._begun = run.capture() if is_lazy or stream is None else None
        if stream is not None and position is not None and is_lazy:
            stream.first_states = self._begun
        if num_dropped:
            self._drop(iterator, num_dropped)
        if stream is not None and position is not None and not stream.is_asked:
            run.inexact.append("the loader begins a pass with its first batch: samples are seen again")
        return self._batches(iterator, None if self.is_shared else position, is_begun=num_dropped > 0)

    def _batches(self, iterator: Iterator[Any], saved: Position | None, *, is_begun: bool) -> Iterator[Any]:
        # Lightning fetches one batch ahead if a stateful loader has no length, so keep an earlier state too.
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
                # The loader's states after the previous batch and after this batch.
                self._states = self._states[1], self.loader.state_dict()
            yield batch

    def _begin(self) -> Position | None:
        """Restore the random states of a saved pass's start, and return its position; None for a new pass."""
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
        """Compare the dataset and the sampler with the saved position; reject or report a change."""
        run, current = self.run, self.position(0)
        num_saved = 0 if run.pending is None else len(run.pending.loaders)
        # Possible changes, as (saved value, current value, description).
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
            run.refusal = f"{before} {text}, {epoch}, not {now}"
        elif text:
            run.inexact.append(f"{before} {text} are now {now}")

    def _remaining(self, saved: Position) -> list[list[int]] | None:
        """Return the indices of this rank's remaining batches, if the number of ranks has changed.

        Return None if the number of ranks is the same, or if the order of the epoch cannot be computed.
        """
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
        # In every step, each rank of the saved run took `batch_size` samples from the common order.
        rest = order[saved.num_batches * saved.batch_size * run.num_saved_ranks :]
        # As in torch's DistributedSampler, repeat samples until all ranks get the same number of samples.
        # Rank r takes the samples r, r + num_ranks, r + 2 * num_ranks, and so on.
        rest += rest[: -len(rest) % run.num_ranks]
        own = rest[run.rank :: run.num_ranks]
        batches = [own[i : i + saved.batch_size] for i in range(0, len(own), saved.batch_size)]
        if batches and getattr(self.loader, "drop_last", False) and len(batches[-1]) < saved.batch_size:
            batches.pop()
        run.num_remaining.append(len(batches))
        return batches

    def _order(self, saved: Position) -> list[int] | None:
        """Return all indices in the order of the saved epoch; None if the order cannot be computed."""
        samples: Any = range(saved.num_samples)
        if saved.order in ("sequential", "distributed in order"):
            return list(samples)
        if saved.order == "distributed":
            # A sampler for a single rank yields the common order, which all ranks share.
            sampler = DistributedSampler[int](samples, num_replicas=1, rank=0, seed=saved.seed)
            sampler.set_epoch(saved.epoch)
            return list(sampler)
        if saved.order != "random":
            return None
        current = self.run.capture()
        self._begin_order(saved)
        order = list(RandomSampler(samples, generator=getattr(self.loader, "generator", None)))
        # Drawing the order has advanced the generators, so restore the states from before the drawing.
        self.run.restore(current)
        return order

    def _begin_order(self, saved: Position) -> None:
        """Set the random states in which the saved pass drew its order."""
        self.run.restore(saved.first or saved.start)
        if saved.first is None:  # torch draws the workers' seed first
            generator = getattr(self.loader, "generator", None)
            torch.empty((), dtype=torch.int64).random_(generator=generator)

    def _first_batch(self, saved: Position | None) -> None:
        """Check the order of a resumed pass; log the report after the last loader's first batch."""
        if saved is not None:
            self.check_order(saved)
        if self.run.report is not None and self is self.run.loaders[-1]:
            self.run.report()
            self.run.report = None

    def check_order(self, saved: Position) -> None:
        """Compare the hashes of a pass's first indices with the saved hashes."""
        if self.stream is None or not saved.hashes:
            self.run.is_order_checked = False
        elif self.stream.hashes[: len(saved.hashes)] != saved.hashes:
            self.run.inexact.append("the sampler does not repeat the indices of the saved epoch")

    def repeat_epoch(self, saved: Position) -> None:
        """Draw the first indices of the saved, completed epoch again, to check their order."""
        if self.stream is not None and saved.hashes:
            if (sampler := sampler_with_epoch(self.loader)) is not None:
                sampler.set_epoch(saved.epoch)
            self.run.restore(saved.start)
            indices = iter(self.stream.source)  # some samplers draw the order here, others later
            self._begin_order(saved)
            deque(itertools.islice(self.stream.hashed(indices), len(saved.hashes)), maxlen=0)
        self.check_order(saved)

    def _drop(self, iterator: Iterator[Any], num_dropped: int) -> None:
        """Load batches that were already trained on, and drop them."""
        start = time.perf_counter()
        num_first = int(self.stream is None)  # a dataset without indices may draw its order here
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
        """Return the position `num_ahead` batches before the last batch that was handed out."""
        sampler, dataset = sampler_of(self.loader), getattr(self.loader, "dataset", None)
        # Save `first` only if it differs from the states just after the pass began. A difference is rare.
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
        """Return a stateful loader's state after the last trained batch; return {} for other loaders."""
        if not is_stateful(self.loader):
            return {}
        return self._states[0] if self.run.num_ahead() else self.loader.state_dict()

    def restore_own_state(self, state: dict[str, Any]) -> None:
        """Restore the state of a stateful loader."""
        if is_stateful(self.loader):
            self.loader.load_state_dict(state)
            self._states = state, state
            if self.run.pending is not None and self.run.pending.is_over:
                for _ in self.loader:  # finish the pass, so that the next pass is the next epoch
                    pass


class StatefulExactLoader(ExactLoader):
    """Wraps a stateful loader. Other wrappers have no `state_dict`, so Lightning saves no states for them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state."""
        return self.own_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader's state."""
        self.restore_own_state(state_dict)


class StandaloneLoader(ExactLoader):
    """A loader for use without a Trainer; its state has the position and random states of each rank.

    With Fabric, this class replaces Fabric's loader, sets the sampler's epoch, and moves batches to a device.
    Fabric's loader would begin a pass at the first batch, but the random states are set earlier, by `iter`.
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
        # Fabric's loader keeps the user's loader in `_dataloader` (private in 2.6).
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
        """Return the position of each rank, and the loader's own state; all ranks must call this method."""
        is_between = self.is_over or self._start is None
        positions = of_all_ranks(self.run.position(is_over=is_between))
        # If the state is saved within a pass, the resumed loader begins with the same pass number.
        num_passes = self.num_passes - (not is_between)
        return {"positions": positions, "own": self.own_state(), "num_passes": num_passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next pass at the saved position."""
        self.restore_own_state(state_dict["own"])
        self.run.resume(from_checkpoint(state_dict["positions"]))
        self.num_passes = state_dict["num_passes"]


def observe(loader: Any, run: ResumableRun) -> Any:
    """If a loader has indices, wrap its sampler in an `IndexStream`, so that passes can skip batches."""
    has_indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if has_indices and not is_stateful(loader):
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(loader, name)
        # If a loader is observed a second time, it gets a new stream around its original sampler.
        sampler = sampler.source if isinstance(sampler, IndexStream) else sampler
        # `DataLoader.__setattr__` forbids a new sampler after construction.
        object.__setattr__(loader, name, IndexStream(sampler, run))
        run.undo.callback(object.__setattr__, loader, name, sampler)
    return loader


def wrap(loader: Any, run: ResumableRun) -> ExactLoader:
    """Wrap a loader, and register the result as one of the run's loaders."""
    run.loaders.append((StatefulExactLoader if is_stateful(loader) else ExactLoader)(loader, run))
    return run.loaders[-1]


def sampler_of(loader: Any) -> Any:
    """Return the innermost sampler, which decides a loader's order."""
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if sampler is None else sampler
    sampler = sampler.source if isinstance(sampler, IndexStream) else sampler
    # A batch sampler has an attribute `sampler`, which is the sampler of single indices.
    return getattr(sampler, "sampler", sampler)


def sampler_with_epoch(loader: Any) -> Any:
    """Return the first of a loader's sampler and batch sampler that has a method `set_epoch`, or None."""
    samplers = (sampler_of(loader), getattr(loader, "batch_sampler", None))
    return next((sampler for sampler in samplers if hasattr(sampler, "set_epoch")), None)


def order_of(sampler: Any) -> str:
    """Return the kind of order that a sampler draws, as in `Position.order`."""
    if type(sampler) is DistributedSampler:
        return "distributed" if sampler.shuffle else "distributed in order"
    return {SequentialSampler: "sequential", RandomSampler: "random"}.get(
        type(sampler), type(sampler).__name__
    )
