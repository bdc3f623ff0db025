"""Floating-point operations of a step, counted as they are dispatched, and what a device could do at most.

The formulas are PyTorch's own (`torch.utils.flop_counter.flop_registry`): matrix products, convolutions
and attention, a multiplication and an addition each counted as one. Attention's CPU kernel has no entry
there, so it gets one here.
What has no formula (fused recurrent layers) is not counted, nor is anything under `inference_mode`, where
layers are dispatched whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from typing_extensions import override

PEAK_FLOPS_PER_S = {
    # Dense tensor-core rates of NVIDIA's datasheets, in operations a second: bfloat16 and float16, TF32.
    "NVIDIA H200": (989.4e12, 494.7e12),
    "NVIDIA H100 80GB HBM3": (989.4e12, 494.7e12),
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12),
    "NVIDIA L40S": (362e12, 183e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12),
}
"""By the name that the driver gives, all of it; a chip that is not listed has no MFU."""


class FlopCount(TorchDispatchMode):
    """Count the floating-point operations of everything that runs inside.

    Example:
        >>> with FlopCount() as count:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> count.flops
        48
    """

    supports_higher_order_operators = True

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Say that operators which compile themselves (flex attention) may run inside."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the floating-point operations of one call, 0 for what has no formula.

    Args:
        func: The operation, as a dispatch mode sees it.
        args: Its arguments.
        kwargs: Its named arguments.
        out: What it returned.
    """
    packet = getattr(func, "overloadpacket", func)
    formula = flop_registry.get(packet) or _CPU_ATTENTION.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention_forward(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape)


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001
}


def peak_flops_per_s(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the most that a device can do in a dtype, or None when it is not known.

    Example:
        >>> peak_flops_per_s("NVIDIA H200", torch.bfloat16)
        989400000000000.0
        >>> peak_flops_per_s("abacus", torch.float32) is None
        True
    """
    half = dtype in {torch.bfloat16, torch.float16}
    tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rates = PEAK_FLOPS_PER_S.get(device_name)
    if rates is None or not (half or tf32):
        return None
    return rates[0 if half else 1]
