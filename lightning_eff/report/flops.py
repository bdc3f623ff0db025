"""Count the FLOPs of every operation, and detect attention calls.

`Probe` (meter.py) uses `FlopCount` on GPUs and for compiled models; recording.py uses `flops_of`. The
formulas for matrix products, convolutions and attention are PyTorch's own
(`torch.utils.flop_counter.flop_registry`). A multiply-add counts as two FLOPs. In torch 2.13, the registry
lacks attention's CPU kernel and in-place products such as `addmm_`, so this module adds their formulas.
Operations without a formula, such as fused recurrent layers, are not counted. Under `inference_mode` nothing
is counted, because composite operations are not decomposed. Why not `FlopCounterMode`: flex attention raises
inside that mode, and the mode's module hooks add nodes to the measured autograd graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from lightning_eff.report.attention import AttentionWatch
from lightning_eff.report.live_bytes import InfraMode
from lightning_eff.report.module_tracker import ModuleTracker


class FlopCount(InfraMode):
    """Count the floating-point operations that run inside the `with` block.

    Args:
        is_compiled: Whether a part of the model is compiled. If True, no FLOPs are counted and only fused
            attention is detected, because a compiled graph dispatches few of its operations.

    Example:
        >>> with FlopCount() as count:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> count.flops
        48
    """

    def __init__(self, *, is_compiled: bool = False) -> None:
        super().__init__()
        self.flops = 0
        self._is_compiled = is_compiled
        self._tracker = ModuleTracker()
        self.attention = AttentionWatch(lambda: self._tracker.path)
        """Collects the attention calls among the operations."""

    def begin(self, _batch: object, module: nn.Module, _optimizers: object) -> AbstractContextManager[None]:
        """Track the modules of a model during a batch, to name the modules that call attention."""
        # The compiler would trace the hooks, and recompile after their removal.
        return nullcontext() if self._is_compiled else self._tracker.follow(module)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._is_compiled:
            self.flops += flops_of(func, args, kwargs, out)
        self.attention.observe(func, args, kwargs, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of a dispatched call, from its arguments and its result; 0 without a formula."""
    formula = _formula_of(func)
    if formula is None:
        return 0
    args = _ungrouped(args) if "scaled_dot_product" in str(func) else args
    # torch 2.13's formula for `addmm` mistakes `out_dtype` for the shape of the result.
    args = [each for each in args if not isinstance(each, torch.dtype)]
    return int(formula(*args, **kwargs, out_val=out))


@functools.cache
def _formula_of(func: Any) -> Callable[..., int] | None:
    packet = getattr(func, "overloadpacket", func)
    return flop_registry.get(packet) or _MORE.get(packet)


def _ungrouped(args: Any) -> list[Any]:
    """Return the operands' shapes with equal head counts, since torch 2.11 cannot count grouped heads."""
    shapes = [arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args]
    with_heads = [shape for shape in shapes if isinstance(shape, torch.Size) and len(shape) == 4]
    num_heads = max((shape[1] for shape in with_heads), default=0)
    return [torch.Size((each[0], num_heads, *each[2:])) if each in with_heads else each for each in shapes]


_MORE: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (  # noqa: SLF001
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (  # noqa: SLF001
        lambda grad_out, query, key, value, *_, **__: sdpa_backward_flop_count(grad_out, query, key, value)
    ),
}
