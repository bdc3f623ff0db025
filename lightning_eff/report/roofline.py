"""How long a step would take by arithmetic: the operations and bytes of each call at a device's rates.

No clock is asked: a call takes its floating-point operations at the rate of its format or its bytes at the
memory's, whichever is longer. What one call hides behind another, caches and compiled code are left out, so a
figure alone says little. Two figures of the same model are worth comparing: that is what a technique costs.

Source: Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels.devices import Device
from lightning_eff.report.flops import flops_of

PRODUCT_SHARE, MEMORY_SHARE = 0.7, 0.8
"""What large products and plain passes over memory reach of a GPU's stated peaks."""
BUS_BYTES_PER_S = 25e9
"""Between a GPU's memory and the host's: PCIe 4.0 with 16 lanes, pinned."""
HOST_BYTES_PER_S = 50e9
"""Of a server's memory, for what its processor updates."""
LAUNCH_S = 5e-6
"""Time in which Python asks a GPU for one operation; the GPU works meanwhile."""
CALL_S = 2e-6
"""Time that a CPU takes for an operation beside its work."""
MEASURED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Formats whose products are timed on a CPU: some processors only emulate them."""
ROWS_ONLY = ("embedding", "index", "index_select", "gather")
"""Operations that read of their first argument what they return, and not all of it."""
FREE = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "_local_scalar_dense")


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a step.

    Args:
        name: As torch calls it.
        flops: Floating-point operations, 0 where only bytes matter.
        num_bytes: Read and written.
        dtype: Of its first result.
        storages: What it touched, as whoever recorded it numbers them.
    """

    name: str
    flops: int
    num_bytes: int
    dtype: torch.dtype
    storages: tuple[int, ...] = ()


def call_of(func: Any, args: Any, kwargs: Any, out: Any, number_of: Callable[[Tensor], int]) -> Call | None:
    """Return what an operation costs; None where it only looks at memory in another way.

    Args:
        func: The operation, as a dispatch mode sees it.
        args: Its arguments.
        kwargs: Its named arguments.
        out: What it returned.
        number_of: Numbers a tensor's storage.

    Example:
        >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
        >>> call_of(torch.ops.aten.mm.default, (a, b), {}, a @ b, lambda tensor: 0)
        Call(name='mm', flops=48, num_bytes=104, dtype=torch.float32, storages=(0, 0, 0))
    """
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if getattr(func, "is_view", False) or name in FREE:
        return None
    results = list(_tensors((out,)))
    given = list(_tensors((*args, *kwargs.values())))
    touched = [*(results if name in ROWS_ONLY else given), *results]
    first = next(iter(results or given), None)
    return Call(
        name,
        flops_of(func, args, kwargs, out),
        sum(tensor.nbytes for tensor in touched if tensor.layout == torch.strided),
        torch.float32 if first is None else first.dtype,
        tuple(number_of(tensor) for tensor in (*given, *results)),
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield tensors out of arguments, which are no deeper than lists: torch has that for trees, and slow."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass(frozen=True)
class Work:
    """What some batches took.

    Args:
        calls: Their operations.
        on_host: Storages that lie in the host's memory, wherever the model is.
        num_batches: How many there were.
    """

    calls: Sequence[Call]
    on_host: Set[int]
    num_batches: int

    def seconds(self, rates: Rates) -> float:
        """Return the time of a batch, with its share of the optimizer's step."""
        return rates.seconds(self.calls, self.on_host) / max(1, self.num_batches)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device is.

    Args:
        flops_per_s: Operations a second by format.
        bytes_per_s: Of its memory.
        call_s: The least time of one operation.
        is_gpu: Whether operations are asked for while others run, and the host is across a bus.
    """

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    call_s: float
    is_gpu: bool = False

    @classmethod
    def of(cls, device: Device) -> Rates:
        """Take a GPU's from what is stated of it, and measure those of this machine's processor."""
        if not device.capability:
            return _of_this_cpu()
        return cls(
            flops_per_s={dtype: PRODUCT_SHARE * device.peak(dtype) for dtype in MEASURED},
            bytes_per_s=MEMORY_SHARE * device.memory_gbs * 1e9,
            call_s=LAUNCH_S,
            is_gpu=True,
        )

    def seconds(self, calls: Iterable[Call], on_host: Set[int] = frozenset()) -> float:
        """Return the time of some calls.

        Args:
            calls: In any order.
            on_host: Storages that lie in the host's memory, wherever the model is.
        """
        working, count = 0.0, 0
        for call in calls:
            rate = self.flops_per_s.get(call.dtype, self.flops_per_s[torch.float32])
            working += max(call.flops / rate, call.num_bytes / self._bytes_per_s(call, on_host))
            count += 1
        asking = count * self.call_s
        return max(working, asking) if self.is_gpu else working + asking

    def _bytes_per_s(self, call: Call, on_host: Set[int]) -> float:
        if not self.is_gpu or on_host.isdisjoint(call.storages):
            return self.bytes_per_s
        return HOST_BYTES_PER_S if set(call.storages) <= on_host else BUS_BYTES_PER_S


@functools.cache
def _of_this_cpu() -> Rates:
    """Time products of each format and a pass over memory, for a few hundredths of a second."""
    flops = {dtype: 2 * 384**3 / _least_s(_product(dtype)) for dtype in MEASURED}
    source, target = torch.rand(1 << 22), torch.empty(1 << 22)
    copied = 2 * source.nbytes / _least_s(lambda: target.copy_(source))
    return Rates(flops_per_s=flops, bytes_per_s=copied, call_s=CALL_S)


def _product(dtype: torch.dtype) -> Callable[[], Any]:
    one = torch.rand(384, 384).to(dtype)
    return lambda: one @ one


def _least_s(work: Callable[[], Any]) -> float:
    work()
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
