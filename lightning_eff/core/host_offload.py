"""Offload the inputs of recomputed blocks to pinned host memory, on a CUDA stream of its own.

The copy to the host overlaps the next block's forward, and the copy back of one block the recomputation of
the block after it. What keeps the copies right, on two streams:

- A stream waits by events for what the other one has to have done, and the memory of a copy is held until
  the main stream has waited for it: no `record_stream`, by which memory is freed at an unknown time.
  At most two copies are in flight.
- The main stream is asked for outside of `with torch.cuda.stream(...)`, where it would be the other one.
- All copies, in both directions, are on one stream, so that host memory may be used again at once.
- Pinned memory is one slab, since each allocation of it synchronizes the device: it grows in the first step
  and is used again in the steps after it.

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
"""Types of devices whose copies run on a stream."""
MAX_IN_FLIGHT = 2
"""Copies for which the main stream has not waited."""
ALIGNMENT = 512


@dataclass(eq=False)
class _OnHost:
    """One tensor on the host, and its copy on the device while that is awaited."""

    host: Tensor
    device: torch.device
    back: tuple[Tensor, Any] | None = None
    """The copy, and the event of its end."""


class CopyStream:
    """Copies between a device and pinned memory beside the main stream, at most two of them at once.

    Raises:
        RuntimeError: A tensor was changed in place while it was copied, which autograd does not detect then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)
        self._in_flight: deque[tuple[Tensor, int, Any]] = deque()

    def to_host(self, tensor: Tensor, host: Tensor) -> None:
        """Start to copy a tensor of the main stream, which its owner may free at once."""
        self._start(tensor, host, tensor)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """Start to copy a tensor back; return it with the event that the main stream must `wait` for."""
        # Memory of the main stream, which may still be using what was there before.
        back = torch.empty_like(host, device=self._device)
        return back, self._start(host, back, back)

    def wait(self, done: Any) -> None:
        """Let the main stream wait for a copy, and so for all that were started before it."""
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


class PinnedSlab:
    """Pinned host memory that grows as needed and is used again after `rewind`.

    It grows by a quarter, or by one tensor where that is more, in powers of two: torch rounds pinned memory
    up to one, so that less would not save anything.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk = self._used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def rewind(self) -> None:
        """Use the memory again from its beginning; nothing in it is needed any more."""
        self._chunk = self._used_bytes = 0

    def take(self, like: Tensor) -> Tensor:
        """Return memory for a tensor of the same shape, strides (if it is dense) and dtype."""
        num_bytes = -(-like.nbytes // ALIGNMENT) * ALIGNMENT
        while self._chunk < len(self._chunks) and (
            self._used_bytes + num_bytes > self._chunks[self._chunk].nbytes
        ):
            self._chunk, self._used_bytes = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            quarter = 1 << (self.num_bytes // 4).bit_length() >> 1
            size, pinned = max(1 << (num_bytes - 1).bit_length(), quarter), torch.cuda.is_available()
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        free = self._chunks[self._chunk][self._used_bytes :]
        taken = free[: like.numel() * like.element_size()].view(like.dtype)
        self._used_bytes += num_bytes
        return taken.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


@dataclass(eq=False)
class HostOffload:
    """Moves tensors that autograd saves to the host, and back in the opposite order."""

    observers: ClassVar[list[Callable[[Tensor], object]]] = []
    """Called with every tensor that is now on the host: for forecasts of what a device would hold."""

    moved_bytes: int = field(default=0, init=False)
    slab: PinnedSlab = field(default_factory=PinnedSlab, init=False)
    _on_host: weakref.WeakSet[_OnHost] = field(default_factory=weakref.WeakSet, init=False)
    _waiting: list[weakref.ref[_OnHost]] = field(default_factory=list, init=False)
    _stream: CopyStream | None = field(default=None, init=False)

    def pack(self, tensor: Tensor) -> _OnHost | Tensor:
        """Return a tensor that autograd saves as one on the host."""
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor  # masks and positions are small, and shared by all blocks
        self.moved_bytes += tensor.nbytes
        if tensor.device.type in STREAMED:
            if not self._on_host:
                self.slab.rewind()
            self._stream = self._stream or CopyStream(tensor.device)
            host = self.slab.take(tensor)
            self._stream.to_host(tensor.detach(), host)
        else:
            host = tensor.detach().to("cpu", copy=True)
            for observe in HostOffload.observers:
                observe(host)
        packed = _OnHost(host, tensor.device)
        self._on_host.add(packed)
        self._waiting = [reference for reference in self._waiting if reference() is not None]
        self._waiting.append(weakref.ref(packed))
        return packed

    def unpack(self, packed: _OnHost | Tensor) -> Tensor:
        """Return it on its device, and begin to copy the one that the backward pass needs next."""
        if isinstance(packed, Tensor):
            return packed
        (back, done), packed.back = self._fetch(packed), None
        if self._stream is not None:
            self._stream.wait(done)
        # Prefetch what was packed before it: the backward pass goes in the opposite direction.
        while self._waiting and self._waiting.pop()() is not packed:
            pass
        previous = self._waiting[-1]() if self._waiting else None
        if previous is not None:
            self._fetch(previous)
        return back

    def close(self) -> None:
        """Free the slab, as soon as nothing is left in it; a later `pack` makes another one."""
        self.slab = PinnedSlab()

    def _fetch(self, packed: _OnHost) -> tuple[Tensor, Any]:
        """Start to copy a tensor back, if that is not done yet, without waiting for it."""
        if packed.back is None and self._stream is not None:
            packed.back = self._stream.to_device(packed.host)
        elif packed.back is None:
            packed.back = packed.host.to(packed.device, copy=True), None
        return packed.back
