"""Copies of weights on the device: those of the block that computes, and of the next one.

    forward     block 0   block 1   ...   block L      copies: 0 1, 1 2, ..., L
    backward    block L   ...   block 1   block 0              L L-1, ..., 1 0, 0

When a block begins, all copies but its own and the next one's are dropped, and the next one's are started,
which run while the block computes. What comes next is what came next in the pass before, and in the first
pass the order of names. The last block of a forward pass keeps its copies for the backward pass, and the end
of that drops all. No copy is used in a second forward pass, since weights may have been changed meanwhile.

A pass ends where its direction changes, or where a block is called again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.callbacks._offload_frozen.host_weights import CPU, HostWeights, storage_key
from lightning_eff.core import host_offload
from lightning_eff.core.host_offload import CopyStream, HostOffload


@dataclass(eq=False)
class Copies:
    """Copies of a block's weights."""

    tensors: list[Tensor]
    done: Any
    """The event of their end; None where copies do not run on a stream."""
    versions: list[int]
    """Of the parameters that they are copies of."""
    index_of: dict[int, int]
    """Index of a weight by the memory of its copy."""


class Order:
    """Which block comes after which; learned in every pass."""

    def __init__(self, blocks: Sequence[HostWeights]) -> None:
        backwards = list(reversed(blocks))
        self._next: dict[tuple[bool, HostWeights], HostWeights | None] = {
            (is_backward, block): after
            for is_backward, order in ((False, blocks), (True, backwards))
            for block, after in itertools.zip_longest(order, order[1:])
        }
        self._is_backward = False
        self._path: dict[HostWeights, None] = {}
        """Blocks of this pass so far, in their order."""

    def step(self, block: HostWeights, *, is_backward: bool) -> tuple[HostWeights | None, bool]:
        """Return the next block, or None at the end, and whether a new pass has begun."""
        is_new = is_backward != self._is_backward or block in self._path
        last = next(reversed(self._path), None)
        if last is not None:
            self._next[self._is_backward, last] = None if is_new else block
        if is_new:
            self._path.clear()
        self._is_backward = is_backward
        self._path[block] = None
        return self._next[is_backward, block], is_new


class Fetcher:
    """Brings the weights of blocks to the device, one block ahead."""

    def __init__(self, blocks: Sequence[HostWeights]) -> None:
        self.blocks = list(blocks)
        self.device = CPU
        """Of the last copies."""
        self.moved_bytes = 0
        self.peak_bytes = 0
        """Maximum of the copies' bytes."""
        self.are_casts_kept = False
        """Whether a block was seen whose weights autocast casts, and autograd keeps."""
        self._order = Order(self.blocks)
        self._copies: dict[HostWeights, Copies] = {}
        self._in_forward: list[HostWeights] = []
        self._in_backward: HostWeights | None = None
        self._backwards: set[int] = set()
        """Graph tasks of autograd in which a block was opened."""
        self._streams: dict[torch.device, CopyStream] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is on a device: a copy of the model begins without it."""
        empty = {"_copies": {}, "_in_forward": [], "_in_backward": None, "_backwards": set(), "_streams": {}}
        return self.__dict__ | empty

    def enter_forward(self, block: HostWeights, device: torch.device) -> None:
        """Open a block for its forward pass, with inputs on that device."""
        self._backwards.clear()  # an exception may have ended a backward pass
        self._leave_backward()
        self.device = device
        if block not in self._in_forward:
            self._open(block, is_backward=False)
        self._in_forward.append(block)

    def leave_forward(self, block: HostWeights) -> None:
        """Close a block after its forward pass; without gradients nothing needs its copies any more."""
        self._in_forward.remove(block)
        if block not in self._in_forward:
            block.close()
            if not torch.is_grad_enabled():
                self._copies.pop(block, None)

    def enter_backward(self, block: HostWeights) -> None:
        """Open a block in a backward pass, until that comes to another block or ends."""
        if block is self._in_backward or block in self._in_forward:
            return
        self._leave_backward()
        self._open(block, is_backward=True)
        self._in_backward = block
        task = torch._C._current_graph_task_id()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if task not in self._backwards:
            self._backwards.add(task)
            variable: Any = torch.autograd.Variable
            variable._execution_engine.queue_callback(  # noqa: SLF001
                functools.partial(self._end_backward, task)
            )

    def copies_of(self, block: HostWeights) -> Copies:
        """Return a block's copies, new ones if it has none."""
        return self._copies.get(block) or self._fetched(block)

    def close(self) -> None:
        """Close all blocks and drop all copies."""
        for block in self.blocks:
            block.close()
        self._in_forward, self._in_backward = [], None
        self._backwards.clear()
        self._copies.clear()

    def _open(self, block: HostWeights, *, is_backward: bool) -> None:
        upcoming, is_new = self._order.step(block, is_backward=is_backward)
        open_now = self._in_forward
        if is_new and not is_backward:
            self._keep(open_now)
            self._observe_hosts()
        else:
            self._keep([*open_now, block, *([upcoming] if upcoming is not None else [])])
        # Copies are made outside of inference mode, whose tensors autograd rejects later.
        with torch.inference_mode(mode=False), torch.no_grad():
            copies = self._copies.get(block)
            if copies is None or copies.versions != block.versions:
                copies = self._start(block)
            if copies.done is not None:
                self._streams[self.device].wait(copies.done)
            block.open(copies.tensors)
            if upcoming is not None and upcoming not in self._copies:
                self._start(upcoming)

    def _keep(self, blocks: Sequence[HostWeights]) -> None:
        self._copies = {block: copies for block, copies in self._copies.items() if block in blocks}

    def _start(self, block: HostWeights) -> Copies:
        """Start the copies of a block."""
        copies = self._copies[block] = self._fetched(block)
        held = sum(tensor.nbytes for each in self._copies.values() for tensor in each.tensors)
        self.peak_bytes = max(self.peak_bytes, held)
        return copies

    def _fetched(self, block: HostWeights) -> Copies:
        hosts, device, done = block.to_host(self.device), self.device, None
        if device.type in host_offload.STREAMED:
            if device not in self._streams:
                self._streams[device] = CopyStream(device)
            tensors, done = self._streams[device].all_to_device(hosts)
        else:
            tensors = [host.to(device, copy=True) for host in hosts]
        self.moved_bytes += block.num_bytes
        for observe in HostOffload.weight_observers:
            for tensor in tensors:
                observe(tensor)
        index_of = {storage_key(tensor): index for index, tensor in enumerate(tensors)}
        return Copies(tensors, done, block.versions, index_of)

    def _observe_hosts(self) -> None:
        for observe in HostOffload.observers:
            for block in self.blocks:
                for host in block.hosts:
                    observe(host)

    def _leave_backward(self) -> None:
        if self._in_backward is not None:
            self._in_backward.close()
            self._in_backward = None

    def _end_backward(self, task: int) -> None:
        self._backwards.discard(task)
        if not self._backwards:
            self._leave_backward()
            self._keep(self._in_forward)
