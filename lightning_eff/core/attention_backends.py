"""A table of the rules by which torch chooses the kernel of `F.scaled_dot_product_attention`.

torch tries the backends in order of priority, and uses the first backend that does not reject the call. The
last backend is math, which accepts every call and stores every score. `torch._fused_sdp_choice` needs the
actual tensors, and returns only torch's choice. This module needs only shapes, also returns the reasons, and
covers devices that are not present. `callbacks/attention` and the prediction of memory use this module.

Source: the headers of torch 2.13.0, and pytorch's aten/src/ATen/native/transformers files sdp_utils_cpp.cpp
and cuda/sdp_utils.cpp as of summer 2026 (001f694). The table omits memory-efficient attention with grouped
heads (pytorch#191085), because the headers of torch 2.13 do not contain it. On compute capability 9 and 10,
the cuDNN backend has the highest priority; on other GPUs it comes after math. The highest priority needs
cuDNN 9.15.1 or later. Builds of torch 2.11 and later for CUDA 13 include such a version. For head sizes of
129 to 256, torch's choice between cuDNN and flash is uncertain; the table assumes flash. Both save the same
tensors. The table does not cover nested tensors, ROCm, storage offsets, or
`torch.use_deterministic_algorithms` (in this mode, the cuDNN backend rejects calls).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lightning_eff.core.torch_private import torch_private

SDP = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
"""torch's enum member for each backend, in torch's default order of priority. On some devices the order
differs."""
BACKENDS = tuple(SDP)
HALF = (torch.float16, torch.bfloat16)
AUTOCAST = (torch.float32, *HALF)
ASK_FOR_SDPA = (
    "F.scaled_dot_product_attention in your own code, need_weights=False for nn.MultiheadAttention, "
    "attn_implementation='sdpa' for transformers"
)
"""Remedies that let a module with its own attention code use a fused backend."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The properties of an attention call that determine its backend.

    Args:
        query: Shape of the query, `[B, H, T, E]`; math also accepts a different number of axes.
        key: Shape of the key, `[B, H, S, E]`; with grouped-query attention, `H` is smaller than in the query.
        value: Shape of the value, `[B, H, S, Ev]`.
        dtype: Dtype of query, key and value after autocast.
        mask: `causal` for `is_causal=True`, `none` without a mask, else `bool` or `float` for `attn_mask`.
        mask_shape: Shape of `attn_mask`; None without a mask, or for a shape that every backend accepts.
        mask_requires_grad: Whether `attn_mask` requires a gradient.
        dropout: Dropout probability (`dropout_p`).
        requires_grad: Whether gradients will be computed.
        enable_gqa: The argument `enable_gqa` of the call.
        is_strided: Whether the last axis of query, key or value has a stride other than 1.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: Literal["none", "causal", "bool", "float"] = "none"
    mask_shape: tuple[int, ...] | None = None
    mask_requires_grad: bool = False
    dropout: float = 0.0
    requires_grad: bool = True
    enable_gqa: bool = True
    is_strided: bool = False

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> AttentionCall:  # fmt: skip
        """Describe a call from its arguments to `F.scaled_dot_product_attention`.

        Example:
            >>> x = torch.ones(2, 4, 16, 8)
            >>> AttentionCall.of(x, x, x, is_causal=True).mask
            'causal'
        """
        operands = (query, key, value)
        kind = "bool" if attn_mask is not None and attn_mask.dtype == torch.bool else "float"
        device, dtype = query.device.type, query.dtype
        if dtype in AUTOCAST and torch.amp.is_autocast_available(device):
            # torch casts the operands to the autocast dtype before it chooses a backend.
            is_on = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if is_on else dtype
        return cls(
            query=tuple(query.shape), key=tuple(key.shape), value=tuple(value.shape), dtype=dtype,
            mask=kind if attn_mask is not None else "causal" if is_causal else "none",
            mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
            mask_requires_grad=attn_mask is not None and attn_mask.requires_grad,
            dropout=dropout_p, enable_gqa=enable_gqa,
            requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands),
            is_strided=any(tensor.stride(-1) != 1 for tensor in operands),
        )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and the reasons why backends of higher priority rejected the call."""

    backend: str
    rejected: dict[str, str]
    """For each backend that rejected the call, the reasons, joined by `; `. A reason is a key of `RULES`,
    `not 4-D` or `switched off`."""


def _is_mask_shape_rejected(call: AttentionCall, _: int) -> bool:
    """Return whether a mask's shape is neither `[T, S]` nor `[B, H, T, S]`; each axis may also be 1."""
    # The scores are `[B, H, T, S]`; broadcasting aligns the mask with their last axes.
    shape, scores = call.mask_shape or (), (*call.query[:-1], call.key[2])
    fits = all(a in {b, 1} for a, b in zip(reversed(shape), reversed(scores), strict=False))
    return len(shape) not in {0, 2, 4} or not fits


def _are_heads_rejected(call: AttentionCall, _: int) -> bool:
    query, key, value = call.query[1], call.key[1], call.value[1]
    return key != value or (query % key != 0 if call.enable_gqa else query != key)


def _is_size_rejected_by_cudnn(call: AttentionCall, _: int) -> bool:
    sizes = (call.query[3], call.value[3])
    return any(size % 8 for size in sizes) or (max(sizes) > 128 and sizes != (192, 128))


def _is_alignment_rejected(call: AttentionCall, capability: int) -> bool:
    """Return whether the size of a head violates the 16-byte alignment that CUTLASS requires."""
    # 16 bytes hold 8 half-precision or 4 float32 elements; older GPUs load float32 elements one by one.
    alignment = 8 if call.dtype in HALF else 4 if capability >= 80 else 1
    return any(size % alignment for size in (call.query[3], call.value[3]))


