"""Find out which kernel computed attention, from the operations of one forward pass.

`F.scaled_dot_product_attention` chooses a backend for each call and reports nothing when only its quadratic
one, `math`, is left. A fused kernel is one operation, known by its name. Quadratic attention is a batched
product [.., T, S], a softmax over S and another product: the softmax is `_safe_softmax` in `math`, and
`_softmax` where a model computes its scores itself (`nn.MultiheadAttention` with `need_weights=True`, `eager`
of transformers).

A compiled graph shows its fused kernels only: the compiler has fused the softmax of quadratic attention with
its neighbours.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext

from lightning_eff.core.attention_backends import ASK_FOR_SDPA, AttentionCall, choose, remedy, switched_on
from lightning_eff.core.text import human_bytes
from lightning_eff.report.module_tracker import in_backward

log = logging.getLogger(__name__)
FUSED = re.compile(
    r"_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(?:_for_cpu|_overrideable)?"
    r"|_(flash|efficient)_attention_forward|(flex)_attention|_?(varlen)_attn"
    r"|_?(flash_attn)_(?:varlen_)?(?:fwd|forward)\w*"
)
"""Names of fused kernels (torch 2.13, the package flash_attn); the group is the backend."""
MATH, SOFTMAX = "math", "softmax"
SOFTMAX_OF = {"_safe_softmax": MATH, "_softmax": SOFTMAX}
MASKED_BY = {"add": 1, "add_": 1, "masked_fill": 1, "masked_fill_": 1, "where": 0}
"""Operations that apply a mask to scores, with the index of the mask among their arguments."""
LONG = 512
"""Tokens from which quadratic attention is warned of."""


@dataclass(frozen=True)
class AttentionRow:
    """Calls of one backend that are alike.

    Args:
        backend: `flash`, `efficient`, `cudnn`, `flex`, `varlen`, `math`, or `softmax`.
        calls: Number of calls in a forward pass.
        call: Shapes, dtype and mask.
        modules: Modules that called, in order; empty in a compiled model.
        score_bytes: Bytes of scores that the calls keep for the backward pass, unless they are recomputed.
        mask_bytes: Bytes of the dense mask of one call.
        reason: Why no fused backend ran; empty where one did.
        remedy: What to change, to paste.
    """

    backend: str
    calls: int
    call: AttentionCall
    modules: tuple[str, ...] = ()
    score_bytes: int = 0
    mask_bytes: int = 0
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        shape = list(self.call.query)
        keys = f" with {self.call.key[-2]} keys" if self.call.key[-2] != self.call.query[-2] else ""
        text = f"{self.calls} call{'s' * (self.calls != 1)} by {self.backend} {shape}{keys} "
        mask = f"dense, {human_bytes(self.mask_bytes)}" if self.mask_bytes else self.call.mask
        text += f"{str(self.call.dtype).removeprefix('torch.')}, mask: {mask}"
        text += f"; {human_bytes(self.score_bytes)} of scores" if self.score_bytes else ""
        return text + (f"; {self.reason}" if self.reason else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values, for JSON, with its text."""
        fields = asdict(self) | {"dtype": str(self.call.dtype).removeprefix("torch."), "text": str(self)}
        fields |= {name: list(getattr(self.call, name)) for name in ("query", "key", "value")}
        return {name: value for name, value in fields.items() if name != "call"} | {"mask": self.call.mask}


class _Mask(NamedTuple):
    """What is known of a mask: not the tensor, which would live longer for being looked at."""

    kind: Literal["none", "causal", "bool", "float"] = "none"
    num_bytes: int = 0
    requires_grad: bool = False

    @classmethod
    def of(cls, mask: Tensor) -> _Mask:
        kind = "bool" if mask.dtype == torch.bool else "float"
        return cls(kind, min(mask.nbytes, mask.untyped_storage().nbytes()), mask.requires_grad)


@dataclass
class _Scores:
    """Scores between the two products of quadratic attention."""

    head_size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    mask: _Mask
    backend: str = ""
    """Of their softmax; empty before it."""
    dropout: float = 0.0


