"""Attention in a prediction for a GPU: by the backend that it would take, with what that holds.

Fake tensors are on a CPU, whose choice is another one than CUDA's: it has no dropout, but takes masks. In a
prediction for CUDA `F.scaled_dot_product_attention` therefore calls the operator that CUDA would run
(core/attention_backends.py), with masks and heads prepared as in pytorch's attention.cpp; its fake
result has the shapes that the kernel saves. Dropout saves a mask of bool, as CUDA's fused one does.

Why a kernel of the dispatcher: autocast has cast the operands by then, and every caller comes through it,
`nn.MultiheadAttention` and checkpoints too. Only under `torch.inference_mode`, without autograd, none does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,  # pyright: ignore[reportPrivateUsage]
)
from typing_extensions import override

from lightning_eff.core.attention_backends import AttentionCall, choose, remedy

aten: Any = torch.ops.aten
_NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient", SDPBackend.MATH: "math",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}  # fmt: skip
"""By priority, as torch has it before a device is used."""
ALIGNMENT = 8
"""Multiple to which torch pads heads for flash attention, and rows of a mask for the efficient one."""


class PlannedAttention(AbstractContextManager["PlannedAttention"]):
    """Compute attention and dropout on fake tensors as a GPU would.

    Args:
        capability: Compute capability times ten; 0 for a CPU, where everything is left as it is.

    Example:
        >>> from lightning_eff.planner.fakes import Fakes
        >>> from lightning_eff.report.flops import FlopCount
        >>> with Fakes(), PlannedAttention(80), FlopCount() as count:
        ...     x = torch.empty(2, 4, 1024, 64, dtype=torch.float16, requires_grad=True)
        ...     y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)
        >>> print(*count.attention.rows())
        1 call by flash [2, 4, 1024, 64] float16, mask: causal
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._library: Any = None

    @override
    def __enter__(self) -> PlannedAttention:
        if self._capability:
            self._library = torch.library.Library("aten", "IMPL")
            # Above autograd, whose formulas are those of the operators called here.
            self._library.impl("scaled_dot_product_attention", self._attention, "AutogradCPU")
            self._library.impl("dropout", _dropout, "AutogradCPU")
        return self

    @override
    def __exit__(self, *error: object) -> None:
        if self._library is not None:
            self._library._destroy()  # noqa: SLF001
            self._library = None

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *,  # noqa: FBT001, FBT002 - torch's signature
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        own: Any = aten.scaled_dot_product_attention.default.decompose
        operands: Any = (query, key, value, attn_mask)
        options: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
        if type(query) in {Tensor, nn.Parameter}:  # a real one
            return own(*operands, scale=scale, **options)
        call = AttentionCall.of(*operands, **options)
        switches = _switches()
        choice = choose(call, self._capability, **switches)
        if choice.backend not in switches["enabled"]:
            reasons = ", ".join(f"{name}: {why}" for name, why in choice.refused.items())
            msg = f"math is switched off, and no other backend takes attention ({reasons}); try: "
            msg += remedy(call, choice)
            raise RuntimeError(msg)
        return _BY_BACKEND[choice.backend](*operands, scale=scale, **options)


def _switches() -> dict[str, list[str]]:
    """Return the backends that are switched on, and their priority where `sdpa_kernel` has set one."""
    order = [
        _NAMES[backend] for backend in _cur_sdpa_kernel_backends(with_priority=True) if backend in _NAMES
    ]
    is_set = order != [name for name in _NAMES.values() if name in order]
    return {"enabled": order, "priority": order if is_set else []}


def _flash(query: Tensor, key: Tensor, value: Tensor, _: None, **options: Any) -> Tensor:
    size = query.shape[-1]
    padded = [F.pad(x, (0, -size % ALIGNMENT)) if size % ALIGNMENT else x for x in (query, key, value)]
    scale = options["scale"] or size**-0.5
    options = {"dropout_p": options["dropout_p"], "is_causal": options["is_causal"], "scale": scale}
    out: Tensor = aten._scaled_dot_product_flash_attention(*padded, **options)[0]  # noqa: SLF001
    return out[..., :size] if size % ALIGNMENT else out


def _cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    del options["enable_gqa"]
    mask = _additive(mask, query.dtype)
    return aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        query, key, value, mask, _has_grad(query, key, value), **options
    )[0]


def _efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    del options["enable_gqa"]
    mask = _additive(mask, query.dtype)
    if mask is not None:
        num_keys = mask.shape[-1]
        if mask.stride(-1) != 1 or any(stride % ALIGNMENT for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, ALIGNMENT - num_keys % ALIGNMENT))[..., :num_keys]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        query, key, value, mask, _has_grad(query, key, value), **options
    )[0]


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    mask = _additive(mask, query.dtype)
    return aten._scaled_dot_product_attention_math(query, key, value, mask, **options)[0]  # noqa: SLF001


_BY_BACKEND: dict[str, Any] = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=dtype))


def _has_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001 - torch's signature
    if train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]
    return aten.dropout.default.decompose(x, p, train)
