"""Detect which kernels computed attention, from the operations of one forward pass.

`FlopCount` and `Recorder` pass each operation to it. `F.scaled_dot_product_attention` chooses a backend for
each call, and is silent if only the quadratic `math` remains. A fused kernel is one operation, recognized by
its name. Quadratic attention is recognized by its softmax. That is `_safe_softmax` in `math`, or a `_softmax`
of [.., T, T] in models that compute scores themselves (`nn.MultiheadAttention` with `need_weights=True`,
`eager` in transformers).

In a compiled graph only fused kernels are detected, because the compiler fuses the softmax of quadratic
attention with neighbouring operations.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_eff.core.attention_backends import ASK_FOR_SDPA, HALF
from lightning_eff.core.text import human_bytes
from lightning_eff.core.torch_private import torch_private
from lightning_eff.report.module_tracker import in_backward

FUSED = re.compile(
    r"_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(?:_for_cpu|_overrideable)?"
    r"|_(flash|efficient)_attention_forward|(flex)_attention|_?(varlen)_attn"
    r"|_?(flash_attn)_(?:varlen_)?(?:fwd|forward)\w*"
)
"""Names of fused kernels (torch 2.13, the package flash_attn); the group is the backend."""
REMEDIES = {
    "math": (
        "dropout 0.0 on a CPU, half precision without a mask on CUDA; "
        "+callbacks=attention callbacks.attention.backend=flash names the reason"
    ),
    "softmax": ASK_FOR_SDPA,
    "flex": "torch.compile(flex_attention)",  # seen only uncompiled: compiled it has another name
}
"""Change to make, by backend; these backends hold all scores."""
LONG = 512
"""Number of tokens at which quadratic attention starts to cause a warning."""


@dataclass(frozen=True)
class AttentionRow:
    """A group of equal attention calls: same backend, shapes, dtype and mask.

    Args:
        backend: `flash`, `efficient`, `cudnn`, `flex`, `varlen`, `math`, or `softmax`.
        shape: Shape of the query, `[B, H, T, E]`; for `math` and `softmax` of the scores, `[B, H, T, S]`.
        num_keys: Length S of the key.
        dtype: Dtype of the query or scores.
        mask: `none`, `causal` or `dense`; empty if unknown.
        calls: Number of calls in a forward pass.
        score_bytes: Bytes of the scores that are saved after the softmax for the backward pass; a fused
            kernel saves none.
        modules: Calling modules, in order; empty in a compiled model.
    """

    backend: str
    shape: tuple[int, ...]
    num_keys: int
    dtype: str
    mask: str = ""
    calls: int = 1
    score_bytes: int = 0
    modules: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """Change to paste; empty if a fused kernel ran."""
        return REMEDIES.get(self.backend, "")

    def __str__(self) -> str:
        what = "" if self.mask else ", scores"
        keys = f" with {self.num_keys} keys" if self.mask and self.num_keys != self.shape[-2] else ""
        text = f"{self.calls} call{'s' * (self.calls != 1)} by {self.backend}{what} {list(self.shape)}{keys} "
        text += self.dtype + (f", mask: {self.mask}" if self.mask else "")
        return text + (f"; {human_bytes(self.score_bytes)} of scores" if self.remedy else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the row and its text as plain values, for JSON."""
        return asdict(self) | {"remedy": self.remedy, "text": str(self)}


class AttentionWatch:
    """Collects attention calls from each operation until the first backward pass begins.

    Args:
        path: Returns the name of the running module.

    Example:
        >>> import torch.nn.functional as F
        >>> from lightning_eff.report.flops import FlopCount
        >>> x = torch.ones(1, 2, 8, 4)
        >>> with FlopCount() as count:
        ...     _ = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> print(*count.attention.rows())
        1 call by flash [1, 2, 8, 4] float32, mask: causal
    """

    def __init__(self, path: Callable[[], str]) -> None:
        self._path = path
        self._calls: list[AttentionRow] = []
        """One row per call."""
        self._is_done = False

    def rows(self) -> list[AttentionRow]:
        """Return one row per group of equal calls, in order of their first call."""
        found: dict[AttentionRow, AttentionRow] = {}
        for row in self._calls:
            key = replace(row, modules=())
            before = found.get(key)
            found[key] = row if before is None else replace(
                before, calls=before.calls + 1, modules=(*before.modules, *row.modules),
                score_bytes=before.score_bytes + row.score_bytes,
            )  # fmt: skip
        return list(found.values())

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add an operation, as `__torch_dispatch__` received it, if it is attention."""
        self._is_done = self._is_done or in_backward()
        backend = "" if self._is_done else _backend_of(func)
        if not backend:
            return
        # Under DDP, calls that the compiler makes while tracing arrive here too: skip them.
        tracing = torch_private("torch._guards:TracingContext", "the report of attention")
        is_nested = getattr(args[0] if args else None, "is_nested", False)  # nested tensors have no shape
        if is_nested or tracing.try_get() is not None:
            return
        if backend not in ("math", "softmax"):
            self._add_fused(backend, func, args, kwargs)
        # Scores of attention are square: a classifier's softmax or a router's is not.
        elif backend == "math" or (out.dim() > 2 and out.shape[-2] == out.shape[-1] > 1):
            self._add(AttentionRow(backend, tuple(out.shape), out.shape[-1], _name(out)), out.dtype)

    def _add_fused(self, backend: str, func: Any, args: Any, kwargs: Any) -> None:
        schema = getattr(func, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][:2]
        is_dense = any(given.get(name) is not None for name in ("attn_mask", "attn_bias"))
        is_causal = given.get("is_causal") or given.get("causal")
        mask = "causal" if is_causal else "dense" if is_dense else "none"
        row = AttentionRow(backend, tuple(query.shape), key.shape[-2], _name(query), mask)
        # `math` computes the scores of half-precision queries in float32.
        self._add(row, torch.float32 if query.dtype in HALF else query.dtype)

    def _add(self, row: AttentionRow, dtype: torch.dtype) -> None:
        # [B, H, T, S]; without gradients no scores are saved for a backward pass.
        num_scores = math.prod(row.shape[:-1]) * row.num_keys if torch.is_grad_enabled() else 0
        modules = tuple(filter(None, [self._path()]))
        self._calls.append(replace(row, score_bytes=num_scores * dtype.itemsize, modules=modules))


@functools.cache
def _backend_of(func: Any) -> str:
    """Return the attention backend of an operation, or `softmax` if it may be attention; otherwise empty."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if fused := FUSED.fullmatch(name):
        return fused[fused.lastindex or 0]
    return {"_safe_softmax": "math", "_softmax": "softmax"}.get(name, "")


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def warning_of(rows: Iterable[AttentionRow]) -> str:
    """Return a warning if attention over many tokens is quadratic; otherwise empty.

    Example:
        >>> warning_of([AttentionRow("flash", (1, 2, 512, 4), 512, "float32", "causal")])
        ''
    """
    long = [row for row in rows if row.remedy and min(row.shape[-2], row.num_keys) >= LONG]
    if not long:
        return ""
    worst = max(long, key=lambda row: row.score_bytes)
    modules = ", ".join(dict.fromkeys(worst.modules[:3])) or "the model"
    return f"attention is quadratic in memory in {modules}: {worst}\n  try: {worst.remedy}"
