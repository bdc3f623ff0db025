"""torch's rules of which kernel computes `F.scaled_dot_product_attention`, as a table.

torch tries backends in an order of priority and takes the first one that refuses nothing; math, which holds
every score, is left at the end. `torch._fused_sdp_choice` gives that choice for tensors at hand; this table
gives it for shapes, for a device that is not present, and with the reasons.

Read: the headers of torch 2.13.0, and of pytorch's aten/src/ATen/native/transformers the files
sdp_utils_cpp.{h,cpp}, cuda/sdp_utils.cpp and attention.cpp on main in summer 2026 (001f694), without what the
headers of 2.13 lack: memory-efficient attention with fewer heads of key and value (pytorch#191085). cuDNN is
first on compute capability 9.0 and 10.x with cuDNN 9.15.1 or later, which CUDA 13 builds of 2.11 and later
have, unless TORCH_CUDNN_SDPA_DEPRIORITIZED is set; elsewhere it comes after math. Unsure: cuDNN with head sizes
of 129 to 256 on 9.0, here left to flash, which saves the same. Not in the table: nested tensors, ROCm,
alignment of storage offsets, deterministic algorithms (which cuDNN refuses).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

BACKENDS = ("cudnn", "flash", "efficient", "math")
"""Names, as in this module's results."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What the choice of a backend depends on.

    Args:
        query: Shape, `[B, H, T, E]` for all backends but math.
        key: Shape, `[B, H, S, E]`; fewer heads than the query's is grouped-query attention.
        value: Shape, `[B, H, S, Ev]`.
        dtype: Of query, key and value, after autocast.
        mask: `causal` is `is_causal=True`; else the dtype of `attn_mask`.
        mask_shape: Shape of `attn_mask`; None takes one that every backend accepts.
        mask_requires_grad: Whether the mask is trained.
        dropout: `dropout_p`.
        requires_grad: Whether a gradient will be computed.
        is_gqa: Whether `enable_gqa=True`.
        has_unit_stride: Whether the last axis of query, key and value has stride 1.
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
    is_gqa: bool = True
    has_unit_stride: bool = True

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, enable_gqa: bool = False,
    ) -> AttentionCall:  # fmt: skip
        """Describe a call, by the arguments of `F.scaled_dot_product_attention`.

        Example:
            >>> x = torch.ones(2, 4, 16, 8)
            >>> AttentionCall.of(x, x, x, is_causal=True).mask
            'causal'
        """
        operands = (query, key, value)
        kind = "bool" if attn_mask is not None and attn_mask.dtype == torch.bool else "float"
        return cls(
            query=tuple(query.shape), key=tuple(key.shape), value=tuple(value.shape), dtype=query.dtype,
            mask=kind if attn_mask is not None else "causal" if is_causal else "none",
            mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
            mask_requires_grad=attn_mask is not None and attn_mask.requires_grad,
            dropout=dropout_p, is_gqa=enable_gqa,
            requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands),
            has_unit_stride=all(tensor.stride(-1) == 1 for tensor in operands),
        )  # fmt: skip

    def scores_bytes(self, capability: int) -> int:
        """Return the bytes of scores that math holds for the backward pass, which other backends compute twice.

        These are the softmax's result, in float32 for a half-precision dtype, and with dropout also the product
        and its mask (CUDA: of bool).
        """
        itemsize = 4 if self.dtype in HALF else self.dtype.itemsize
        dropout_itemsize = itemsize + (1 if capability else itemsize) if self.dropout > 0 else 0
        num_scores = self.key[-2]
        for length in self.query[:-1]:
            num_scores *= length
        return num_scores * (itemsize + dropout_itemsize)


@dataclass(frozen=True)
class _Rule:
    """A condition under which a backend refuses a call, and what to change."""

    refuses: Callable[[AttentionCall, int], bool]
    remedy: str


def _is_mask_shape_refused(call: AttentionCall, _: int) -> bool:
    """Return whether a mask is neither `[T, S]` nor `[B, H, T, S]`, each with 1 in any place."""
    shape, scores = call.mask_shape or (), (*call.query[:-1], call.key[-2])
    fits = all(a in {b, 1} for a, b in zip(reversed(shape), reversed(scores), strict=False))
    return len(shape) not in {0, 2, 4} or not fits


