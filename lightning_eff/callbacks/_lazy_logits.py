"""Logits that are not computed until it is known what is read of them.

`LazyLogits` stands for the result of an output projection: it has its shape, dtype and device, and holds the
hidden states. Where a loss reads it, the loss is computed in tiles; a change of shape or dtype, and a scale,
give another `LazyLogits`; whatever else reads it gets the whole logits, computed as the model would have,
with their gradients. So an unchanged `training_step` has the same result in any case.

`RULES` is all that is known of logits without computing them, by function: each rule does to the hidden
states what the function would have done to the logits, or computes a loss in tiles. A rule that is not sure
returns None, and the logits are computed whole.

Why not find the loss in the code or replace the model's forward: every model and library calls it by other
functions, and what is not recognised there would be wrong; here it is only not faster.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Never, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_eff.core.errors import ConfigError, Remedy

METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "get_device", "__len__", "is_signed",
}  # fmt: skip
"""Methods that read no values."""
PROPERTIES = [
    getattr(Tensor, name)
    for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu",
        "is_sparse", "is_nested", "is_quantized", "is_meta", "is_mps", "is_xpu", "itemsize", "nbytes",
        "grad_fn", "_base", "_backward_hooks",
    )
]  # fmt: skip
"""Attributes that read no values."""
IDENTITIES = ("PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward")
"""DeepSpeed's functions (0.19) around what a module returns; another function may change the gradient."""
FABRIC = "lightning.fabric.wrappers"
"""Module of the hook that Fabric (2.6) puts on what a model returns: it checks who runs the backward pass."""
_untraced: Any = torch.compiler.disable


class Head(Protocol):
    """The output projection that logits stand for."""

    def needs_gradient(self) -> bool:
        """Return whether a weight of it is trained."""
        ...

    def whole(self, logits: LazyLogits, reader: str) -> Tensor:
        """Return the logits as the model would have computed them, for the function `reader`."""
        ...

    def cross_entropy(self, logits: LazyLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the cross-entropy."""
        ...

    def logprobs(self, logits: LazyLogits, target: Tensor) -> Tensor:
        """Return the log-probabilities of targets."""
        ...

    def argmax(self, logits: LazyLogits) -> Tensor:
        """Return the class of the largest logit of each row."""
        ...


@dataclass(frozen=True)
class Form:
    """What was done to the classes of logits l: `after * tanh(before * l)`, or `before * l`.

    Args:
        before: Factor of l.
        after: Factor of the tanh; None for no tanh.
        is_class_second: Whether the classes are the second axis, as `F.cross_entropy` has them.
        is_log: Whether it is the log-softmax of the logits.
    """

    before: float = 1.0
    after: float | None = None
    is_class_second: bool = False
    is_log: bool = False

    def times(self, factor: float) -> Form:
        """Return the form after a multiplication."""
        if self.after is None:
            return replace(self, before=self.before * factor)
        return replace(self, after=self.after * factor)

    def scale(self) -> dict[str, Any]:
        """Return softcap and temperature of `linear_cross_entropy`: cap * tanh(l / cap) / temperature."""
        if self.after is None:
            return {"softcap": None, "temperature": 1.0 / self.before}
        return {"softcap": 1.0 / self.before, "temperature": 1.0 / (self.before * self.after)}


@dataclass(frozen=True, eq=False)
class Origin:
    """How logits were made of others."""

    source: LazyLogits
    func: Any
    args: Any
    kwargs: Any


class LazyLogits(Tensor):
    """Logits [*batch, V] of hidden states [*batch, D] that are not computed yet; made by `lazy`."""

    head: Head
    x: Tensor
    width: int
    form: Form
    origin: Origin | None
    derived: list[weakref.ref[LazyLogits]]
    """All logits that were made of the same call's."""
    computed: Tensor | None
    has_loss: bool
    """Of what a call returned: whether a loss was computed in tiles."""
    call: Any
    """Of what a call returned: what the projection was then."""

    def whole(self, reader: str) -> Tensor:
        """Return what the model would have computed, once; `reader` is the function that needs it."""
        if self.computed is None:
            if self.grad_fn is not None and type(self.grad_fn).__name__ not in IDENTITIES:
                refuse(self)
            # With a graph where the logits have one, whoever reads them first.
            with torch.set_grad_enabled(self.requires_grad):
                if self.origin is None:
                    self.computed = self.head.whole(self, reader)
                else:
                    source = self.origin.source.whole(reader)
                    self.computed = self.origin.func(source, *self.origin.args[1:], **self.origin.kwargs)
        return self.computed  # pyright: ignore[reportReturnType]

    @property
    def first(self) -> LazyLogits:
        """Return what the call of the projection returned, of which these were made."""
        found = self
        while found.origin is not None:
            found = found.origin.source
        return found

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            if name in METADATA or (name == "__get__" and getattr(func, "__self__", None) in PROPERTIES):
                return func(*args, **kwargs)
            first = args[0] if args else kwargs.get("input")
            if name == "register_hook" and isinstance(first, LazyLogits):
                hooked = _hooked_without_logits(first, args[1])
                if hooked is not None:
                    return func(hooked, *args[1:], **kwargs)
            if isinstance(first, LazyLogits) and first.first.computed is None:
                if first.grad_fn is not None and type(first.grad_fn).__name__ not in IDENTITIES:
                    refuse(first)
                rule = RULES.get(func)
                result = None if rule is None else rule(first, func, args, kwargs)
                if result is not None:
                    return result
            attribute = getattr(func, "__self__", None) if name == "__get__" else None
            reader = f"Tensor.{attribute.__name__}" if attribute is not None else name
            for each in _all_logits((args, kwargs)):
                if each.first.has_loss and (
                    name in ("register_hook", "retain_grad") or func is torch.autograd.grad
                ):
                    refuse(each)  # their gradient is behind them
                if _may_write(name, attribute, kwargs):  # which what was made of them before must not see
                    _ = [other.whole(reader) for ref in each.derived if (other := ref()) is not None]
            return func(*_computed(args, reader), **_computed(kwargs, reader))

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_computed(args, str(func)), **_computed(kwargs or {}, str(func)))


