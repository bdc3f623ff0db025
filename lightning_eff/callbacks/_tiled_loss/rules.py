"""What is known of logits without computing them: their other shapes, dtypes and scales, and their losses.

Each rule does to the hidden states what a function would have done to the logits, or computes a loss in
tiles. A rule that is not sure returns None, and the logits are computed whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_eff.callbacks._tiled_loss.lazy_logits import Head, LazyLogits, Origin, lazy


class TiledHead(Head, Protocol):
    """A projection that computes what can be read of logits in tiles."""

    def cross_entropy(self, logits: LazyLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the cross-entropy."""
        ...

    def logprobs(self, logits: LazyLogits, target: Tensor) -> Tensor:
        """Return the log-probabilities of targets."""
        ...

    def argmax(self, logits: LazyLogits) -> Tensor:
        """Return the class of the largest logit of each row."""
        ...


Rule = Callable[[LazyLogits, Any, Any, Any], Any]
"""Returns a result in tiles, or None where there is none: of logits, function, arguments and keywords."""


def tiled(logits: LazyLogits) -> TiledHead:
    """Return the projection of logits."""
    head: Any = logits.head
    return head


def _derive(logits: LazyLogits, func: Any, args: Any, kwargs: Any, **changes: Any) -> LazyLogits:
    """Return the logits that a function makes of logits."""
    how: dict[str, Any] = {"x": logits.x, "width": logits.width, "dtype": logits.dtype, "form": logits.form}
    return lazy(logits.head, origin=Origin(logits, func, args, kwargs), **(how | changes))


def _reshaped(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> LazyLogits | None:
    """Do to hidden states what a function does to the leading axes of logits."""
    x, width, rest = logits.x, logits.width, args[1:]
    if func in VIEWS:  # the last size is V, or what is left
        given = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        if kwargs or not given or given[-1] not in (width, -1):
            return None
        rest = ([*given[:-1], x.shape[-1]],)
    meta = torch.empty(logits.shape, device="meta")
    try:
        expected = func(meta, *_on_meta(args[1:]), **_on_meta(kwargs))
        found = func(x, *rest, **kwargs)
    except (RuntimeError, IndexError, TypeError):
        return None  # the whole logits say what is wrong
    if logits.form.is_class_second or not (expected.ndim and found.ndim):
        return None
    if expected.shape != (*found.shape[:-1], width) or found.shape[-1] != x.shape[-1]:
        return None
    if func not in VIEWS:  # of other classes it would make as many others, if it leaves them alone
        others = torch.empty((*logits.shape[:-1], width + 1), device="meta")
        if func(others, *_on_meta(args[1:]), **_on_meta(kwargs)).shape[-1] != width + 1:
            return None
    return _derive(logits, func, args, kwargs, x=found)


def _on_meta(value: Any) -> Any:
    """Return an index without values, but for those of bool, on which a size depends."""
    return tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and leaf.dtype != torch.bool else leaf, value
    )