def _are_heads_refused(call: AttentionCall, _: int) -> bool:
    query, key, value = call.query[1], call.key[1], call.value[1]
    return key != value or (query % key != 0 if call.is_gqa else query != key)


def _is_size_refused_by_cudnn(call: AttentionCall, _: int) -> bool:
    sizes = (call.query[-1], call.value[-1])
    return any(size % 8 for size in sizes) or (max(sizes) > 128 and sizes != (192, 128))


def _is_alignment_refused(call: AttentionCall, capability: int) -> bool:
    """Return whether a row of a head is not aligned to 16 bytes, as CUTLASS's products need it."""
    alignment = 8 if call.dtype in HALF else 4 if capability >= 80 else 1
    return any(size % alignment for size in (call.query[-1], call.value[-1]))


def _is_backward_refused(call: AttentionCall, capability: int) -> bool:
    """Return whether flash has no backward pass for these heads on a GPU with little shared memory."""
    is_small = 86 <= capability <= 89 or capability >= 120
    limit = 192 if call.dropout > 0 or call.query[-1] <= 224 else 256
    return is_small and call.requires_grad and call.query[-1] > limit


def _is_dtype_refused_by_efficient(call: AttentionCall, capability: int) -> bool:
    return call.dtype not in {torch.float16, torch.float32, *(HALF if capability >= 80 else ())}


RULES = {
    "not 4-D": _Rule(lambda c, _: False, "add an axis of heads: x.unsqueeze(1)"),
    "switched off": _Rule(lambda c, _: False, "switch it on: sdpa_kernel, torch.backends.cuda.enable_*_sdp"),
    "batch sizes differ": _Rule(
        lambda c, _: len({c.query[0], c.key[0], c.value[0]}) > 1,
        "expand key and value to the query's batch size",
    ),
    "number of heads": _Rule(_are_heads_refused, "enable_gqa=True, where the key's heads divide the query's"),
    "grouped heads": _Rule(
        lambda c, _: len({c.query[1], c.key[1], c.value[1]}) > 1, "repeat heads: key.repeat_interleave(n, 1)"
    ),
    "no tokens": _Rule(lambda c, _: 0 in (c.query[2], c.key[2]), "leave empty sequences out"),
    "one key": _Rule(lambda c, _: c.key[2] == 1, "more than one key"),
    "last axis is strided": _Rule(lambda c, _: not c.has_unit_stride, "x.contiguous()"),
    "dropout": _Rule(lambda c, _: c.dropout > 0, "dropout 0.0 in the attention, or a CUDA device"),
    "dropout is no multiple of 1/16": _Rule(lambda c, _: c.dropout * 16 % 1 != 0, "dropout 0.125"),
    "dropout of one query": _Rule(lambda c, _: c.dropout > 0 and c.query[2] == 1, "dropout 0.0"),
    "mask": _Rule(
        lambda c, _: c.mask in {"bool", "float"}, "is_causal=True, or attn_mask=None where nothing is masked"
    ),
    "shape of the mask": _Rule(_is_mask_shape_refused, "a mask of [T, S] or [B, H, T, S]"),
    "mask requires grad": _Rule(
        lambda c, _: c.mask_requires_grad, "attn_mask.detach(), or FlexAttention with a score_mod"
    ),
    "causal, T != S": _Rule(
        lambda c, _: c.mask == "causal" and c.query[2] != c.key[2], "an explicit attn_mask"
    ),
    "head sizes differ": _Rule(
        lambda c, _: c.query[-1] != c.value[-1],
        "F.pad(value, (0, {pad})), and the first columns of the result",
    ),
    "head size > 256": _Rule(lambda c, _: c.query[-1] > 256, "heads of at most 256"),
    "head size of cuDNN": _Rule(_is_size_refused_by_cudnn, "heads of a multiple of 8 up to 128"),
    "head size not aligned": _Rule(_is_alignment_refused, "heads of a multiple of 8"),
    "backward of large heads": _Rule(_is_backward_refused, "heads of at most 192"),
    "not half precision": _Rule(lambda c, _: c.dtype not in HALF, "precision=bf16_mixed, or torch.autocast"),
    "dtype": _Rule(_is_dtype_refused_by_efficient, "precision=bf16_mixed, or torch.autocast"),
}
"""By reason. The axes of shapes are `[B, H, T, E]`."""
_SHAPES = ("number of heads", "batch sizes differ", "no tokens", "last axis is strided")
_CPU = {
    "flash": ("dropout", *_SHAPES, "shape of the mask", "mask requires grad", "head sizes differ"),
}
_FLASH = (
    "mask", "not half precision", "head sizes differ", "head size > 256", "backward of large heads",
    "causal, T != S", *_SHAPES,
)  # fmt: skip
_CUDA = {
    "cudnn": (
        "not half precision", "shape of the mask", "mask requires grad", "dropout is no multiple of 1/16",
        "dropout of one query", "one key", "head size of cuDNN", *_SHAPES,
    ),
    "flash": _FLASH,
    "efficient": ("grouped heads", "head size not aligned", "dtype", *_SHAPES),
}  # fmt: skip


