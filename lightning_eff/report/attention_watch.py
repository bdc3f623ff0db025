"""Find out which kind of attention ran, from the operations of one forward pass.

`F.scaled_dot_product_attention` chooses a backend for each call and says nothing when only its quadratic one,
`math`, is left. A fused backend is one operation, known by its name. `math`, and a softmax between two
products that never asked for a fused backend (`nn.MultiheadAttention` with `need_weights=True`, `eager` of
transformers), are found by following the scores: the result of a batched product [.., T, S], through whatever
is done to it element by element, to a softmax over S, and its result to another batched product.

Nothing is kept alive by being looked at: tensors are known by their storages, and these by weak references.
"""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_eff.core.attention_backends import HALF, AttentionCall, switched_on
from lightning_eff.report.attention import (
    MATH,
    PATTERNS,
    SOFTMAX,
    AttentionRow,
    alike,
    pattern_of,
    why_not_fused,
)
from lightning_eff.report.module_tracker import in_backward

log = logging.getLogger(__name__)
FUSED = (
    (re.compile(r"^_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?$"), r"\1"),
    (re.compile(r"^_scaled_dot_product_fused_attention_overrideable$"), "fused"),
    (re.compile(r"^_(flash|efficient)_attention_forward$"), r"\1"),
    (re.compile(r"^flex_attention$"), "flex"),
    (re.compile(r"^_?varlen_attn$"), "varlen"),
    (re.compile(r"^_?flash_attn_(varlen_)?(fwd|forward)\w*$"), "flash_attn"),
)
"""Names of operations (torch 2.13, the package flash_attn), with the backend."""
Storage = weakref.ref[Any]


@dataclass(frozen=True)
class _Mask:
    """A mask that was given to attention."""

    kind: Literal["none", "causal", "bool", "float"] = "none"
    pattern: str = ""
    requires_grad: bool = False
    num_bytes: int = 0
    """0 where an earlier call had the same."""

    def and_also(self, other: _Mask) -> _Mask:
        """Return two masks as one, of whose values nothing is said."""
        kind = "float" if "float" in (self.kind, other.kind) else "bool"
        requires_grad = self.requires_grad or other.requires_grad
        return _Mask(kind, "", requires_grad, self.num_bytes + other.num_bytes)


@dataclass(frozen=True)
class _Scores:
    """Scores, before or after their softmax."""

    shape: tuple[int, ...]
    """`[.., T, S]`, as the softmax gets them."""
    head_size: int
    mask: _Mask = _Mask()
    backend: str = ""
    """`math` or `softmax`; empty before the softmax."""
    dropout: float = 0.0
    held: dict[int, tuple[Storage, int]] = field(default_factory=dict[int, tuple[Storage, int]])
    """Storages of the softmax's result, of dropout's mask and result, with their bytes."""


