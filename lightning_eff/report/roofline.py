"""Estimate a step's time by arithmetic: FLOPs and bytes of every operation at a device's rates (roofline).

time(op) = max(FLOPs / rate of its dtype, bytes / memory bandwidth). Overlap between operations, caches and
compiled code are not modelled, so an estimate alone means little; the ratio of two estimates of one model
shows what a technique costs.

Source: Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels.devices import Device
from lightning_eff.report.flops import flops_of

MATMUL_EFFICIENCY, MEMORY_EFFICIENCY = 0.7, 0.8
"""Fractions of a GPU's stated peaks that large matrix products and elementwise operations reach."""
BUS_BYTES_PER_S = 25e9
"""Between GPU memory and pinned host memory: PCIe 4.0 x16."""
HOST_BYTES_PER_S = 50e9
"""Host memory bandwidth of a server, for updates on its CPU."""
LAUNCH_S = 5e-6
"""Time to launch one kernel from Python; overlaps with the GPU's work."""
CALL_S = 2e-6
"""Overhead of one operation on a CPU."""
MEASURED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes whose matrix products are timed on a CPU: some processors emulate them."""
ROWS_ONLY = ("embedding", "index", "index_select", "gather")
"""Operations that read only the rows that they return."""
NO_COST = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "_local_scalar_dense")


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a step.

    Args:
        name: Name of the aten operation.
        flops: Floating-point operations, 0 if it has no formula.
        num_bytes: Bytes read and written.
        dtype: Dtype of its first result.
        storages: Indices of the storages that it read or wrote, -1 for one that is not counted.
    """

    name: str
    flops: int
    num_bytes: int
    dtype: torch.dtype
    storages: tuple[int, ...] = ()


def call_of(func: Any, args: Any, kwargs: Any, out: Any, number_of: Callable[[Tensor], int]) -> Call | None:
    """Return the cost of a call that `__torch_dispatch__` got and that returned `out`; None for a view.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its result.
        number_of: Returns the index of a tensor's storage.

    Example:
        >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
        >>> call_of(torch.ops.aten.mm.default, (a, b), {}, a @ b, lambda tensor: 0)
        Call(name='mm', flops=48, num_bytes=104, dtype=torch.float32, storages=(0, 0, 0))
    """
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if getattr(func, "is_view", False) or name in NO_COST:
        return None
    results = list(_tensors((out,)))
    inputs = list(_tensors((*args, *kwargs.values())))
    touched = [*(results if name in ROWS_ONLY else inputs), *results]
    first = next(iter(results or inputs), None)
    return Call(
        name,
        flops_of(func, args, kwargs, out),
        sum(tensor.nbytes for tensor in touched if tensor.layout == torch.strided),
        torch.float32 if first is None else first.dtype,
        tuple(number_of(tensor) for tensor in (*inputs, *results)),
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of arguments, which nest lists at most; `tree_leaves` would be much slower."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass(frozen=True)
class Work:
    """Operations of some batches, optimizer steps included.

    Args:
        calls: The operations.
        on_host: Storages in host memory, whatever the model's device.
        num_batches: Number of batches.
    """

    calls: Sequence[Call]
    on_host: Set[int] = frozenset()
    num_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a device.

    Args:
        flops_per_s: FLOP/s by dtype.
        bytes_per_s: Memory bandwidth.
        call_s: Overhead of one operation.
        is_gpu: Whether launches overlap with work, and host memory is across a bus.
    """

    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    call_s: float
    is_gpu: bool = False

    @classmethod
    def of(cls, device: Device) -> Rates:
        """Return a GPU's rates from its datasheet; measure those of this machine's CPU."""
        if not device.capability:
            return _measure_cpu()
        return cls(
            flops_per_s={dtype: MATMUL_EFFICIENCY * device.peak(dtype) for dtype in MEASURED},
            bytes_per_s=MEMORY_EFFICIENCY * device.memory_gbs * 1e9,
            call_s=LAUNCH_S,
            is_gpu=True,
        )

    def seconds(self, work: Work) -> float:
        """Return the time per batch."""
        work_s = 0.0
        for call in work.calls:
            # Roofline: a call is limited by compute or by memory traffic, whichever takes longer.
            rate = self.flops_per_s.get(call.dtype, self.flops_per_s[torch.float32])
            bytes_per_s = self.bytes_per_s
            if self.is_gpu and not work.on_host.isdisjoint(call.storages):
                bytes_per_s = HOST_BYTES_PER_S if set(call.storages) <= work.on_host else BUS_BYTES_PER_S
            work_s += max(call.flops / rate, call.num_bytes / bytes_per_s)
        launch_s = len(work.calls) * self.call_s
        # A GPU works while Python launches what follows: the longer of the two. A CPU does both in turn.
        total_s = max(work_s, launch_s) if self.is_gpu else work_s + launch_s
        return total_s / max(1, work.num_batches)


@functools.cache
def _measure_cpu() -> Rates:
    """Time matrix products of each dtype and a copy, for a few hundredths of a second."""
    flops: dict[torch.dtype, float] = {}
    for dtype in MEASURED:
        square = torch.rand(384, 384).to(dtype)
        product = functools.partial(torch.mm, square, square)
        # 384 x 384 x 384 multiply-adds are 2 * 384^3 FLOPs; the first run is slower than the minimum.
        flops[dtype] = 2 * 384**3 / min(timeit.repeat(product, number=1, repeat=4))
    source, target = torch.rand(1 << 22), torch.empty(1 << 22)
    # A copy reads and writes every byte.
    copied = 2 * source.nbytes / min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=4))
    return Rates(flops_per_s=flops, bytes_per_s=copied, call_s=CALL_S)