def _is_backward_rejected(call: AttentionCall, capability: int) -> bool:
    """Return whether the GPU's shared memory is too small for flash's backward pass with these heads."""
    limit = 192 if call.dropout > 0 or call.query[3] <= 224 else 256
    return (86 <= capability <= 89 or capability >= 120) and call.requires_grad and call.query[3] > limit


def _is_dtype_rejected(call: AttentionCall, capability: int) -> bool:
    # Capability 0 stands for a CPU. GPUs older than Ampere have no bfloat16.
    more = {0: (torch.bfloat16, torch.float64)}.get(capability, HALF if capability >= 80 else ())
    return call.dtype not in (torch.float16, torch.float32, *more)


RULES: dict[str, Callable[[AttentionCall, int], bool]] = {
    "strided last axis": lambda c, _: c.is_strided,
    "dropout": lambda c, _: c.dropout > 0,
    "dropout of one query": lambda c, _: c.dropout > 0 and c.query[2] == 1,
    "dropout not a multiple of 1/16": lambda c, _: c.dropout * 16 % 1 != 0,
    "not half precision": lambda c, _: c.dtype not in HALF,
    "dtype": _is_dtype_rejected,
    "shape of the mask": _is_mask_shape_rejected,
    "mask requires grad": lambda c, _: c.mask_requires_grad,
    "mask": lambda c, _: c.mask in {"bool", "float"},
    "causal, T != S": lambda c, _: c.mask == "causal" and c.query[2] != c.key[2],
    "head sizes differ": lambda c, _: c.query[3] != c.value[3],
    "number of heads": _are_heads_rejected,
    "grouped heads": lambda c, _: len({c.query[1], c.key[1], c.value[1]}) > 1,
    "batch sizes": lambda c, _: len({c.query[0], c.key[0], c.value[0]}) > 1,
    "no tokens": lambda c, _: 0 in (c.query[2], c.key[2]),
    "one key": lambda c, _: c.key[2] == 1,
    "head size not aligned": _is_alignment_rejected,
    "head size of cuDNN": _is_size_rejected_by_cudnn,
    "head size > 256": lambda c, _: c.query[3] > 256,
    "backward of large heads": _is_backward_rejected,
    "GPU older than Ampere": lambda _, capability: capability < 80,
}
"""For each reason to reject a call, a function that returns whether the reason applies. Its arguments are the
call and the compute capability. The axes of shapes are `[B, H, T, E]`."""


def switched_on() -> list[str]:
    """Return the backends that `sdpa_kernel` or torch's global flags enable, in order of priority."""
    names = {backend: name for name, backend in SDP.items()}
    current = torch_private("torch.nn.attention:_cur_sdpa_kernel_backends", "callbacks/attention")
    return [names[each] for each in current(with_priority=True) if each in names]


_SHAPES = ("number of heads", "batch sizes", "no tokens", "strided last axis")
_CPU = {
    "flash": ("dropout", "shape of the mask", "mask requires grad", "head sizes differ", "dtype", *_SHAPES)
}
_CUDA = {
    "cudnn": (
        "not half precision", "shape of the mask", "mask requires grad", "dropout not a multiple of 1/16",
        "dropout of one query", "one key", "head size of cuDNN", *_SHAPES,
    ),
    "flash": (
        "mask", "not half precision", "head sizes differ", "head size > 256", "causal, T != S",
        "backward of large heads", "GPU older than Ampere", *_SHAPES,
    ),
    "efficient": ("grouped heads", "head size not aligned", "dtype", *_SHAPES),
}  # fmt: skip
"""The reasons why each backend may reject a call. The backends are ordered by priority."""


def choose(call: AttentionCall, capability: int, *, enabled: Sequence[str] = BACKENDS) -> Choice:
    """Return the backend that torch chooses for a call.

    Args:
        call: The call.
        capability: Compute capability times ten, as in `devices.Device`; 0 for a CPU.
        enabled: Enabled backends, as `switched_on` returns them. An order that differs from `BACKENDS` comes
            from `sdpa_kernel(..., set_priority=True)`. If the result is math although math is disabled, torch
            raises an error for this call.

    Example:
        >>> shape = (2, 4, 512, 64)
        >>> call = AttentionCall(query=shape, key=shape, value=shape, dtype=torch.bfloat16, dropout=0.1)
        >>> choose(call, 0)
        Choice(backend='math', rejected={'flash': 'dropout'})
        >>> choose(call, 90)
        Choice(backend='flash', rejected={'cudnn': 'dropout not a multiple of 1/16'})
    """
    # Pad the shapes to 4 axes, so that the rules can index them. The rule "not 4-D" uses the original shapes.
    query, key, value = (((1,) * 4 + shape)[-4:] for shape in (call.query, call.key, call.value))
    in_4d = replace(call, query=query, key=key, value=value)
    general = ["not 4-D"] if len(call.query) != 4 else []
    rules: Mapping[str, tuple[str, ...]] = _CUDA if capability else _CPU
    has_cudnn = capability // 10 in {9, 10}  # on other GPUs, cuDNN comes after math
    order: Sequence[str] = [backend for backend in rules if has_cudnn or backend != "cudnn"]
    # An order other than the default comes from the user, and replaces the device's order.
    if capability and list(enabled) != [name for name in BACKENDS if name in enabled]:
        order = enabled
    rejected: dict[str, str] = {}
    for backend in order:
        if backend == "math":
            break
        reasons = general + [name for name in rules[backend] if RULES[name](in_4d, capability)]
        reasons += ["switched off"] if backend not in enabled else []
        if not reasons:
            return Choice(backend, rejected)
        rejected[backend] = "; ".join(reasons)
    return Choice("math", rejected)