def _permuted(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> LazyLogits | None:
    """Move the classes from the last axis to the second."""
    if logits.form.is_class_second or logits.ndim < 3:
        return None
    meta = torch.empty(logits.shape, device="meta")
    found, wanted = func(meta, *args[1:], **kwargs), meta.movedim(-1, 1)
    if (found.shape, found.stride()) != (wanted.shape, wanted.stride()):
        return None
    return _derive(logits, func, args, kwargs, form=replace(logits.form, is_class_second=True))


def _cast(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Note a wider dtype, since losses in tiles are float32 at least; a narrower one rounds whole logits."""
    given = [*args[1:], *kwargs.values()]
    if any(
        isinstance(each, Tensor)
        or (isinstance(each, (str, torch.device)) and torch.device(each) != logits.device)
        for each in given
    ):
        return None
    dtype = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *args[1:], **kwargs).dtype
    is_wider = dtype in (torch.float32, torch.float64) and dtype.itemsize >= logits.dtype.itemsize
    if dtype != logits.dtype and not is_wider:
        reader = f"a cast {logits.dtype} -> {dtype}".replace("torch.", "")
        return func(logits.whole(reader), *args[1:], **kwargs)
    return _derive(logits, func, args, kwargs, dtype=dtype)


def _detached(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> LazyLogits:
    # Without gradients it may be a function of autograd that returns its input: its result has a gradient.
    is_cut = torch.is_grad_enabled()
    return _derive(logits, func, args, kwargs, x=logits.x.detach() if is_cut else logits.x)


def _scaled(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> LazyLogits | None:
    """Multiply or divide by a number."""
    if kwargs or len(args) != 2 or logits.form.is_log or not isinstance(args[1], (int, float)):
        return None
    factor = float(args[1]) if func in PRODUCTS else 1.0 / args[1] if args[1] else 0.0
    if not 1e-30 < factor < 1e30:
        return None
    return _derive(logits, func, args, kwargs, form=logits.form.times(factor))


def _capped(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> LazyLogits | None:
    if kwargs or len(args) != 1 or logits.form.is_log or logits.form.after is not None:
        return None
    return _derive(logits, func, args, kwargs, form=replace(logits.form, after=1.0))


def _axis(logits: LazyLogits, dim: Any) -> bool:
    """Return whether an axis is that of the classes."""
    classes = 1 if logits.form.is_class_second else logits.ndim - 1
    return isinstance(dim, int) and dim % logits.ndim == classes


def _log_softmax(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> LazyLogits | None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    dtype = kwargs.get("dtype") or logits.dtype
    is_plain = len(args) <= 2 and set(kwargs) <= {"dim", "dtype", "_stacklevel"}
    if (
        not is_plain
        or not _axis(logits, dim)
        or logits.form.is_log
        or dtype not in (logits.dtype, torch.float32)
    ):
        return None
    return _derive(logits, func, args, kwargs, dtype=dtype, form=replace(logits.form, is_log=True))


def _loss(logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Compute `F.cross_entropy`, or `F.nll_loss` of a log-softmax."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    target, _ = options.pop("target"), options.pop("input")
    is_old = options.pop("size_average") is not None or options.pop("reduce") is not None
    is_class = isinstance(target, Tensor) and not target.dtype.is_floating_point
    is_plain = type(target) is not LazyLogits and (logits.ndim <= 2 or logits.form.is_class_second)
    if is_old or not is_class or not is_plain or logits.form.is_log is not (func is F.nll_loss):
        return None
    if target.shape != logits.x.shape[:-1] or options["reduction"] not in ("mean", "sum", "none"):
        return None
    options["class_weight"] = options.pop("weight")
    return tiled(logits).cross_entropy(logits, target, dict(options))


def _gathered(logits: LazyLogits, _: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Take one log-probability of each row."""
    if kwargs or len(args) != 3 or not logits.form.is_log or logits.form.is_class_second:
        return None
    index = args[2]
    if not _axis(logits, args[1]) or index.shape != (*logits.shape[:-1], 1):
        return None
    return tiled(logits).logprobs(logits, index.squeeze(-1)).unsqueeze(-1)


def _argmax(logits: LazyLogits, _: Any, args: Any, kwargs: Any) -> Tensor | None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if len(args) > 2 or set(kwargs) - {"dim"} or not _axis(logits, dim):
        return None
    return tiled(logits).argmax(logits)


MATRIX_TRANSPOSE: Any = vars(torch._C.TensorBase)["mT"].__get__  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
PRODUCTS = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul}
RULES: dict[Any, Rule] = {
    **dict.fromkeys(VIEWS, _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten, Tensor.__getitem__, Tensor.contiguous), _reshaped),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze), _reshaped),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((Tensor.swapaxes, Tensor.movedim, torch.movedim, MATRIX_TRANSPOSE), _permuted),
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.to), _cast),
    **dict.fromkeys((Tensor.detach, torch.detach), _detached),
    **dict.fromkeys(PRODUCTS, _scaled),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _scaled),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _capped),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), _log_softmax),
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _loss),
    **dict.fromkeys((Tensor.gather, torch.gather), _gathered),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
}
"""What tiles can do, by function."""