@dataclass
class _Pending:
    """The last quadratic call: what it holds shows when the next one begins, and its dtype in a cast."""

    scores: _Scores
    call: AttentionCall
    path: str
    result: Storage


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
        self._is_later = False
        """Whether a backward pass has begun."""
        self._scores: dict[int, tuple[Storage, _Scores]] = {}
        """By the id of a storage, as the next two."""
        self._from_bool: dict[int, Storage] = {}
        """Masks of numbers that were made from a bool."""
        self._masks: dict[int, Storage] = {}
        self._pending: _Pending | None = None
        self._has_fused = True
        """Whether a fused backend was switched on when that call began."""
        self.error: Exception | None = None
        """What ended the looking."""

    def rows(self) -> list[AttentionRow]:
        """Return the calls, those that are alike as one row."""
        self.finish()
        return alike(self.seen)

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Look at an operation that `__torch_dispatch__` got, with its result; an error ends the looking."""
        if self.error is None:
            try:
                self._see(func, args, kwargs, out)
            except Exception as error:
                # A run must not fail for what only looks at it.
                self.error = error
                log.debug("attention is not looked at any more", exc_info=error)

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if in_backward():
            self.finish()
            self._is_later = True
            return  # a backward pass, or what is computed again in it
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        backend = _fused_backend(name)
        if backend:
            self._see_fused(backend, func, args, kwargs)
        elif name == "bmm":
            self._see_product(args[0], args[1], out)
        elif name == "baddbmm":
            self._see_product(args[1], args[2], out, args[0] if kwargs.get("beta", 1) else None)
        elif name in ("_softmax", "_safe_softmax"):
            scores = self._scores_of(args[0])
            if scores is not None and args[1] in (-1, args[0].dim() - 1):
                backend = MATH if name == "_safe_softmax" else SOFTMAX
                shape = tuple(args[0].shape)
                self._keep(out, replace(scores, shape=shape, backend=backend, held=_held([out])))
        else:
            if name == "where" and len(args) == 3 and args[0].shape[-2:] == out.shape[-2:]:
                _remember(self._from_bool, out)
            if self._scores:
                self._follow(name, args, out)

    def finish(self) -> None:
        """Add the last quadratic call, with the bytes of scores that are still there."""
        if self._pending is None:
            return
        scores, call, path = self._pending.scores, self._pending.call, self._pending.path
        self._pending = None
        held_bytes = sum(size for storage, size in scores.held.values() if storage() is not None)
        kind: str = scores.mask.kind
        if scores.backend == MATH and scores.mask.pattern == "causal":
            kind = "causal"  # math itself makes a mask of is_causal=True
        self._add(scores.backend, call, replace(scores.mask, kind=kind), path, held_bytes)

    def _follow(self, name: str, args: Any, out: Any) -> None:
        """Keep track of scores through an operation element by element, and of a result that is cast."""
        results = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        if not results or results[0].dim() < 2:
            return
        if name == "_to_copy" and results[0].dtype in HALF and self._pending is not None:
            last = self._pending
            if last.scores.backend == MATH and last.result() is args[0].untyped_storage():
                last.call = replace(last.call, dtype=results[0].dtype)  # math computes it in float32
        for index, value in enumerate(args):
            scores = self._scores_of(value)
            if scores is None or results[0].shape[-2:] != scores.shape[-2:]:
                continue
            others = [x for x in (*args[:index], *args[index + 1 :]) if _is_over(x, scores.shape)]
            if not scores.backend and others:
                mask = self._mask_of(others[0])
                # A mask that is filled in is True where nothing passes; of several none is all.
                is_one = scores.mask.kind == "none" and not name.startswith("masked_fill")
                scores = replace(scores, mask=mask if is_one else scores.mask.and_also(mask))
            elif scores.backend:
                if name == "native_dropout" or others:
                    dropout = float(args[1]) if name == "native_dropout" else 1.0
                    scores = replace(scores, dropout=dropout)
                scores = replace(scores, held=scores.held | _held([*results, *others]))
            self._keep(results[0], scores)
            return

    def _keep(self, tensor: Tensor, scores: _Scores) -> None:
        if _is_dense(tensor):
            key = id(_storage(tensor))
            self._scores[key] = (weakref.ref(_storage(tensor), lambda _: self._scores.pop(key, None)), scores)

    def _scores_of(self, value: Any) -> _Scores | None:
        if not self._scores or not _is_dense(value):
            return None
        found = self._scores.get(id(_storage(value)))
        return None if found is None else found[1]

    def _mask_of(self, mask: Tensor) -> _Mask:
        key = id(_storage(mask))
        is_bool = mask.dtype == torch.bool or key in self._from_bool
        num_bytes = 0 if key in self._masks else min(mask.nbytes, _storage(mask).nbytes())
        _remember(self._masks, mask)
        return _Mask("bool" if is_bool else "float", pattern_of(mask), mask.requires_grad, num_bytes)

    def _see_product(self, left: Tensor, right: Tensor, out: Tensor, added: Tensor | None = None) -> None:
        scores = self._scores_of(left)
        if scores is None or not scores.backend:
            mask = self._mask_of(added) if added is not None and _is_over(added, out.shape) else _Mask()
            self._keep(out, _Scores(tuple(out.shape), left.shape[-1], mask))
            return
        self.finish()
        *batch, length, num_keys = scores.shape
        call = AttentionCall(
            query=(*batch, length, scores.head_size), key=(*batch, num_keys, scores.head_size),
            value=(*batch, num_keys, right.shape[-1]), dtype=right.dtype, mask=scores.mask.kind,
            mask_requires_grad=scores.mask.requires_grad, dropout=scores.dropout,
        )  # fmt: skip
        self._pending = _Pending(scores, call, self._path(), weakref.ref(_storage(out)))
        self._has_fused = switched_on() != [MATH]

    def _see_fused(self, backend: str, func: Any, args: Any, kwargs: Any) -> None:
        self.finish()
        schema = getattr(func, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = [x for x in args if isinstance(x, Tensor)][:3]
        tensor = next((given[n] for n in ("attn_mask", "attn_bias") if given.get(n) is not None), None)
        mask = _Mask("causal" if given.get("is_causal") or given.get("causal") else "none")
        mask = mask if tensor is None else self._mask_of(tensor)
        call = AttentionCall(
            query=tuple(query.shape), key=tuple(key.shape), value=tuple(value.shape), dtype=query.dtype,
            mask=mask.kind, dropout=float(given.get("dropout_p") or 0.0),
        )  # fmt: skip
        self._add(backend, call, mask, self._path())

    def _add(self, backend: str, call: AttentionCall, mask: _Mask, path: str, score_bytes: int = 0) -> None:
        # After a backward pass: the next micro-batch, or another model.
        if self._is_later and any(row.call == call and row.modules == (path,) for row in self.seen):
            return
        about, instead = PATTERNS.get(mask.pattern, ("", "")) if mask.kind != "causal" else ("", "")
        kind = f"{mask.kind} that {about}" if about else mask.kind
        state = {"is_graph": self.is_graph, "has_fused": self._has_fused}
        reason, advice = why_not_fused(backend, call, self._capability, **state)
        if backend == "flex" and reason:
            score_bytes = call.scores_bytes(self._capability)
        row = AttentionRow(backend, 1, call, kind, (path,), score_bytes, mask.num_bytes, reason)
        self.seen.append(replace(row, remedy=advice or instead))


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_over(value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a value has one number for each key, so that it may be a mask of scores."""
    return _is_dense(value) and value.dim() > 1 and value.shape[-1] == shape[-1] > 1


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage: the same object for as long as it lives, so that its id identifies it."""
    return tensor.untyped_storage()


def _held(tensors: list[Tensor]) -> dict[int, tuple[Storage, int]]:
    storages = [_storage(tensor) for tensor in tensors if _is_dense(tensor)]
    return {id(storage): (weakref.ref(storage), storage.nbytes()) for storage in storages}


def _remember(storages: dict[int, Storage], tensor: Tensor) -> None:
    """Know a storage by its id for as long as it lives."""
    if _is_dense(tensor):
        key = id(_storage(tensor))
        storages[key] = weakref.ref(_storage(tensor), lambda _: storages.pop(key, None))


@functools.cache
def _fused_backend(name: str) -> str:
    """Return the backend that an operation belongs to; empty for none."""
    found = (match.expand(backend) for pattern, backend in FUSED if (match := pattern.match(name)))
    return next(found, "")
