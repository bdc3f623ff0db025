"""Find out which kind of attention ran, from the operations of one step.

`F.scaled_dot_product_attention` chooses a backend for each call and says nothing when only its quadratic one,
`math`, is left. A fused backend is one operation, known by its name. `math`, and a softmax between two
products that never asked for a fused backend (`nn.MultiheadAttention` with `need_weights=True`, `eager` of
transformers), are found by following the scores: the result of a batched product [.., T, S], through whatever
is done to it element by element, to a softmax over S, and its result to another batched product.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from lightning_eff.core.attention_backends import AttentionCall, choose, remedy
from lightning_eff.core.text import human_bytes

SOFTMAX = "softmax"
"""A softmax between two products, without `scaled_dot_product_attention`."""
MATH = "math"
QUADRATIC = (MATH, SOFTMAX)
LONG = 512
"""Tokens from which quadratic attention is warned of."""
FUSED = (
    (re.compile(r"^_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?$"), r"\1"),
    (re.compile(r"^_scaled_dot_product_fused_attention_overrideable$"), "fused"),
    (re.compile(r"^_(flash|efficient)_attention_forward$"), r"\1"),
    (re.compile(r"^flex_attention$"), "flex"),
    (re.compile(r"^_?varlen_attn$"), "varlen"),
    (re.compile(r"^_?flash_attn_(varlen_)?(fwd|forward)\w*$"), "flash_attn"),
)
"""Names of operations (torch 2.13, the package flash_attn), with the backend."""


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


@dataclass
class _Scores:
    """What is known of a tensor [.., T, S] of scores, or of their softmax."""

    head_sizes: tuple[int, ...]
    shape: tuple[int, ...]
    mask: Tensor | None = None
    mask_kind: Literal["none", "bool", "float"] = "none"
    is_softmax: bool = False
    backend: str = SOFTMAX
    dropout: float = 0.0
    held_bytes: int = 0


class AttentionWatch:
    """Look at each operation of a forward pass.

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
        self.seen: list[AttentionRow] = []
        """One row a call."""
        self.is_graph = False
        """Whether the operations are those of a graph that will be compiled."""
        self._path, self._capability = path, capability
        self._scores: dict[int, tuple[weakref.ref[Any], _Scores]] = {}
        """By the id of a storage."""
        self._bool_masks: dict[int, weakref.ref[Any]] = {}
        """Storages of float masks that were made from a bool."""
        self._mask_storages: dict[int, weakref.ref[Any]] = {}

    def rows(self) -> list[AttentionRow]:
        """Return the calls, alike ones as one row, in the order of the first call."""
        found: dict[Any, AttentionRow] = {}
        for row in self.seen:
            key = (row.backend, row.call, row.mask, row.reason)
            before = found.get(key)
            found[key] = row if before is None else replace(
                before, calls=before.calls + 1, modules=(*before.modules, *row.modules),
                score_bytes=before.score_bytes + row.score_bytes,
                mask_bytes=before.mask_bytes + row.mask_bytes,
            )  # fmt: skip
        return list(found.values())

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Look at an operation that `__torch_dispatch__` got, with its result."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            return  # a backward pass, or what is computed again in it
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        backend = _fused_backend(name)
        if backend:
            self._add_fused(backend, func, args, kwargs)
        elif name in ("bmm", "baddbmm"):
            left, right = args[:2] if name == "bmm" else args[1:3]
            self._see_product(left, right, out)
        elif name in ("_softmax", "_safe_softmax"):
            scores = self._scores_of(args[0])
            if scores is not None and args[1] in (-1, args[0].dim() - 1):
                backend = MATH if name == "_safe_softmax" else SOFTMAX
                shape = tuple(args[0].shape)
                self._keep(out, replace(scores, shape=shape, is_softmax=True, backend=backend))
        elif name == "where":
            if args[0].dtype == torch.bool and args[0].shape[-2:] == out.shape[-2:]:
                _remember(self._bool_masks, out)
            self._follow(name, args, out)
        elif self._scores:
            self._follow(name, args, out)

    def _follow(self, name: str, args: Any, out: Any) -> None:
        """Keep track of scores through an operation element by element."""
        result = out[0] if isinstance(out, tuple) and out else out
        if not isinstance(result, Tensor) or result.dim() < 2:
            return
        for index, value in enumerate(args):
            scores = self._scores_of(value)
            if scores is None or result.shape[-2:] != scores.shape[-2:]:
                continue
            others = [x for x in (*args[:index], *args[index + 1 :]) if isinstance(x, Tensor) and x.dim() > 1]
            if not scores.is_softmax and others:
                scores = replace(scores, mask=others[0], mask_kind=self._dtype_of(others[0]))
            elif scores.is_softmax and (name == "native_dropout" or others):
                scores = replace(scores, dropout=float(args[1]) if name == "native_dropout" else 1.0)
                scores.held_bytes += sum(x.nbytes for x in (others or out[1:]) if self._scores_of(x) is None)
            if scores.is_softmax or result.untyped_storage() is not value.untyped_storage():
                self._keep(result, scores)
            return

    def _keep(self, tensor: Tensor, scores: _Scores) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._scores and self._scores[key][1].is_softmax == scores.is_softmax:
            scores.held_bytes = max(scores.held_bytes, self._scores[key][1].held_bytes)
        elif scores.is_softmax:
            scores.held_bytes += storage.nbytes()
        self._scores[key] = (weakref.ref(storage, lambda _: self._scores.pop(key, None)), scores)

    def _scores_of(self, value: Any) -> _Scores | None:
        if not self._scores or not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        found = self._scores.get(id(value.untyped_storage()))
        return None if found is None else found[1]

    def _dtype_of(self, mask: Tensor) -> Literal["bool", "float"]:
        """Return the kind of a mask as the model gave it, before torch made it one to add."""
        is_bool = mask.dtype == torch.bool or id(mask.untyped_storage()) in self._bool_masks
        return "bool" if is_bool else "float"

    def _see_product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        scores = self._scores_of(left)
        if scores is None or not scores.is_softmax:
            self._keep(out, _Scores((left.shape[-1],), tuple(out.shape)))
            return
        *batch, length, num_keys = scores.shape
        head_size = scores.head_sizes[0]
        call = AttentionCall(
            query=(*batch, length, head_size), key=(*batch, num_keys, head_size),
            value=(*batch, num_keys, right.shape[-1]), dtype=right.dtype, mask=scores.mask_kind,
            mask_requires_grad=scores.mask is not None and scores.mask.requires_grad, dropout=scores.dropout,
        )  # fmt: skip
        self._add(scores.backend, call, scores.mask, score_bytes=scores.held_bytes)

    def _add_fused(self, backend: str, func: Any, args: Any, kwargs: Any) -> None:
        schema = getattr(func, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = [x for x in args if isinstance(x, Tensor)][:3]
        mask = next((given[n] for n in ("attn_mask", "attn_bias") if given.get(n) is not None), None)
        is_causal = given.get("is_causal") or given.get("causal")
        kind = ("causal" if is_causal else "none") if mask is None else self._dtype_of(mask)
        call = AttentionCall(
            query=tuple(query.shape), key=tuple(key.shape), value=tuple(value.shape), dtype=query.dtype,
            mask=kind, dropout=float(given.get("dropout_p") or 0.0),
        )  # fmt: skip
        self._add(backend, call, mask)

    def _add(self, backend: str, call: AttentionCall, mask: Tensor | None, *, score_bytes: int = 0) -> None:
        mask_bytes = 0
        if mask is not None and id(mask.untyped_storage()) not in self._mask_storages:
            mask_bytes = mask.untyped_storage().nbytes()
            _remember(self._mask_storages, mask)
        kind: str = call.mask
        values = "" if mask is None else pattern_of(mask)
        if values == "causal" and backend == MATH:
            kind = values  # math itself makes a mask of is_causal=True
        elif values:
            kind = f"{kind} that {'is causal' if values == 'causal' else 'masks nothing'}"
        reason = advice = ""
        if backend == "flex" and not self.is_graph:
            reason, advice = "flex_attention is not compiled", "torch.compile(flex_attention)"
            score_bytes = call.scores_bytes(self._capability)
        elif backend == SOFTMAX:
            reason = "scores are computed by the model, not by F.scaled_dot_product_attention"
            advice = (
                "need_weights=False for nn.MultiheadAttention, attn_implementation='sdpa' for transformers, "
                "else y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"
            )
        elif backend == MATH:
            choice = choose(call, self._capability)
            reason = "; ".join(dict.fromkeys(choice.refused.values()))
            advice = remedy(call, choice)
            if choice.backend != MATH:
                reason, advice = "math was selected", "no sdpa_kernel(MATH), no enable_math_sdp alone"
        self.seen.append(
            AttentionRow(backend, 1, call, kind, (self._path(),), score_bytes, mask_bytes, reason, advice)
        )


def warning_of(rows: Iterable[AttentionRow]) -> str:
    """Return what to warn of: quadratic attention over many tokens; empty for nothing."""
    long = [row for row in rows if row.reason and row.call.key[-2] >= LONG]
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
    if isinstance(mask, FakeTensor) or mask.is_meta or mask.requires_grad:
        return ""
    with _disable_current_modes(), torch.no_grad():
        if bool(mask.all() if mask.dtype == torch.bool else not mask.any()):
            return "nothing"
        # All samples and heads at once would be a copy of the mask; a mask of one sample is often shared.
        if mask.numel() != mask.shape[-1] * mask.shape[-2]:
            return ""
        passes = mask.view(mask.shape[-2:])
        passes = passes if mask.dtype == torch.bool else passes == 0
        return "causal" if torch.equal(passes, torch.ones_like(passes).tril()) else ""


def _remember(storages: dict[int, weakref.ref[Any]], tensor: Tensor) -> None:
    """Know a storage by its id for as long as it lives."""
    storage = tensor.untyped_storage()
    key = id(storage)
    storages[key] = weakref.ref(storage, lambda _: storages.pop(key, None))


@functools.cache
def _fused_backend(name: str) -> str:
    """Return the backend that an operation belongs to; empty for none."""
    found = (match.expand(backend) for pattern, backend in FUSED if (match := pattern.match(name)))
    return next(found, "")
