"""A loader with other workers for the training, whose batches are on the device ahead of use.

A stateful loader's state is the one after the last batch that was handed out, not after the last that was
fetched. A second iteration during a pass (to look at some images) gets an iterator of the loader itself, and
takes nothing from the training.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from typing_extensions import override

from lightning_eff.core.dataloaders import LoaderWrapper
from lightning_eff.report.live_bytes import tensors_in


@dataclass(frozen=True)
class FetchedBatch:
    """One batch, or the error that ended the pass."""

    batch: Any = None  # on the device if it is moved ahead
    state: Any = None  # of a stateful loader, after this batch
    arrived: Any = None  # CUDA event of the end of the copy to the device; None if nothing was copied
    error: Exception | None = None  # what the loader raised, `StopIteration` at its end


class PrefetchLoader(LoaderWrapper):
    """Any iterable with batches ready.

    Args:
        loader: The wrapped loader.
        tuned: The same loader with other workers, for the training; None for `loader` itself.
        num_ahead: Batches that are fetched before they are asked for.
        device: A CUDA device to copy batches to, on a side stream; None copies none.
        limit: Returns how many batches the epoch takes: a stream may go on in the next one.
    """

    OWN = (
        "loader", "num_ahead", "device", "limit",
        "_tuned", "_current", "_source", "_taken_state", "_is_over",
    )  # fmt: skip

    def __init__(
        self,
        loader: Any,
        tuned: Any = None,
        *,
        num_ahead: int = 0,
        device: torch.device | None = None,
        limit: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        super().__init__(loader)
        self.num_ahead = num_ahead
        self.device = device
        self.limit = limit
        self._tuned = loader if tuned is None else tuned
        self._current: Generator[Any] | None = None
        """The pass of the training."""
        self._source: Iterator[Any] | None = None
        """The iterator of `tuned` in this pass; None before its first batch is fetched."""
        self._taken_state: Any = None
        """The loader's, after the last batch that was handed out."""
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_over or (self._current is not None and getgeneratorstate(self._current) != GEN_CLOSED):
            return iter(self.loader)
        self._source = self._taken_state = None
        # The pass's iterator makes the same draws from the random state as the loader's. torch 2.13: a loader
        # without workers draws a seed when its iterator is made, and the sampler's with the first batch; one
        # with workers draws both at once; persistent workers draw none in later passes.
        tuned, loader, seed = self._tuned, self.loader, 0
        is_at_once = tuned is loader or loader.num_workers > 0
        # Persistent workers of ours draw no seed, and new ones of the loader would.
        is_kept = is_at_once and tuned is not loader and tuned._iterator is not None  # noqa: SLF001
        if not is_at_once or (is_kept and not loader.persistent_workers):
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        if is_at_once:
            self._source = source = iter(tuned)
            if tuned is not loader and not tuned.num_workers:
                # The sampler draws its order now too, with the first index.
                indices = source._sampler_iter  # noqa: SLF001
                source._sampler_iter = itertools.chain(list(itertools.islice(indices, 1)), indices)  # noqa: SLF001
        else:
            object.__setattr__(tuned, "generator", torch.Generator().manual_seed(seed))
        self._current = self._batches()
        return self._current

    def _batches(self) -> Generator[Any]:
        """Hand out the batches of one pass."""
        ready: deque[FetchedBatch] = deque()
        num_fetched = 0
        stream = None if self.device is None else torch.cuda.Stream(self.device)
        while True:
            # One batch is fetched in any case, others only ahead of use in this epoch.
            while not ready or (
                len(ready) <= self.num_ahead and ready[-1].error is None and num_fetched < self.limit()
            ):
                ready.append(self._fetch(stream))
                num_fetched += 1
            if isinstance(ready[0].error, StopIteration):
                return
            # No variable here refers to the batch while it is trained on.
            yield self._take(ready.popleft())

    def _fetch(self, stream: Any) -> FetchedBatch:
        """Fetch one batch, or the error to raise where it would have been handed out."""
        try:
            if self._source is None:
                self._source = iter(self._tuned)
            batch, arrived = next(self._source), None
            state = self.loader.state_dict() if isinstance(self, StatefulPrefetchLoader) else None
            if self.device is not None:
                with torch.cuda.stream(stream):
                    batch, arrived = move_data_to_device(batch, self.device), stream.record_event()
        except Exception as error:  # noqa: BLE001 - raised when its batch is due
            return FetchedBatch(error=error)
        return FetchedBatch(batch, state, arrived)

    def _take(self, fetched: FetchedBatch) -> Any:
        """Return a batch that may be used from now on."""
        if fetched.error is not None:
            raise fetched.error
        if fetched.arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(fetched.arrived)
            # The side stream allocated the tensors, this one uses them last.
            for tensor in tensors_in(fetched.batch):
                tensor.record_stream(current)
        self._taken_state = fetched.state
        return fetched.batch

    def close(self) -> None:
        """End the pass, drop what is ready, and end workers that are not persistent."""
        if self._current is None:
            return
        self._current.close()
        self._current = None
        source, self._source = self._source, None
        if self._tuned is not self.loader and not self._tuned.persistent_workers:
            # Now, and not when the last traceback that refers to them is gone.
            end_workers = getattr(source, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()

    def end(self) -> None:
        """Close for good, persistent workers too; later iterations are the loader's own."""
        self.close()
        self._is_over = True
        if self._tuned is not self.loader:
            if self._tuned._iterator is not None:  # noqa: SLF001
                self._tuned._iterator._shutdown_workers()  # noqa: SLF001
                self._tuned._iterator = None  # noqa: SLF001
            self._tuned = self.loader

    @property
    def _iterator(self) -> Any:
        """Close the pass and return the inner iterator: Lightning 2.6 shuts down its workers through this."""
        self.close()
        return self._tuned._iterator  # noqa: SLF001

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.OWN and self._tuned is not self.loader:
            setattr(self._tuned, name, value)
        super().__setattr__(name, value)


class StatefulPrefetchLoader(PrefetchLoader):
    """The same for a loader with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that was handed out."""
        return self.loader.state_dict() if self._taken_state is None else self._taken_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state in the next iteration."""
        self.close()
        self._taken_state = None
        self.loader.load_state_dict(state_dict)