@_untraced
def lazy(
    head: Head,
    x: Tensor,
    width: int,
    dtype: torch.dtype,
    form: Form | None = None,
    origin: Origin | None = None,
) -> LazyLogits:
    """Return logits without memory.

    Args:
        head: Computes them.
        x: The hidden states [*batch, D].
        width: Number of classes.
        dtype: That the logits would have.
        form: What was done to them since the projection.
        origin: How they are made of others, for whoever needs them whole.
    """
    form = form or Form()
    size = [*x.shape[:-1], width]
    size = [size[0], width, *size[1:-1]] if form.is_class_second else size
    is_trained = torch.is_grad_enabled() and (x.requires_grad or head.needs_gradient())
    if origin is not None:
        is_trained = is_trained and origin.source.requires_grad and origin.func is not Tensor.detach
    make: Any = getattr(Tensor, "_make_wrapper_subclass")  # noqa: B009 - private in torch 2.10 to 2.13
    made: LazyLogits = make(LazyLogits, size, dtype=dtype, device=x.device, requires_grad=is_trained)
    made.head, made.x, made.width, made.form, made.origin, made.computed = head, x, width, form, origin, None
    made.has_loss, made.call = False, None
    made.derived = [] if origin is None else origin.source.derived
    made.derived.append(weakref.ref(made))
    if is_trained:  # only a function that torch's own protocol does not reach gives it a gradient
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            made.register_hook(refuse)
    return made


def _hooked_without_logits(logits: LazyLogits, hook: Any) -> Tensor | None:
    """Return what gets a hook of a library that reads no gradient of logits; None for any other hook."""
    source = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    if source.startswith("torch.distributed."):
        return logits  # of FSDP2: the loss has it too
    return logits.x if source == FABRIC and logits.x.requires_grad else None


def _may_write(name: str, attribute: Any, kwargs: Any) -> bool:
    """Return whether a function may change its arguments, or return what shares their memory."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    shares = name in ("numpy", "untyped_storage", "data_ptr") or attribute is Tensor.data
    return (
        is_in_place
        or is_operator
        or shares
        or name == "__setitem__"
        or bool({"inplace", "out"} & set(kwargs))
    )


def refuse(_: Tensor, value: str = "a loss that reads logits unseen by torch's function protocol") -> Never:
    """Raise the error that a loss cannot be computed in tiles."""
    raise ConfigError(
        key="",
        value=f"loss in tiles, by TiledLoss or tile_loss: {value}",
        allowed="a loss by torch's functions, in the step of its logits",
        remedies=(
            "loss = linear_cross_entropy(hidden, head.weight, targets)",
            Remedy(
                "~callbacks.tiled_loss, or restore() of what tile_loss returned",
                "remove TiledLoss, or restore() of what tile_loss returned",
            ),
        ),
    )


def _all_logits(value: Any) -> list[LazyLogits]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, LazyLogits)]


def _computed(value: Any, reader: str) -> Any:
    """Replace logits by what they stand for, in containers too."""
    return tree_map(lambda leaf: leaf.whole(reader) if isinstance(leaf, LazyLogits) else leaf, value)


Rule = Callable[[LazyLogits, Any, Any, Any], Any]
"""Returns a result in tiles, or None where there is none: of logits, function, arguments and keywords."""


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
    return logits.head.cross_entropy(logits, target, dict(options))


def _gathered(logits: LazyLogits, _: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Take one log-probability of each row."""
    if kwargs or len(args) != 3 or not logits.form.is_log or logits.form.is_class_second:
        return None
    index = args[2]
    if not _axis(logits, args[1]) or index.shape != (*logits.shape[:-1], 1):
        return None
    return logits.head.logprobs(logits, index.squeeze(-1)).unsqueeze(-1)


def _argmax(logits: LazyLogits, _: Any, args: Any, kwargs: Any) -> Tensor | None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if len(args) > 2 or set(kwargs) - {"dim"} or not _axis(logits, dim):
        return None
    return logits.head.argmax(logits)


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
