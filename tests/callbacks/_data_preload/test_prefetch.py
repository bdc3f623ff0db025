"""PrefetchLoader: order, limits in batches and bytes, states, random draws, failures, attributes."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.callbacks._data_preload import prefetch_iterator
from lightning_eff.callbacks._data_preload.prefetch import PrefetchLoader, StatefulPrefetchLoader, is_stateful
from lightning_eff.callbacks._data_preload.prefetch_iterator import PrefetchSettings

# torchdata 0.11 on torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Source:
    """Yields tensors of 8 bytes, and remembers how far it was asked and by whom."""

    def __init__(self, length: int, fails_at: int = -1) -> None:
        self.length = length
        self.fails_at = fails_at
        self.num_asked = 0
        self.threads: list[str] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            self.num_asked += 1
            self.threads.append(threading.current_thread().name)
            if index == self.fails_at:
                msg = f"no sample {index}"
                raise OSError(msg)
            yield torch.tensor([index])


def prefetched(source: Any, num_batches: int = 2, **settings: Any) -> PrefetchLoader:
    keywords: dict[str, Any] = {"max_bytes": None, "device": None, "limit": lambda: float("inf")}
    kind = StatefulPrefetchLoader if is_stateful(source) else PrefetchLoader
    return kind(source, PrefetchSettings(num_batches=num_batches, **(keywords | settings)))


def until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.002)
    pytest.fail("it did not come about in a second")


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning_eff prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not prefetchers())


@pytest.mark.parametrize("num_batches", [0, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 9])
def test_every_batch_comes_once_and_in_order_in_every_pass(num_batches: int, length: int) -> None:
    loader = prefetched(Source(length), num_batches)
    for _ in range(3):
        assert [int(batch) for batch in loader] == list(range(length))
    assert loader.stats.num_taken == 3 * length
    assert len(loader) == length


def test_it_runs_so_many_batches_ahead_in_a_thread_and_not_further() -> None:
    source = Source(20)
    loader = prefetched(source, 3)
    batches = iter(loader)
    assert source.num_asked == 0, "the first batch is fetched when it is asked for"
    next(batches)
    next(batches)
    assert source.num_asked == 2
    next(batches)
    until(lambda: source.num_asked == 6)
    time.sleep(0.02)
    assert source.num_asked == 6
    assert set(source.threads[2:]) == {"lightning_eff prefetch"}
    loader.close()


def test_it_holds_no_more_bytes_than_it_may_and_one_batch_whatever_its_size() -> None:
    for max_bytes, ready in ((16, 2), (1, 1)):
        source = Source(20)
        loader = prefetched(source, 9, max_bytes=max_bytes)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        until(lambda s=source, r=ready: s.num_asked == 3 + r)
        time.sleep(0.02)
        assert source.num_asked == 3 + ready
        loader.close()
        assert loader.stats.max_ready_bytes == 8 * ready


def test_it_stops_at_the_limit_and_goes_on_when_asked_all_the_same() -> None:
    source = Source(20)
    loader = prefetched(source, 4, limit=lambda: 5)
    batches = iter(loader)
    assert [int(next(batches)) for _ in range(5)] == [0, 1, 2, 3, 4]
    time.sleep(0.02)
    assert source.num_asked == 5, "a stream that another epoch goes on with has lost nothing"
    assert int(next(batches)) == 5
    loader.close()


def test_a_failure_comes_where_its_batch_would_have_come() -> None:
    loader = prefetched(Source(9, fails_at=5), 3)
    seen: list[int] = []
    with pytest.raises(OSError, match="no sample 5"):
        seen.extend(int(batch) for batch in loader)
    assert loader.stats.num_taken == 5


def test_a_batch_that_cannot_be_moved_fails_where_it_would_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    real = prefetch_iterator.PrefetchIterator._fetch_and_move

    def fetch_and_move(self: Any) -> Any:
        fetched = real(self)
        if self._num_fetched == 5:
            msg = "cannot be moved"
            raise TypeError(msg)
        return fetched

    monkeypatch.setattr(prefetch_iterator.PrefetchIterator, "_fetch_and_move", fetch_and_move)
    loader, seen = prefetched(Source(9), 3), list[int]()
    with pytest.raises(TypeError, match="cannot be moved"):
        seen.extend(int(batch) for batch in loader)
    assert seen == [0, 1, 2, 3]


def test_stopping_in_the_middle_leaves_no_thread_and_a_new_pass_begins_anew() -> None:
    loader = prefetched(Source(9), 3)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    assert prefetchers()
    loader.close()
    assert [int(batch) for batch in loader] == list(range(9))
    assert not prefetchers()


class Draws(Source):
    """Draws a random number for each batch."""

    def __init__(self, draw: Any) -> None:
        super().__init__(6)
        self.draw = draw

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in super().__iter__():
            self.draw()
            yield batch


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.rand, random.random])
def test_samples_that_draw_random_numbers_are_fetched_when_they_are_asked_for(draw: Any) -> None:
    source = Draws(draw)
    loader = prefetched(source, 3)
    assert [int(batch) for batch in loader] == list(range(6))
    assert loader.stats.draws
    assert "lightning_eff prefetch" not in source.threads


def test_beside_the_training_everyone_has_an_iterator_of_the_loaders_own() -> None:
    loader = prefetched(Source(9), 3)
    batches = iter(loader)
    assert [int(next(batches)) for _ in range(4)] == [0, 1, 2, 3]
    assert [int(batch) for batch in loader] == list(range(9))
    assert [int(batch) for batch in batches] == [4, 5, 6, 7, 8]
    assert next(batches, "end") == "end"
    assert next(batches, "end") == "end"
    loader.end()
    assert [int(batch) for batch in loader] == list(range(9))
    assert loader.stats.num_taken == 9


def test_a_pause_waits_for_what_is_being_fetched_and_fetches_no_more() -> None:
    source = Source(20)
    loader = prefetched(source, 2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.pause()
    asked = source.num_asked
    next(batches)
    time.sleep(0.02)
    assert source.num_asked == asked
    loader.pause(paused=False)
    until(lambda: source.num_asked > asked)
    loader.close()


@dataclasses.dataclass
class Pair:
    """A batch that is no container."""

    x: torch.Tensor
    y: list[torch.Tensor]


def test_bytes_of_every_kind_of_batch_count() -> None:
    batches = [Pair(torch.zeros(4), [torch.zeros(2)]) for _ in range(9)]
    loader = prefetched(batches, 8, max_bytes=1)
    assert len(list(loader)) == 9
    assert loader.stats.max_ready_bytes == 24


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loaders_state_is_that_of_the_last_batch_handed_out(num_workers: int) -> None:
    def make() -> StatefulDataLoader:
        return StatefulDataLoader(TensorDataset(torch.arange(12)), batch_size=1, num_workers=num_workers)

    loader = prefetched(make(), 3)
    assert isinstance(loader, StatefulPrefetchLoader)
    assert isinstance(loader, _Stateful)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    loader.close()
    other = prefetched(make(), 3)
    other.load_state_dict(state)
    assert [int(batch[0]) for batch in other] == list(range(5, 12))
    plain = make()
    plain.load_state_dict(state)
    assert [int(batch[0]) for batch in plain] == list(range(5, 12))


def test_before_the_first_batch_the_state_is_the_loaders_own() -> None:
    own = SimpleNamespace(state_dict=lambda: {"at": 3}, load_state_dict=lambda state: None)
    assert prefetched(own).state_dict() == {"at": 3}


def test_what_is_asked_of_it_its_loader_answers_and_what_is_set_is_set_there() -> None:
    plain = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    loader = prefetched(plain)
    assert loader.sampler is plain.sampler
    assert loader.batch_sampler is plain.batch_sampler
    assert loader.dataset is plain.dataset
    assert loader._iterator is None
    assert not isinstance(loader, _Stateful)
    loader.worker_init_fn = len
    assert plain.worker_init_fn is len
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = loader.nonsense
    with pytest.raises(TypeError):
        len(prefetched(DataLoader(Stream())))
    with pytest.raises(AttributeError):
        PrefetchLoader.__new__(PrefetchLoader).__getattr__("anything")


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("own_workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_other_workers_draw_from_the_random_state_what_the_loaders_own_would(
    own_workers: int, persistent: bool
) -> None:
    """Also where something draws between the iterator and its first batch."""
    draws = []
    for tune in (False, True):
        torch.manual_seed(0)
        plain = DataLoader(TensorDataset(torch.arange(6)), shuffle=True, num_workers=own_workers)
        tuned = copy.copy(plain) if tune else None
        if tuned is not None:
            object.__setattr__(tuned, "num_workers", 1)
            object.__setattr__(tuned, "prefetch_factor", 2)
            object.__setattr__(tuned, "persistent_workers", persistent)
        keywords: dict[str, Any] = {"max_bytes": None, "device": None, "limit": lambda: float("inf")}
        loader = PrefetchLoader(plain, PrefetchSettings(num_batches=0, **keywords), tuned)
        seen = []
        for _ in range(3):
            batches = iter(loader)
            between = torch.rand(1).item()
            seen.append(([int(batch[0]) for batch in batches], between, torch.rand(1).item()))
        loader.end()
        draws.append(seen)
    assert draws[0] == draws[1]


class FakeStream:
    """Notes what is done on a stream, without a GPU."""

    log: ClassVar[list[Any]] = []

    def __init__(self, name: Any = "side") -> None:
        self.name = str(name)

    def record_event(self) -> str:
        self.log.append(("record", self.name))
        return f"event {len(self.log)}"

    def wait_event(self, event: str) -> None:
        self.log.append(("wait", self.name, event))

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class OnDevice(torch.Tensor):
    """Notes which stream uses it."""

    def record_stream(self, stream: FakeStream) -> None:
        stream.log.append(("uses", stream.name, int(self)))


def test_batches_are_copied_on_a_stream_of_their_own_and_waited_for_by_the_one_that_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeStream, "log", [])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("main"))
    monkeypatch.setattr(
        "lightning.fabric.utilities.apply_func.move_data_to_device",
        lambda batch, device: batch.as_subclass(OnDevice),
    )
    loader = prefetched(Source(2), 2, device=torch.device("cuda", 0))
    assert [int(batch) for batch in loader] == [0, 1]
    assert FakeStream.log == [
        ("record", f"{torch.device('cuda', 0)}"),
        ("wait", "main", "event 1"),
        ("uses", "main", 0),
        ("record", f"{torch.device('cuda', 0)}"),
        ("wait", "main", "event 4"),
        ("uses", "main", 1),
    ]


def test_the_end_of_a_pass_does_not_wait_for_ever_for_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    release, waited = threading.Event(), list[int]()

    class Stuck(Source):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for batch in super().__iter__():
                if int(batch) == 3:
                    release.wait(30)
                    waited.append(3)
                yield batch

    monkeypatch.setattr(prefetch_iterator, "JOIN_TIMEOUT_S", 0.01)
    loader = prefetched(Stuck(9), 3)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.close()
    assert waited == []
    release.set()
