"""Detect which kernels computed attention, from the operations of one forward pass.

`FlopCount` and `Recorder` pass each operation to `AttentionWatch`. `F.scaled_dot_product_attention` chooses a
backend for each call. The memory of the backend `math` is quadratic in the number of tokens, but PyTorch does
not warn if only this backend is possible. A fused kernel is a single operation, which is recognized by its
name. Quadratic attention is recognized by its softmax. The backend `math` calls `_safe_softmax`. Some modules
compute the scores themselves, for example `nn.MultiheadAttention` with `need_weights=True`, or `eager` in
transformers. Such modules call `_softmax` on a [.., T, T] tensor.

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
"""Pattern for names of fused kernels in torch 2.13 and flash_attn; the matching group names the backend."""
REMEDIES = {
    "math": (
        "dropout 0.0 on a CPU, half precision without a mask on CUDA; "
        "+callbacks=attention callbacks.attention.backend=flash names the reason"
    ),
    "softmax": ASK_FOR_SDPA,
    "flex": "torch.compile(flex_attention)",  # compiled flex attention has another name
}
"""Code change for the user to make, by backend; these backends keep all scores in memory."""
LONG = 512
"""Minimum number of tokens for a warning about quadratic attention."""


@dataclass(frozen=True)
class AttentionRow:
    """Attention calls with the same backend, shapes, dtype and mask.

    Args:
        backend: `flash`, `efficient`, `cudnn`, `flex`, `varlen`, `math`, or `softmax`.
        shape: Shape `[B, H, T, E]` of the query; for `math` and `softmax`, shape `[B, H, T, S]` of the
            scores.
        num_keys: Number S of keys.
        dtype: Dtype of the query or scores.
        mask: `none`, `causal` or `dense`; empty if unknown.
        calls: Number of calls in a forward pass.
        score_bytes: Bytes of the scores after the softmax, which quadratic attention saves for the backward
            pass. A fused kernel does not save scores.
        modules: Names of the modules that call attention, in order; empty in a compiled model.
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
        """A code change for the user to paste; empty if a fused kernel ran."""
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
    """Collects attention calls among the observed operations, until the first backward pass begins.

    Args:
        path: Function that returns the name of the running module.

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
            # Calls of repeated blocks differ only in their module.
            key = replace(row, modules=())
            before = found.get(key)
            found[key] = row if before is None else replace(
                before, calls=before.calls + 1, modules=(*before.modules, *row.modules),
                score_bytes=before.score_bytes + row.score_bytes,
            )  # fmt: skip
        return list(found.values())

    def observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the operation that `__torch_dispatch__` received, if the operation computes attention."""
        self._is_done = self._is_done or in_backward()
        backend = "" if self._is_done else _backend_of(func)
        if not backend:
            return
        # Under DDP, operations that the compiler traces also arrive here, and must not count.
        tracing = torch_private("torch._guards:TracingContext", "the report of attention")
        is_nested = getattr(args[0] if args else None, "is_nested", False)  # nested tensors have no shape
        if is_nested or tracing.try_get() is not None:
            return
        if backend not in ("math", "softmax"):
            self._add_fused(backend, func, args, kwargs)
        # Attention scores are square matrices; the softmax of a classifier or a router is not square.
        elif backend == "math" or (out.dim() > 2 and out.shape[-2] == out.shape[-1] > 1):
            self._add(AttentionRow(backend, tuple(out.shape), out.shape[-1], _name(out)), out.dtype)

    def _add_fused(self, backend: str, func: Any, args: Any, kwargs: Any) -> None:
        schema = getattr(func, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        # In all fused kernels, the first two tensors are the query and the key.
        query, key = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][:2]
        is_dense = any(given.get(name) is not None for name in ("attn_mask", "attn_bias"))
        is_causal = given.get("is_causal") or given.get("causal")
        mask = "causal" if is_causal else "dense" if is_dense else "none"
        row = AttentionRow(backend, tuple(query.shape), key.shape[-2], _name(query), mask)
        # `math` computes the scores of half-precision queries in float32.
        self._add(row, torch.float32 if query.dtype in HALF else query.dtype)

    def _add(self, row: AttentionRow, dtype: torch.dtype) -> None:
        # Scores have the shape [B, H, T, S]; with grad mode off, no scores are saved.
        num_scores = math.prod(row.shape[:-1]) * row.num_keys if torch.is_grad_enabled() else 0
        modules = tuple(filter(None, [self._path()]))
        self._calls.append(replace(row, score_bytes=num_scores * dtype.itemsize, modules=modules))


@functools.cache
def _backend_of(func: Any) -> str:
    """Return an operation's attention backend; `softmax` for a plain softmax; empty for other operations."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if fused := FUSED.fullmatch(name):
        return fused[fused.lastindex or 0]
    return {"_safe_softmax": "math", "_softmax": "softmax"}.get(name, "")


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def warning_of(rows: Iterable[AttentionRow]) -> str:
    """Return a warning if attention over `LONG` or more tokens is quadratic; otherwise an empty string.

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
