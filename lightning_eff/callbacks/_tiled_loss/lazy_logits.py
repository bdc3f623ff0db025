"""Logits that are not computed until it is known what is read of them.

`LazyLogits` stands for the result of an output projection: it has its shape, dtype and device, and holds the
hidden states. Where a loss reads it, the loss is computed in tiles; a change of shape or dtype, and a scale,
give another `LazyLogits`; whatever else reads it gets the whole logits, computed as the model would have,
with their gradients. So an unchanged `training_step` has the same result in any case.

Why not find the loss in the code or replace the model's forward: every model and library calls it by other
functions, and what is not recognised there would be wrong; here it is only not faster.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any, Never, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_eff.core.errors import ConfigError

METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "get_device", "__len__", "is_signed", "register_hook",
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


class Head(Protocol):
    """The output projection that logits stand for."""

    def needs_gradient(self) -> bool:
        """Return whether a weight of it is trained."""
        ...

    def whole(self, x: Tensor, reader: str) -> Tensor:
        """Return the logits as the model would have computed them, for the function `reader`."""
        ...

    def read(self, logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function makes of logits, without them; None where it needs them."""
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
    """All logits that were made of the same projection's."""
    computed: Tensor | None

    def whole(self, reader: str) -> Tensor:
        """Return what the model would have computed, once; `reader` is the function that needs it."""
        known = self.computed
        if known is not None and (
            known.requires_grad or not (torch.is_grad_enabled() and self.requires_grad)
        ):
            return known
        if self.origin is None:
            known = self.head.whole(self.x, reader)
        else:
            source = self.origin.source.whole(reader)
            known = self.origin.func(source, *self.origin.args[1:], **self.origin.kwargs)
        self.computed = known
        return known

    def is_computed(self) -> bool:
        """Return whether the projection was computed whole, so that tiles save nothing more."""
        first = self
        while first.origin is not None:
            first = first.origin.source
        return first.computed is not None

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            if name in METADATA or (name == "__get__" and getattr(func, "__self__", None) in PROPERTIES):
                return func(*args, **kwargs)
            first = args[0] if args else kwargs.get("input")
            if isinstance(first, LazyLogits) and not first.is_computed():
                if type(first.grad_fn).__name__ not in ("NoneType", *IDENTITIES):
                    _refuse_gradient(first)
                result = first.head.read(first, func, args, kwargs)
                if result is not None:
                    return result
            attribute = getattr(func, "__self__", None) if name == "__get__" else None
            reader = f"Tensor.{attribute.__name__}" if attribute is not None else name
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                for each in _all_logits(args):  # what was made of them before must not see the change
                    _ = [other.whole(reader) for ref in each.derived if (other := ref()) is not None]
            return func(*_computed(args, reader), **_computed(kwargs, reader))

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_computed(args, str(func)), **_computed(kwargs or {}, str(func)))


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
    made.derived = [] if origin is None else origin.source.derived
    made.derived.append(weakref.ref(made))
    if is_trained:  # only a function that torch's own protocol does not reach gives it a gradient
        made.register_hook(_refuse_gradient)
    return made


def _refuse_gradient(_: Tensor) -> Never:
    raise ConfigError(
        key="callbacks.tiled_loss", value="a loss that reads logits unseen by torch's function protocol",
        allowed="a loss by torch's functions",
        remedies=("~callbacks.tiled_loss", "loss = linear_cross_entropy(hidden, head.weight, targets)"),
    )  # fmt: skip


def _all_logits(value: Any) -> list[LazyLogits]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, LazyLogits)]


def _computed(value: Any, reader: str) -> Any:
    """Replace logits by what they stand for, in containers too."""
    return tree_map(lambda leaf: leaf.whole(reader) if isinstance(leaf, LazyLogits) else leaf, value)
