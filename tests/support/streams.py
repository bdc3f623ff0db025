"""A mock of CUDA's streams on a CPU: which stream a copy is started on, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_eff.core import host_offload


class Event:
    """Is recorded on a stream after some of its copies."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.after = stream, stream.copies


class Stream:
    """Notes events as CUDA's does; `waited` is how many copies of each other stream it has waited for."""

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
    """Notes which stream a copy is started on; the main stream is the current one outside of a context."""

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


@contextmanager
def streams_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Give the CPU streams, for as long as the context lasts."""
    made = Streams()
    monkeypatch.setattr(host_offload, "STREAMED", ("cpu",))
    monkeypatch.setattr("torch.cuda.Stream", lambda _: made.side)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: made.current)
    monkeypatch.setattr("torch.cuda.stream", made.on)
    with made:
        yield made
