"""One pass over a loader that prefetches batches in a thread.

The thread never fetches more batches than the epoch needs, and holds no more bytes than allowed. Samples that
draw random numbers in this process are not prefetched: their draws would interleave with the training's.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from typing_extensions import override

from lightning_eff.report.live_bytes import tensors_in

JOIN_TIMEOUT_S = 60.0
"""How long the end of an epoch waits for a sample that is being made."""


@dataclass
class FetchedBatch:
    """One batch, or the error that ended the pass."""

    batch: Any = None  # on the device if it is moved ahead
    num_bytes: int = 0
    state: Any = None  # of a stateful loader, after this batch
    arrived: Any = None  # CUDA event of the end of the copy to the device; None if nothing was copied
    error: BaseException | None = None  # what the loader raised, `StopIteration` at its end


@dataclass
class PrefetchSettings:
    """How far to prefetch."""

    num_batches: int  # that may be ready; 0 prefetches none
    max_bytes: int | None  # that may be ready, beyond the first batch; None for no limit
    device: torch.device | None  # a CUDA device to copy batches to, on a side stream; None copies none
    limit: Callable[[], float]  # returns how many batches the epoch takes


@dataclass
class LoaderStats:
    """What was measured of a loader."""

    num_workers: int = 0  # set by the callback
    num_taken: int = 0  # batches that were handed out
    wait_s: float = 0.0  # of waiting for them, without the first, for which workers are started
    first_taken_s: float = 0.0
    last_taken_s: float = 0.0
    num_ahead: int = 0  # batches that were prefetched
    max_ready_bytes: int = 0
    draws: bool = False  # whether a sample drew random numbers in this process


@dataclass(eq=False, repr=False)
class PrefetchIterator(Iterator[Any]):
    """One pass over a loader."""

    begin: Callable[[], Iterator[Any]]  # called for the first batch
    settings: PrefetchSettings
    stats: LoaderStats  # updated with each batch
    get_state: Callable[[], Any] | None = None
    source: Iterator[Any] | None = None
    ended: bool = False
    taken_state: Any = None  # the loader's, after the last batch that was handed out
    _num_fetched: int = 0
    _grad: bool = field(default_factory=torch.is_grad_enabled)  # a thread has a grad mode of its own
    _thread: threading.Thread | None = None
    _stream: Any = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards the batches that are ready and the flags below."""
    _ready: deque[FetchedBatch] = field(default_factory=deque[FetchedBatch])
    _ready_bytes: int = 0
    _is_stopped: bool = False
    _is_awaited: bool = False
    _is_paused: bool = False
    _is_fetching: bool = False

    @override
    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        start = time.perf_counter()
        # The first two batches are fetched here, and all of them if the second one drew random numbers.
        is_beginning = self._thread is None and self._num_fetched < 2
        is_direct = self.settings.num_batches < 1 or self.stats.draws or is_beginning
        if is_direct:
            fetched = self._fetch()
        else:  # wait for the thread's next batch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lightning_eff prefetch", daemon=True)
                self._thread.start()
            with self._changed:
                self._is_awaited = not self._ready
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ready)
                self._is_awaited = False
                fetched = self._ready.popleft()
                self._ready_bytes -= fetched.num_bytes
                self._changed.notify_all()
        if fetched.error is not None:
            self.close()
            raise fetched.error
        if fetched.arrived is not None:
            current = torch.cuda.current_stream(self.settings.device)
            current.wait_event(fetched.arrived)
            # The side stream allocated the tensors, this one uses them last.
            for tensor in tensors_in(fetched.batch):
                tensor.record_stream(current)
        stats = self.stats
        stats.last_taken_s = time.perf_counter()
        if stats.num_taken == 0:
            stats.first_taken_s = stats.last_taken_s
        else:
            stats.wait_s += stats.last_taken_s - start
        stats.num_taken += 1
        self.taken_state = fetched.state
        return fetched.batch

    def _fetch(self) -> FetchedBatch:
        """Fetch one batch, or the error to raise where it would have been handed out."""
        try:
            return self._fetch_and_move()
        except BaseException as error:  # noqa: BLE001 - also StopIteration, and in the thread
            return FetchedBatch(error=error)

    def _fetch_and_move(self) -> FetchedBatch:
        """Fetch one batch, check on the second whether it draws random numbers, and move it."""
        is_watched = self._num_fetched == 1 and self.settings.num_batches > 0
        before = _random_state() if is_watched else None
        if self.source is None:
            self.source = self.begin()
        batch = next(self.source)
        self._num_fetched += 1
        if before is not None:
            after = _random_state()
            self.stats.draws = not torch.equal(before[0], after[0]) or before[1:] != after[1:]
        state = self.get_state() if self.get_state is not None else None
        device, arrived = self.settings.device, None
        if device is not None:
            from lightning.fabric.utilities.apply_func import move_data_to_device

            self._stream = self._stream or torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                batch, arrived = move_data_to_device(batch, device), self._stream.record_event()
        return FetchedBatch(batch, state=state, arrived=arrived)

    def _run(self) -> None:
        """Fetch until the end, a failure, the limit or `close`; in the thread."""
        torch.set_grad_enabled(self._grad)
        settings = self.settings
        while True:
            with self._changed:
                while not self._is_stopped:  # wait until another batch may be fetched
                    in_bytes = settings.max_bytes is None or self._ready_bytes < settings.max_bytes
                    has_room = not self._ready or (len(self._ready) < settings.num_batches and in_bytes)
                    is_needed = self._is_awaited and not self._ready  # also past the limit, and in a pause
                    is_planned = self._num_fetched < settings.limit() and not self._is_paused
                    if has_room and (is_needed or is_planned):
                        break
                    self._changed.wait()
                else:
                    return
                self._is_fetching = True
            fetched = self._fetch()
            fetched.num_bytes = sum(tensor.nbytes for tensor in tensors_in(fetched.batch))
            with self._changed:
                self._is_fetching = False
                self._ready.append(fetched)
                self._ready_bytes += fetched.num_bytes
                self.stats.max_ready_bytes = max(self.stats.max_ready_bytes, self._ready_bytes)
                self.stats.num_ahead += 1
                self._changed.notify_all()
            if fetched.error is not None:
                return

    def pause(self, *, paused: bool) -> None:
        """Stop or resume prefetching; waits for the batch that is being fetched."""
        with self._changed:
            self._is_paused = paused
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (paused and self._is_fetching), JOIN_TIMEOUT_S)

    def close(self) -> None:
        """Stop the thread and drop what is ready; the pass has ended."""
        self.ended = True
        with self._changed:
            self._is_stopped = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)
            self._thread = None


def _random_state() -> tuple[Any, ...]:
    """Return the states of PyTorch's CPU generator, of Python's and of NumPy's, to be compared."""
    generator: dict[str, Any] = cast(Any, np.random).get_state(legacy=False)
    numbers = generator["state"]
    return torch.get_rng_state(), random.getstate(), numbers["pos"], numbers["key"].tobytes()
