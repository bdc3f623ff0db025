"""One pass over a loader that fetches ahead in a thread, and what is seen of it.

The thread never runs further than the epoch needs, and holds no more bytes than it may. Samples that draw
random numbers in this process are not fetched ahead: their draws would fall between others than without it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

JOIN_TIMEOUT_S = 60.0
"""How long the end of an epoch waits for a sample that is being made."""


@dataclass
class Fetched:
    """One batch, or what ended the fetching.

    Args:
        batch: As the loader gave it, moved if there is somewhere to move it to.
        num_bytes: Of its tensors.
        state: The loader's state after it, for a stateful one.
        arrived: What tells a stream that the batch is on the device.
        error: What the loader raised, `StopIteration` at its end.
    """

    batch: Any = None
    num_bytes: int = 0
    state: Any = None
    arrived: Any = None
    error: BaseException | None = None


@dataclass
class Settings:
    """How far to fetch ahead.

    Args:
        num_batches: Batches that may be ready; 0 fetches none ahead.
        max_bytes: Bytes that may be ready, beyond the first batch; None for no limit.
        device: A CUDA device that batches are moved to on a stream of its own; None leaves them.
        limit: Returns how many batches of an epoch will be asked for.
    """

    num_batches: int
    max_bytes: int | None
    device: torch.device | None
    limit: Callable[[], float]


@dataclass
class Seen:
    """What a loader was seen to do.

    Args:
        num_workers: Processes that made its samples; set by whoever chose them.
        num_taken: Batches that were handed out.
        wait_s: Time that this took, without the first batch: for that one workers are started.
        first_taken_s: When the first was handed out.
        last_taken_s: When the last was.
        num_ahead: Batches that were fetched before they were asked for.
        max_ready_bytes: The most that was ready at a time.
        draws: Whether a sample drew random numbers in this process.
    """

    num_workers: int = 0
    num_taken: int = 0
    wait_s: float = 0.0
    first_taken_s: float = 0.0
    last_taken_s: float = 0.0
    num_ahead: int = 0
    max_ready_bytes: int = 0
    draws: bool = False

    def count(self, wait_s: float) -> None:
        """Count a batch that was waited for."""
        self.last_taken_s = time.perf_counter()
        if self.num_taken == 0:
            self.first_taken_s = self.last_taken_s
        else:
            self.wait_s += wait_s
        self.num_taken += 1


class Owner(Protocol):
    """Whose settings hold, and who is told what is handed out."""

    loader: Any
    settings: Settings
    seen: Seen

    def take(self, fetched: Fetched, wait_s: float) -> None:
        """Count a batch that is handed out."""
        ...


class Lookahead:
    """One pass over a loader.

    Args:
        begin: Returns the loader's iterator; called for the first batch.
        owner: Whose settings hold, and who counts.
        stateful: Whether the loader has a state to be kept with each batch.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], owner: Owner, *, stateful: bool) -> None:
        self.source: Iterator[Any] | None = None
        self.ended = False
        self._begin = begin
        self._owner = owner
        self._stateful = stateful
        self._num_fetched = 0
        self._ready: deque[Fetched] = deque()
        self._ready_bytes = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._awaited = False
        self._paused = False
        self._fetching = False
        self._grad = torch.is_grad_enabled()
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        start = time.perf_counter()
        fetched = self._fetch() if self._fetches_itself() else self._wait()
        if fetched.error is not None:
            self.close()
            raise fetched.error
        if fetched.arrived is not None:
            current = torch.cuda.current_stream(self._owner.settings.device)
            current.wait_event(fetched.arrived)
            for tensor in tensors_of(fetched.batch):
                tensor.record_stream(current)
        self._owner.take(fetched, time.perf_counter() - start)
        return fetched.batch

    def _fetches_itself(self) -> bool:
        """Say whether the caller fetches: the first two batches, and all if they draw random numbers."""
        if self._owner.settings.num_batches < 1 or self._owner.seen.draws:
            return True
        return self._thread is None and self._num_fetched < 2

    def _fetch(self) -> Fetched:
        watched = self._num_fetched == 1 and self._owner.settings.num_batches > 0
        before = _random_state() if watched else None
        try:
            if self.source is None:
                self.source = self._begin()
            batch = next(self.source)
        except BaseException as error:  # noqa: BLE001 - raised where the batch would have been handed out
            return Fetched(error=error)
        self._num_fetched += 1
        if before is not None:
            self._owner.seen.draws = not _same(before, _random_state())
        state = self._owner.loader.state_dict() if self._stateful else None
        batch, arrived = self._move(batch)
        return Fetched(batch, state=state, arrived=arrived)

    def _move(self, batch: Any) -> tuple[Any, Any]:
        device = self._owner.settings.device
        if device is None:
            return batch, None
        from lightning.fabric.utilities.apply_func import move_data_to_device

        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            return move_data_to_device(batch, device), self._stream.record_event()

    def _wait(self) -> Fetched:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning_eff prefetch", daemon=True)
            self._thread.start()
        with self._changed:
            self._awaited = not self._ready
            self._changed.notify_all()
            while not self._ready:
                self._changed.wait()
            self._awaited = False
            fetched = self._ready.popleft()
            self._ready_bytes -= fetched.num_bytes
            self._changed.notify_all()
        return fetched

    def _run(self) -> None:
        """Fetch until the end, a failure, the limit or `close`; in the thread."""
        torch.set_grad_enabled(self._grad)
        seen = self._owner.seen
        while self._may_go_on():
            fetched = self._fetch()
            fetched.num_bytes = sum(tensor.nbytes for tensor in tensors_of(fetched.batch))
            with self._changed:
                self._fetching = False
                self._ready.append(fetched)
                self._ready_bytes += fetched.num_bytes
                seen.max_ready_bytes = max(seen.max_ready_bytes, self._ready_bytes)
                seen.num_ahead += 1
                self._changed.notify_all()
            if fetched.error is not None:
                return

    def _may_go_on(self) -> bool:
        """Wait until another batch is wanted and there is room for it; False when there never will be."""
        settings = self._owner.settings
        with self._changed:
            while not self._stopped:
                in_bytes = settings.max_bytes is None or self._ready_bytes < settings.max_bytes
                room = not self._ready or (len(self._ready) < settings.num_batches and in_bytes)
                asked_for = self._awaited and not self._ready
                wanted = asked_for or (self._num_fetched < settings.limit() and not self._paused)
                if room and wanted:
                    self._fetching = True
                    return True
                self._changed.wait()
        return False

    def pause(self, *, paused: bool) -> None:
        """Fetch nothing ahead for a while; what is being fetched is waited for."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (paused and self._fetching), JOIN_TIMEOUT_S)

    def close(self) -> None:
        """Stop the thread and forget what is ready; the pass has ended."""
        self.ended = True
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)
            self._thread = None


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in dataclasses too."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    apply_to_collection(batch, Tensor, note)
    return found


def _random_state() -> tuple[Any, ...]:
    generator: dict[str, Any] = cast(Any, np.random).get_state(legacy=False)
    numbers = generator["state"]
    return torch.get_rng_state(), random.getstate(), numbers["pos"], numbers["key"].tobytes()


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return torch.equal(one[0], other[0]) and one[1:] == other[1:]
