"""Count the FLOPs and bytes of every operation, and estimate a step's time from them (roofline).

The formulas are PyTorch's own (`torch.utils.flop_counter.flop_registry`): matrix products, convolutions and
attention, where a multiply-add counts as two. The CPU kernel of attention has no entry in the registry
(torch 2.13), so it gets one here. Not counted: operations without a formula (fused recurrent layers), and
everything under `inference_mode`, where composite operations are not decomposed. Why not `FlopCounterMode`:
inside it flex attention raises, and its module hooks add nodes to the graph that is measured.

time(op) = max(FLOPs / rate of its dtype, bytes / memory bandwidth). Overlap between operations, caches and
compiled code are not modelled, so an estimate alone means little; the ratio of two estimates of one model
shows what a technique costs.

Source: Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from lightning_eff.kernels.devices import Device
from lightning_eff.report.live_bytes import InfraMode

MATMUL_EFFICIENCY, MEMORY_EFFICIENCY = 0.7, 0.8
"""Fractions of a device's stated peaks that large matrix products and elementwise operations reach."""
BUS_BYTES_PER_S = 25e9
"""Between GPU memory and pinned host memory: PCIe 4.0 x16."""
HOST_BYTES_PER_S = 50e9
"""Host memory bandwidth of a server, for updates on its CPU."""
LAUNCH_S = 5e-6
"""Time to launch one kernel from Python; overlaps with the GPU's work."""
CALL_S = 2e-6
"""Overhead of one operation on a CPU."""
ROWS_ONLY = ("embedding", "index", "index_select", "gather")
"""Operations that read only the rows that they return."""
NO_COST = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "_local_scalar_dense")


class FlopCount(InfraMode):
    """Count the floating-point operations of everything that runs inside.

    Example:
        >>> with FlopCount() as count:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> count.flops
        48
    """

    flops = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of a call that `__torch_dispatch__` got, with its result; 0 without a formula."""
    packet = getattr(func, "overloadpacket", func)
    formula = flop_registry.get(packet) or _CPU_ATTENTION.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (  # noqa: SLF001
        lambda query, key, value, *_, **__: sdpa_flop_count(query.shape, key.shape, value.shape)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (  # noqa: SLF001
        lambda grad_out, query, key, value, *_, **__: sdpa_backward_flop_count(
            grad_out.shape, query.shape, key.shape, value.shape
        )
    ),
}


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

    def seconds(self, device: Device) -> float:
        """Return the time per batch on a device; for a CPU its rates are rough (kernels/devices.py)."""
        is_gpu, memory_bytes_per_s = bool(device.capability), MEMORY_EFFICIENCY * device.memory_gbs * 1e9
        work_s = 0.0
        for call in self.calls:
            # Roofline: a call is limited by compute or by memory traffic, whichever takes longer.
            bytes_per_s = memory_bytes_per_s
            if is_gpu and not self.on_host.isdisjoint(call.storages):
                bytes_per_s = HOST_BYTES_PER_S if set(call.storages) <= self.on_host else BUS_BYTES_PER_S
            compute_s = call.flops / (MATMUL_EFFICIENCY * device.peak(call.dtype))
            work_s += max(compute_s, call.num_bytes / bytes_per_s)
        launch_s = len(self.calls) * (LAUNCH_S if is_gpu else CALL_S)
        # A GPU works while Python launches what follows: the longer of the two. A CPU does both in turn.
        total_s = max(work_s, launch_s) if is_gpu else work_s + launch_s
        return total_s / max(1, self.num_batches)
