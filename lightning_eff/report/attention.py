"""What a report and a plan say of attention: calls that are alike as one row, masks, and what to warn of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core.attention_backends import ASK_FOR_SDPA, AttentionCall, choose, remedy
from lightning_eff.core.text import human_bytes

BLOCKING = -1e4
"""Added to a score, it leaves nothing of it: what models use lies between this and minus infinity."""
SOFTMAX = "softmax"
"""A softmax between two products, without `scaled_dot_product_attention`."""
MATH = "math"
QUADRATIC = (MATH, SOFTMAX)
LONG = 512
"""Tokens from which quadratic attention is warned of."""
PATTERNS = {
    "causal": ("is causal", "is_causal=True in place of the mask"),
    "nothing": ("masks nothing", "attn_mask=None"),
}
"""What is said of a mask, and what could be passed in its place."""


@dataclass(frozen=True)
class AttentionRow:
    """Calls of one backend that are alike.

    Args:
        backend: `flash`, `efficient`, `cudnn`, `flex`, `varlen`, `math`, or `softmax`.
        calls: Number of calls in a forward pass.
        call: Shapes, dtype and mask.
        mask: Kind of mask, with what is known of its values.
        modules: Modules that called, in order.
        score_bytes: Bytes of scores that the calls kept for the backward pass.
        mask_bytes: Bytes of dense masks that the calls were given.
        reason: Why no fused backend ran.
        remedy: What to change, to paste.
    """

    backend: str
    calls: int
    call: AttentionCall
    mask: str
    modules: tuple[str, ...]
    score_bytes: int = 0
    mask_bytes: int = 0
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        shape = list(self.call.query)
        keys = f" with {self.call.key[-2]} keys" if self.call.key[-2] != self.call.query[-2] else ""
        text = f"{self.calls} call{'s' * (self.calls != 1)} by {self.backend} {shape}{keys} "
        text += f"{str(self.call.dtype).removeprefix('torch.')}, mask: {self.mask}"
        text += f"; {human_bytes(self.score_bytes)} of scores held" if self.score_bytes else ""
        text += f"; {human_bytes(self.mask_bytes)} of masks" if self.mask_bytes else ""
        return text + (f"; {self.reason}" if self.reason else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values, for JSON, with its text."""
        fields = asdict(self) | {"dtype": str(self.call.dtype).removeprefix("torch."), "text": str(self)}
        shapes = {name: list(getattr(self.call, name)) for name in ("query", "key", "value")}
        return {name: value for name, value in fields.items() if name != "call"} | shapes


def alike(seen: Iterable[AttentionRow]) -> list[AttentionRow]:
    """Return the calls with those that are alike as one row, in the order of the first."""
    found: dict[Any, AttentionRow] = {}
    for row in seen:
        key = (row.backend, row.call, row.mask, row.reason)
        before = found.get(key)
        found[key] = row if before is None else replace(
            before, calls=before.calls + 1, modules=(*before.modules, *row.modules),
            score_bytes=before.score_bytes + row.score_bytes,
            mask_bytes=before.mask_bytes + row.mask_bytes,
        )  # fmt: skip
    return list(found.values())


def why_not_fused(
    backend: str, call: AttentionCall, capability: int, *, is_graph: bool, has_fused: bool
) -> tuple[str, str]:
    """Return why no fused backend computed a call, and what to change; empty where one did.

    Args:
        backend: As in `AttentionRow`.
        call: The call.
        capability: Compute capability of the device, times ten; 0 for a CPU.
        is_graph: Whether the call is in a graph that will be compiled.
        has_fused: Whether a fused backend was switched on when it was called.
    """
    if backend == "flex" and not is_graph:
        return "flex_attention is not compiled", "torch.compile(flex_attention)"
    if backend == SOFTMAX:
        return "scores are computed by the model, not by F.scaled_dot_product_attention", (
            f"{ASK_FOR_SDPA}, else y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, "
            "dropout_p=p if self.training else 0.0, scale=scale), keep True where masked_fill has False"
        )
    if backend != MATH:
        return "", ""
    choice = choose(call, capability)
    if choice.backend == MATH:
        return "; ".join(dict.fromkeys(choice.refused.values())), remedy(call, choice)
    if has_fused:
        return "shapes or strides that fused backends refuse", (
            "x.contiguous(), a mask of [B, H, T, S], or where a mask meets fewer heads of keys and values: "
            "key.repeat_interleave(n, 1)"
        )
    return "math was selected", "no sdpa_kernel(MATH), no enable_math_sdp alone"


def scores_not_held(rows: Iterable[AttentionRow], capability: int) -> int:
    """Return the bytes of scores that `math` would hold for the backward pass, and fused backends do not."""
    return sum(row.calls * row.call.scores_bytes(capability) for row in rows if not row.reason)


def warning_of(rows: Iterable[AttentionRow]) -> str:
    """Return what to warn of: quadratic attention over many tokens; empty for nothing."""
    long = [row for row in rows if row.reason and min(row.call.query[-2], row.call.key[-2]) >= LONG]
    if not long:
        return ""
    worst = max(long, key=lambda row: row.score_bytes)
    modules = ", ".join(dict.fromkeys(worst.modules[:3])) or "the model"
    return f"attention is quadratic in memory in {modules}: {worst}\n  try: {worst.remedy}"


def pattern_of(mask: Tensor) -> str:
    """Return `nothing` for a mask that lets everything pass, `causal` for that of `is_causal=True`, else "".

    Args:
        mask: `[.., T, S]`, bool, or added to the scores.

    Example:
        >>> pattern_of(torch.ones(4, 4, dtype=torch.bool).tril()), pattern_of(torch.zeros(2, 1, 4, 4))
        ('causal', 'nothing')
    """
    # Without gradients, as in the forward pass of a reentrant checkpoint, it may still be trained.
    is_known = not (isinstance(mask, FakeTensor) or mask.is_meta or mask.requires_grad)
    if not is_known or not torch.is_grad_enabled():
        return ""
    with _disable_current_modes(), torch.no_grad():
        if bool(mask.all() if mask.dtype == torch.bool else not mask.any()):
            return "nothing"
        # All samples and heads at once would be a copy of the mask; a mask of one sample is often shared.
        if mask.numel() != mask.shape[-1] * mask.shape[-2]:
            return ""
        flat = mask.reshape(mask.shape[-2:])
        is_bool = mask.dtype == torch.bool
        passes = flat if is_bool else flat == 0
        is_blocked = ~passes if is_bool else flat <= BLOCKING
        past = torch.ones_like(passes).tril()
        return "causal" if torch.equal(passes, past) and torch.equal(is_blocked, ~past) else ""
