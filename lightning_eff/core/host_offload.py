"""Offload the inputs of recomputed blocks to pinned host memory, on a separate CUDA stream.

`callbacks/gradient_checkpointing` uses it with `policy=offload`. The copy to the host overlaps the next
block's forward. The copy back overlaps the recomputation of the block that the backward pass handles before.
Rules that keep the copies correct on two streams:

- A stream waits on events for the other stream's work. A copy's memory is held until the main stream has
  waited for it. `record_stream` is not used, because it frees memory at an unknown time. At most two copies
  are in flight.
- The main stream is looked up outside of `with torch.cuda.stream(...)`, where it would be the other stream.
- torch allocates the pinned memory and caches freed blocks. So only the first step allocates, which
  synchronizes the device, and memory is reused once the copies from and to it are done.

The order of waits is tested with a mock of CUDA's streams. On an H100 the copies did not overlap: 3 times
the time of recomputation alone. On a CPU they are plain copies, which save and change nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

STREAMED = ("cuda",)
"""Types of devices whose copies run on a separate stream."""
MAX_IN_FLIGHT = 2
"""Largest number of copies for which the main stream has not waited."""


@dataclass(eq=False)
class _OnHost:
    """One tensor on the host, and its copy on the device while that is awaited."""

    host: Tensor
    device: torch.device
    back: tuple[Tensor, Any] | None = None
    """The copy, and the event at its end."""


class CopyStream:
    """Copies between a device and pinned memory alongside the main stream, at most two at once.

    Raises:
        RuntimeError: A tensor was changed in place while it was copied, which autograd cannot detect here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)
        self._in_flight: deque[tuple[Tensor, int, Any]] = deque()

    def to_host(self, tensor: Tensor, host: Tensor) -> None:
        """Start copying a tensor of the main stream; its owner may free it at once."""
        self._start(tensor, host, tensor)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """Start copying a tensor back; return it with an event, which must be passed to `wait` before use."""
        # Allocated on the main stream, which may still be using the previous content of this memory.
        back = torch.empty_like(host, device=self._device)
        return back, self._start(host, back, back)

    def wait(self, done: Any) -> None:
        """Make the main stream wait for a copy, and thus for all earlier ones."""
        torch.cuda.current_stream(self._device).wait_event(done)
        while any(event is done for _, _, event in self._in_flight):
            tensor, version, _ = self._in_flight.popleft()
            if tensor._version != version:  # noqa: SLF001
                raise RuntimeError(
                    "the input of an offloaded block was changed in place while it was copied to the host"
                )

    def _start(self, source: Tensor, target: Tensor, on_device: Tensor) -> Any:
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = self._stream.record_event()
        self._in_flight.append((on_device, on_device._version, done))  # noqa: SLF001
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self.wait(self._in_flight[0][2])
        return done


@dataclass(eq=False)
class HostOffload:
    """Moves tensors that autograd saves to the host, and back in the opposite order."""

    observers: ClassVar[list[Callable[[Tensor], object]]] = []
    """Called with every tensor moved to the host: forecasts use it for what a device would hold."""

    moved_bytes: int = field(default=0, init=False)
    _waiting: list[weakref.ref[_OnHost]] = field(default_factory=list, init=False)
    _stream: CopyStream | None = field(default=None, init=False)

    def pack(self, tensor: Tensor) -> _OnHost | Tensor:
        """Move a tensor that autograd saves to the host; return its handle."""
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor  # masks and positions are small, and shared by all blocks
        self.moved_bytes += tensor.nbytes
        if tensor.device.type in STREAMED:
            self._stream = self._stream or CopyStream(tensor.device)
            host = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
            self._stream.to_host(tensor.detach(), host)
        else:
            host = tensor.detach().to("cpu", copy=True)
            for observe in HostOffload.observers:
                observe(host)
        packed = _OnHost(host, tensor.device)
        self._waiting = [reference for reference in self._waiting if reference() is not None]
        self._waiting.append(weakref.ref(packed))
        return packed

    def unpack(self, packed: _OnHost | Tensor) -> Tensor:
        """Return a tensor on its device, and start copying the next one that the backward pass needs."""
        if isinstance(packed, Tensor):
            return packed
        (back, done), packed.back = self._fetch(packed), None
        if self._stream is not None:
            self._stream.wait(done)
        # Prefetch the tensor packed before this one: the backward pass runs in the opposite order.
        while self._waiting and self._waiting.pop()() is not packed:
            pass
        previous = self._waiting[-1]() if self._waiting else None
        if previous is not None:
            self._fetch(previous)
        return back

    def _fetch(self, packed: _OnHost) -> tuple[Tensor, Any]:
        """Start copying a tensor back unless that has started already; do not wait for it."""
        if packed.back is None and self._stream is not None:
            packed.back = self._stream.to_device(packed.host)
        elif packed.back is None:
            packed.back = packed.host.to(packed.device, copy=True), None
        return packed.back
