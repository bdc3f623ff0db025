"""Offloading to the host: the order of waits and the lifetime of tensors, on a mock of streams."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.core import host_offload
from lightning_eff.core.host_offload import MAX_IN_FLIGHT, CopyStream, HostOffload

CPU = torch.device("cpu")


class Event:
    """An event of CUDA: it marks the number of copies that its stream has started."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.after = stream, stream.copies


class Stream:
    """Logs waits; `waited` has the number of copies of each other stream that were waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.copies = 0
        self.waited: dict[str, int] = {}

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.stream.name}")
        self.waited[event.stream.name] = max(self.waited.get(event.stream.name, 0), event.after)


class Streams(TorchDispatchMode):
    """Logs copies on the side stream; outside of a context the main stream is the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.main, self.side = Stream("main", self.log), Stream("side", self.log)
        self.current = self.main

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self.current is self.side:
            self.side.copies += 1
            self.log.append("side copies")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Replace the streams of CUDA, and let the CPU use them."""
    made = Streams()
    monkeypatch.setattr(host_offload, "STREAMED", ("cpu",))
    monkeypatch.setattr("torch.cuda.Stream", lambda _: made.side)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: made.current)
    monkeypatch.setattr("torch.cuda.stream", made.on)
    with made:
        yield made


START = ["side waits for main", "side copies"]


def test_a_copy_waits_for_its_source_and_the_third_one_for_the_first(streams: Streams) -> None:
    stream = CopyStream(CPU)
    for _ in range(4):
        stream.to_host(torch.ones(3), torch.empty(3))
    assert streams.log == [*START * 3, "main waits for side", *START, "main waits for side"]
    assert MAX_IN_FLIGHT == 2
    assert streams.main.waited["side"] == 2
    assert len(stream._in_flight) == 2


def test_a_copied_tensor_is_held_until_the_main_stream_has_waited(streams: Streams) -> None:
    stream = CopyStream(CPU)
    tensor = torch.ones(3)
    held = weakref.ref(tensor)
    stream.to_host(tensor, torch.empty(3))
    del tensor
    assert held() is not None, "the copy may still run"
    _, done = stream.to_device(torch.ones(3))
    assert held() is not None
    stream.wait(done)
    assert streams.main.waited["side"] == 2
    assert held() is None, "the wait for a later copy on the same stream is one for this copy"
    stream.wait(done)


def test_a_change_in_place_during_a_copy_is_an_error(streams: Streams) -> None:
    stream = CopyStream(CPU)
    changed = torch.ones(3)
    stream.to_host(changed, torch.empty(3))
    changed.add_(1)
    _, done = stream.to_device(torch.ones(3))
    with pytest.raises(RuntimeError, match="changed in place while it was copied"):
        stream.wait(done)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def steps(policy: str | None) -> tuple[list[Tensor], HostOffload | None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    blocks = recompute(model, policy=policy) if policy else {}
    host = next(iter(blocks.values()))._host if blocks else None
    found: list[Tensor] = []
    for rows in (2, 4, 3):
        x = torch.randn(rows, 64, requires_grad=True)
        loss = model(x).square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        assert x.grad is not None
        found.append(x.grad)
        del loss
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)], host


def test_blocks_train_alike_on_streams(streams: Streams) -> None:
    expected, _ = steps(None)
    found, host = steps("offload")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert host is not None
    assert host.moved_bytes == (2 + 4 + 3) * 5 * 64 * 4
    assert streams.side.copies == 3 * 5 * (1 + 2), "each once to the host, and back once a backward pass"
    assert streams.main.waited["side"] == streams.side.copies, "each copy is waited for"