def _rules_of(capability: int) -> dict[str, tuple[str, ...]]:
    """Return the backends of a device by priority, with what they refuse."""
    if capability == 0:
        return _CPU
    return _CUDA if capability // 10 in {9, 10} else {name: _CUDA[name] for name in ("flash", "efficient")}


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why none of higher priority was taken."""

    backend: str
    refused: dict[str, str]
    """Reasons by backend, names of `RULES` separated by `; `."""


def choose(call: AttentionCall, capability: int, *, enabled: Collection[str] = BACKENDS) -> Choice:
    """Return the backend that torch takes for a call.

    Args:
        call: The call.
        capability: Compute capability times ten, as in `devices.Device`; 0 for a CPU.
        enabled: Backends that are not switched off, for example by `sdpa_kernel`.

    Raises:
        ValueError: No enabled backend accepts the call.

    Example:
        >>> shape = (2, 4, 512, 64)
        >>> call = AttentionCall(query=shape, key=shape, value=shape, dtype=torch.bfloat16, dropout=0.1)
        >>> choose(call, 0)
        Choice(backend='math', refused={'flash': 'dropout'})
        >>> choose(call, 90)
        Choice(backend='flash', refused={'cudnn': 'dropout is no multiple of 1/16'})
    """
    shapes = (((1,) * 4 + shape)[-4:] for shape in (call.query, call.key, call.value))
    query, key, value = shapes
    with_heads = replace(call, query=query, key=key, value=value)  # for the rules that count axes
    refused: dict[str, str] = {}
    for backend, rules in _rules_of(capability).items():
        reasons = [name for name in rules if RULES[name].refuses(with_heads, capability)]
        reasons += ["not 4-D"] if len(call.query) != 4 else []
        reasons += ["switched off"] if backend not in enabled else []
        if not reasons:
            return Choice(backend, refused)
        refused[backend] = "; ".join(reasons)
    if "math" not in enabled:
        msg = (
            f"no backend of attention is left for {call}: expected more than {', '.join(enabled)}; {refused}"
        )
        raise ValueError(msg)
    return Choice("math", refused)


def remedy(call: AttentionCall, choice: Choice) -> str:
    """Return what to change so that a backend which holds no scores is taken; empty where one is.

    Example:
        >>> shape = (2, 512, 64)
        >>> call = AttentionCall(query=shape, key=shape, value=shape, dtype=torch.float32)
        >>> remedy(call, choose(call, 90))
        'add an axis of heads: x.unsqueeze(1)'
    """
    if choice.backend != "math":
        return ""
    reasons = min((text.split("; ") for text in choice.refused.values()), key=len)
    value_size, size = sorted((call.query[-1], call.value[-1]))
    return "; ".join(RULES[name].remedy.format(pad=size - value_size) for name in reasons)
