"""Count the floating-point operations of a step as they are dispatched; peak FLOP/s of devices.

The formulas are PyTorch's own (`torch.utils.flop_counter.flop_registry`): matrix products, convolutions and
attention, where a multiply-add counts as two. The CPU kernel of attention has no entry in the registry
(torch 2.13), so it gets one here. Not counted: operations without a formula (fused recurrent layers), and
everything under `inference_mode`, where composite operations are not decomposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from lightning_eff.report.live_bytes import InfraMode

PEAK_FLOPS_PER_S = {
    # NVIDIA's datasheets, dense tensor cores, FLOP/s: (bfloat16 and float16, TF32).
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
"""By the driver's full device name; a device that is not listed has no MFU."""


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


def peak_flops_per_s(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device for a dtype, None if unknown.

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