class AttentionWatch:
    """Look at each operation until the first backward pass begins.

    Args:
        path: Returns the name of the module that is being called.
        capability: Compute capability of the device, times ten; 0 for a CPU.

    Example:
        >>> import torch.nn.functional as F
        >>> from lightning_eff.report.flops import FlopCount
        >>> x = torch.ones(1, 2, 8, 4)
        >>> with FlopCount() as count:
        ...     _ = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> print(*count.attention.rows())
        1 call by flash [1, 2, 8, 4] float32, mask: causal
    """

    def __init__(self, path: Callable[[], str] = str, *, capability: int = 0) -> None:
        self._path, self._capability = path, capability
        self._calls: list[AttentionRow] = []
        """One row a call."""
        self._scores: dict[tuple[int, ...], _Scores] = {}
        """Results of batched products that may be scores, by their last two axes."""
        self._is_done = False

    def rows(self) -> list[AttentionRow]:
        """Return the calls, those that are alike as one row, in the order of the first."""
        found: dict[Any, AttentionRow] = {}
        for row in self._calls:
            key = row.backend, row.call, row.mask_bytes, row.reason
            before = found.get(key)
            found[key] = row if before is None else replace(
                before, calls=before.calls + 1, modules=(*before.modules, *row.modules),
                score_bytes=before.score_bytes + row.score_bytes,
            )  # fmt: skip
        return list(found.values())

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Look at an operation that `__torch_dispatch__` got, with its result; an error ends the looking."""
        self._is_done = self._is_done or in_backward()
        # Under DDP the calls that the compiler makes while it traces come here too.
        if self._is_done or TracingContext.try_get() is not None:
            return
        try:
            self._see(func, args, kwargs, out)
        except Exception as error:
            # Arguments of any operation, of any package: a run must not fail for what only looks at it.
            self._is_done = True
            log.debug("attention is not looked at any more", exc_info=error)

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        if fused := FUSED.fullmatch(name):
            self._see_fused(fused[fused.lastindex or 0], func, args, kwargs)
        elif name == "bmm":
            self._see_product(args[0], args[1], out, _Mask())
        elif name == "baddbmm":
            has_mask = kwargs.get("beta", 1) != 0
            self._see_product(args[1], args[2], out, _Mask.of(args[0]) if has_mask else _Mask())
        elif self._scores:
            self._see_between(name, args, out)

    def _see_product(self, left: Tensor, right: Tensor, out: Tensor, mask: _Mask) -> None:
        """Take a product for the first one of attention, unless its left operand is a softmax of scores."""
        scores = self._scores.get(tuple(left.shape[-2:]))
        if scores is None or not scores.backend:
            self._scores[tuple(out.shape[-2:])] = _Scores(left.shape[-1], tuple(out.shape), out.dtype, mask)
            return
        self._scores.clear()
        *batch, length, num_keys = scores.shape
        call = AttentionCall(
            query=(*batch, length, scores.head_size), key=(*batch, num_keys, scores.head_size),
            value=(*batch, num_keys, right.shape[-1]), dtype=scores.dtype, mask=scores.mask.kind,
            mask_requires_grad=scores.mask.requires_grad, dropout=scores.dropout,
            requires_grad=torch.is_grad_enabled(),
        )  # fmt: skip
        self._add(scores.backend, call, scores.mask)

    def _see_between(self, name: str, args: Any, out: Any) -> None:
        """Look at what is done to scores between the two products."""
        result = out[0] if isinstance(out, tuple) else out
        if not isinstance(result, Tensor) or result.layout != torch.strided or result.is_nested:
            return
        scores = self._scores.get(tuple(result.shape[-2:]))
        if scores is None:
            return
        if name in SOFTMAX_OF and args[1] in (-1, result.dim() - 1):
            scores.backend, scores.shape = SOFTMAX_OF[name], tuple(result.shape)
        elif not scores.backend and name in MASKED_BY:
            mask = args[MASKED_BY[name]]
            # A factor or bias of each head has no value for each key.
            is_mask = isinstance(mask, Tensor) and mask.dim() > 1 and mask.shape[-1] == result.shape[-1]
            scores.mask = _Mask.of(mask) if is_mask else scores.mask
        elif scores.backend and name == "_to_copy":
            scores.dtype = result.dtype  # of the operands: half precision has its softmax in float32
        elif scores.backend and name == "native_dropout":
            scores.dropout = args[1]
        elif scores.backend and name == "bernoulli_":
            scores.dropout = 1 - args[1] if len(args) > 1 else 0.5

    def _see_fused(self, backend: str, func: Any, args: Any, kwargs: Any) -> None:
        schema = getattr(func, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][:3]
        dense = next(
            (given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None
        )
        mask = _Mask("causal" if given.get("is_causal") or given.get("causal") else "none")
        mask = mask if dense is None else _Mask.of(dense)
        call = AttentionCall(
            query=tuple(query.shape), key=tuple(key.shape), value=tuple(value.shape), dtype=query.dtype,
            mask=mask.kind, dropout=float(given.get("dropout_p") or 0.0),
            requires_grad=torch.is_grad_enabled(),
        )  # fmt: skip
        self._add(backend, call, mask)

    def _add(self, backend: str, call: AttentionCall, mask: _Mask) -> None:
        reason, advice = _why_quadratic(backend, call, self._capability)
        score_bytes = call.scores_bytes(self._capability) if reason else 0
        modules = tuple(filter(None, [self._path()]))
        self._calls.append(
            AttentionRow(backend, 1, call, modules, score_bytes, mask.num_bytes, reason, advice)
        )


def _why_quadratic(backend: str, call: AttentionCall, capability: int) -> tuple[str, str]:
    """Return why no fused backend computed a call, and what to change; empty where one did."""
    if backend == "flex":  # compiled it is no operation of this name
        return "flex_attention is not compiled", "torch.compile(flex_attention)"
    if backend == SOFTMAX:
        return "scores are computed by the model, not by F.scaled_dot_product_attention", ASK_FOR_SDPA
    if backend != MATH:
        return "", ""
    if switched_on() == [MATH]:
        return "math was selected", "no sdpa_kernel(MATH), no enable_math_sdp alone"
    choice = choose(call, capability)
    if choice.backend == MATH:
        return "; ".join(dict.fromkeys(choice.refused.values())), remedy(call, choice)
    return "shapes or strides that fused backends reject", "x.contiguous(), and a mask of [B, H, T, S]"


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
