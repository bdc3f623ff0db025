"""PrefetchLoader: order, look-ahead, states, random draws, failures, attributes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.callbacks import data_preload
from lightning_eff.callbacks.data_preload import PrefetchLoader, StatefulPrefetchLoader
from lightning_eff.core.dataloaders import is_stateful

# torchdata 0.11 on torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Source:
    """Yields tensors, and remembers how far it was asked."""

    def __init__(self, length: int, fails_at: int = -1) -> None:
        self.length = length
        self.fails_at = fails_at
        self.num_asked = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            self.num_asked += 1
            if index == self.fails_at:
                raise OSError(f"no sample {index}")
            yield torch.tensor([index])


def prefetched(source: Any, num_ahead: int = 2, **settings: Any) -> PrefetchLoader:
    kind = StatefulPrefetchLoader if is_stateful(source) else PrefetchLoader
    return kind(source, num_ahead=num_ahead, **settings)


@pytest.mark.parametrize(("num_ahead", "length"), [(0, 2), (1, 0), (3, 1), (3, 9)])
def test_every_batch_comes_once_and_in_order_in_every_pass(num_ahead: int, length: int) -> None:
    loader = prefetched(Source(length), num_ahead)
    for _ in range(3):
        assert [int(batch) for batch in loader] == list(range(length))
    assert len(loader) == length


def test_it_fetches_no_more_ahead_than_the_epoch_takes_and_continues_on_request() -> None:
    source = Source(20)
    loader = prefetched(source, 3, limit=lambda: 6)
    batches, asked = iter(loader), list[int]()
    for index in range(8):
        assert int(next(batches)) == index
        asked.append(source.num_asked)
    assert asked == [4, 5, 6, 6, 6, 6, 7, 8], "a stream that another epoch continues has lost nothing"
    loader.close()
    assert [int(batch) for batch in loader] == list(range(20)), "a new pass begins anew"


def test_a_failure_comes_where_its_batch_would_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, seen = prefetched(Source(9, fails_at=5), 3), list[int]()
    with pytest.raises(OSError, match="no sample 5"):
        seen.extend(int(batch) for batch in loader)
    assert seen == [0, 1, 2, 3, 4]

    def move(batch: Any, device: Any) -> Any:
        if int(batch) == 4:
            raise TypeError("cannot be moved")
        return batch.as_subclass(OnDevice)

    on_fake_device(monkeypatch, move)
    loader, seen = prefetched(Source(9), 3, device=torch.device("cuda", 0)), list[int]()
    with pytest.raises(TypeError, match="cannot be moved"):
        seen.extend(int(batch) for batch in loader)
    assert seen == [0, 1, 2, 3]


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
    for other in (prefetched(make(), 3), make()):
        other.load_state_dict(state)
        assert [int(batch[0]) for batch in other] == list(range(5, 12))


def test_attributes_are_read_from_the_loader_and_set_on_it() -> None:
    plain = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    loader = copy.copy(prefetched(plain))
    loader.worker_init_fn = len
    assert (loader.batch_sampler, plain.worker_init_fn) == (plain.batch_sampler, len)
    assert not isinstance(loader, _Stateful)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = loader.nonsense


class OnDevice(torch.Tensor):
    """Notes the stream that uses it."""

    def record_stream(self, stream: Any) -> None:
        stream.uses(int(self))


def on_fake_device(monkeypatch: pytest.MonkeyPatch, move: Any) -> Mock:
    """Return what notes the calls of the `main` and the `side` stream of a GPU that is not there."""
    streams = Mock()
    streams.side.record_event.side_effect = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.side)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.main)
    monkeypatch.setattr(data_preload, "move_data_to_device", move)
    return streams


def test_batches_are_copied_on_a_stream_of_their_own_and_waited_for_by_the_one_that_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = on_fake_device(monkeypatch, lambda batch, device: batch.as_subclass(OnDevice))
    loader = prefetched(Source(2), 1, device=torch.device("cuda", 0))
    assert [int(batch) for batch in loader] == [0, 1]
    assert streams.mock_calls == [
        call.side.record_event(), call.side.record_event(),
        call.main.wait_event(1), call.main.uses(0), call.main.wait_event(2), call.main.uses(1),
    ]  # fmt: skip
