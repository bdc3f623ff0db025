"""Compute logits only when they are read, so that an unmodified `training_step` computes its loss in tiles.

`callbacks/tiled_loss` replaces the call of an output projection by a `LateProjection`. The new call returns
`LazyLogits`: a tensor that has the shape, dtype and device of the logits, but stores only the hidden
states. `RULES` lists the functions that do not need full logits. Under these rules, a loss is computed in
tiles, and a change of shape, dtype or scale returns new `LazyLogits`. Every other function gets full logits,
and so does every call that no rule covers. Full logits and their gradients are computed as the model itself
would compute them. Reading full logits is correct but slower, and `readers` counts these reads.

Losses and full logits are computed later, in a call of the projection that runs the module's hooks. In these
hooks, ZeRO-3 and FSDP2 gather the weights and prepare the backward pass. The first call of the projection
skips the hooks, so each hook runs once.

Why not replace the model's loss or its forward: each model and library uses different functions. A patch
that overlooks a function would give a wrong result; here, an unknown function gets full logits.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_eff.core.errors import ConfigError, Remedy
from lightning_eff.core.model_surgery import MODULE_HOOKS, is_foreign
from lightning_eff.core.shards import GatheredAtOnce, is_sharded
from lightning_eff.kernels.cross_entropy import (
    LowRank,
    linear_cross_entropy,
    product_dtype,
    tile_rows_of,
    token_logprobs,
)
from lightning_eff.kernels.linear import TritonLinear

PLAIN = (nn.Linear, TritonLinear)
"""Layer classes that compute exactly `x @ weight.T + bias`."""
METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_signed", "get_device", "__len__", "shape", "dtype", "device", "ndim", "layout", "requires_grad",
    "is_leaf", "is_cuda", "is_cpu", "is_sparse", "is_nested", "is_quantized", "is_meta", "is_mps", "is_xpu",
    "itemsize", "nbytes", "grad_fn", "_base", "_backward_hooks",
}  # fmt: skip
"""Methods and attributes that do not read the values of the logits."""
IDENTITIES = ("PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward")
"""Autograd functions of DeepSpeed 0.19 that leave a module's output and its gradient unchanged."""
FABRIC = "lightning.fabric.wrappers"
"""Python module of the hook that Fabric 2.6 uses to check that Fabric itself runs the backward pass."""
_untraced: Any = torch.compiler.disable


@dataclass(frozen=True)
class Form:
    """Deferred transform of logits l: `softcap * tanh(l / softcap) / temperature`, as in the kernels.

    Args:
        temperature: Divisor of the logits.
        softcap: Bound of the logits; if None, no tanh is applied.
        is_class_second: Whether the classes are the second axis, as in `F.cross_entropy`.
        is_log: Whether a log-softmax is applied last.
    """

    temperature: float = 1.0
    softcap: float | None = None
    is_class_second: bool = False
    is_log: bool = False


@dataclass(frozen=True, eq=False)
class Use:
    """A call of a function on logits, `func(logits, *args, **kwargs)`."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def on(self, tensor: Tensor) -> Any:
        """Call the function on another tensor."""
        return self.func(tensor, *self.args, **self.kwargs)


@dataclass(eq=False)
class Call:
    """One call of a projection, shared by all logits derived from its result.

    Args:
        projection: The projection.
        x: Input of the projection [*batch, D].
        state: Versions and settings that the logits depend on, recorded at the time of the call.
        autocast: Arguments of `torch.autocast` at the time of the call.
        logits: All logits of the call, in the order in which they were derived.
        has_loss: Whether a loss of these logits was computed in tiles. The gradient of such a loss bypasses
            the logits.
    """

    projection: LateProjection
    x: Tensor
    state: tuple[Any, ...]
    autocast: dict[str, Any]
    logits: list[weakref.ref[LazyLogits]] = field(default_factory=list["weakref.ref[LazyLogits]"])
    has_loss: bool = False


class LazyLogits(Tensor):
    """Placeholder for the logits [*batch, V] of hidden states x [*batch, D]; created by `_lazy`."""

    call: Call
    x: Tensor
    form: Form
    origin: tuple[LazyLogits, Use] | None
    """Logits and function call from which these logits were derived; None for the projection's own result."""
    computed: Tensor | None

    def whole(self, reader: str) -> Tensor:
        """Return full logits, as the model would compute them; `reader` names the function that reads."""
        self.check_graph()
        if self.computed is None:
            self.call.projection.compute(self.call, reader)
        return self.computed  # pyright: ignore[reportReturnType] - set by `compute`

    def check_graph(self) -> None:
        """Reject logits that passed through an unknown autograd function, which may change their gradient."""
        if self.grad_fn is not None and type(self.grad_fn).__name__ not in IDENTITIES:
            refuse(self)

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # torch's losses also take the logits as `input=`; the rules expect the logits as first argument.
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        name = getattr(func, "__name__", "")
        # Reading `logits.shape` calls the method `__get__` of a descriptor that has the attribute's name.
        if name == "__get__":
            name = func.__self__.__name__
        # Without this context, the calls below would recurse into this method.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            if name in METADATA:
                return func(*args, **kwargs)
            logits = args[0] if args else None
            if func in RULES and isinstance(logits, LazyLogits) and logits.computed is None:
                logits.check_graph()
                use = Use(func, args[1:], kwargs)
                result = RULES[func](logits, use)
                if isinstance(result, dict):
                    has_gradient = torch.is_grad_enabled() and logits.requires_grad
                    derived: dict[str, Any] = {"x": logits.x, "dtype": logits.dtype, "form": logits.form}
                    derived |= {"requires_grad": has_gradient, "origin": (logits, use)}
                    return _lazy(logits.call, **(derived | result))
                if result is not None:
                    return result
            # These functions read the gradient of the logits, which a tiled loss never computes.
            if func in (Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad):
                for each in tree_leaves((args, kwargs)):
                    if isinstance(each, LazyLogits) and each.call.has_loss:
                        refuse(each)
            return func(*_computed(args, name), **_computed(kwargs, name))

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A call from C++ arrives here without `__torch_function__`.
        return func(*_computed(args, str(func)), **_computed(kwargs or {}, str(func)))


def _computed(value: Any, reader: str) -> Any:
    """Replace lazy logits by full logits, also inside containers."""
    return tree_map_only(LazyLogits, lambda logits: logits.whole(reader), value)


def refuse(_: Tensor, value: str = "a loss that bypasses torch's function protocol to read logits") -> Never:
    """Raise the error for a loss that cannot be computed in tiles."""
    raise ConfigError(
        key="",
        value=f"loss in tiles, by TiledLoss or tile_loss: {value}",
        allowed="a loss by torch's functions, in the step that computes its logits",
        remedies=(
            "loss = linear_cross_entropy(hidden, head.weight, targets)",
            Remedy(
                "~callbacks.tiled_loss, or restore() on the results of tile_loss",
                "remove TiledLoss, or restore() on the results of tile_loss",
            ),
        ),
    )


@_untraced
def _lazy(
    call: Call, *, x: Tensor, dtype: torch.dtype, form: Form, requires_grad: bool, origin: Any = None
) -> LazyLogits:
    """Create lazy logits, which allocate no memory; the arguments become their attributes."""
    # [*batch, V], or [B, V, *rest] if the classes are the second axis.
    size = [*x.shape[:-1], call.projection.width]
    size = [size[0], size[-1], *size[1:-1]] if form.is_class_second else size
    make: Any = getattr(Tensor, "_make_wrapper_subclass")  # noqa: B009 - private in torch 2.11 to 2.13
    made: LazyLogits = make(LazyLogits, size, dtype=dtype, device=x.device, requires_grad=requires_grad)
    made.call, made.x, made.form, made.origin, made.computed = call, x, form, origin, None
    # Store only a weak reference: logits that the step has dropped must not be computed.
    call.logits.append(weakref.ref(made))
    if requires_grad:  # only a function that bypasses torch's function protocol gives these logits a gradient
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            made.register_hook(refuse)
    return made


class LateProjection:
    """Delays the logits of a linear layer until a function reads them; `restore` undoes this.

    Args:
        module: An `nn.Linear`, or PEFT's LoRA layer around an `nn.Linear`.
        name: The layer's name in its model.
        tile_budget_mib: As in `linear_cross_entropy`.

    Raises:
        ConfigError: The class of the module is not supported.
    """

    def __init__(self, module: nn.Module, name: str, *, tile_budget_mib: float | None = None) -> None:
        self.module: Any = module
        self.linear: Any = getattr(module, "base_layer", module)
        self._is_adapted = self.linear is not module
        if type(self.linear) not in PLAIN or (self._is_adapted and not hasattr(module, "_plain_adapter")):
            kind = type(module).__name__
            allowed = f"the name of an nn.Linear, or of one with a LoRA adapter, not of {kind}"
            raise ConfigError(key="head", value=name, allowed=allowed)
        # The layers inside an adapted layer are not called, so ZeRO-3 would not gather their weights.
        self._gathered = GatheredAtOnce(module) if self._is_adapted else None
        self.width: int = self.linear.out_features
        self.tile_budget_mib = tile_budget_mib
        self.num_losses = 0
        self.rows = 0  # rows of the largest loss
        self.tile_rows = 0
        self.held_bytes = 0  # bytes of the largest loss's logits, which were not allocated
        self.readers: Counter[str] = Counter()
        """Number of reads of full logits, by function."""
        self.means: list[tuple[object, Tensor]] | None = None
        """Autograd node and number of targets of each mean loss; None if no callback needs these pairs."""
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()  # calls whose logits are still referenced
        self._step_hook = register_optimizer_step_pre_hook(self.compute_held)
        self._work: Callable[..., Tensor] | None = None  # replaces the module's forward unless it is None
        self._forward: Callable[..., Tensor] = self.module.forward
        self._call_with_hooks: Any = self.module._call_impl  # noqa: SLF001 - as of torch 2.11 to 2.13
        self.module.forward, self.module._call_impl = self._in_forward, self._call  # noqa: SLF001

    def restore(self) -> None:
        """Restore the module's own call, which computes the logits immediately."""
        self._step_hook.remove()
        for name, own in (("forward", self._in_forward), ("_call_impl", self._call)):
            # Another library may have replaced the method since; its replacement must stay.
            if vars(self.module).get(name) == own:
                del self.module.__dict__[name]
        if self._gathered is not None:
            self._gathered.undo()

    def __getstate__(self) -> dict[str, Any]:
        # Autograd nodes, weak references and hooks cannot be pickled.
        return vars(self) | {"means": None, "_calls": weakref.WeakSet(), "_step_hook": None}

    @_untraced
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Return lazy logits if possible; otherwise, compute the logits with the module's own call."""
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        obstacle = "its call" if not isinstance(x, Tensor) or type(x) is LazyLogits else self._obstacle(x)
        if obstacle:
            self.readers[obstacle] += 1
            return self._call_with_hooks(*args, **kwargs)
        device, parameters = x.device.type, self.module.parameters()
        autocast: dict[str, Any] = {"device_type": device, "enabled": torch.is_autocast_enabled(device)}
        autocast["dtype"] = torch.get_autocast_dtype(device)
        call = Call(self, x, self._state(x), autocast)
        self._calls.add(call)
        # The logits of `F.linear` would require a gradient in the same cases.
        is_trained = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))
        dtype = product_dtype(x, self.linear.weight)
        return _lazy(call, x=x, dtype=dtype, form=Form(), requires_grad=is_trained)

    def _obstacle(self, x: Tensor) -> str:
        """Return the reason to compute the logits now; empty if they can be computed later."""
        if vars(self.module).get("forward") != self._in_forward:
            return "its replaced forward"
        functorch: Any = torch._C._functorch  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        is_traced = torch.jit.is_tracing() or torch.compiler.is_exporting()  # pyright: ignore[reportPrivateImportUsage]
        is_traced |= functorch.peek_interpreter_stack() is not None
        if is_traced or not x.is_floating_point() or not x.ndim:
            return "an export, or a transform of torch.func"  # which need a tensor with values
        own, of_all = vars(self.module), vars(torch_module)
        hooks = [(*own[name].values(), *of_all[f"_global{name}"].values()) for name in MODULE_HOOKS]
        if any(is_foreign(hook) for each in hooks for hook in each):
            return "its hooks"  # a hook that expects logits would get a loss
        if not self._is_adapted:
            return ""
        # Dropout would draw another mask when the logits are computed later.
        name = self.module._plain_adapter(x)  # noqa: SLF001
        dropout: Any = None if name is None else self.module.lora_dropout[name]
        if dropout is None or (dropout.training and getattr(dropout, "p", 0.0) > 0.0):
            return "its adapter, which has dropout or is not a single plain one"
        return ""

    def _state(self, x: Tensor) -> tuple[Any, ...]:
        """Return the state that the logits depend on, with versions in place of tensor values."""
        module, parameters = self.module, [*self.module.parameters()]
        # Include ids, since an assignment (`layer.weight = ...`) does not change the old weight's version.
        weights = [(id(each), each.requires_grad, each.dtype) for each in parameters]
        # Gathering changes the versions of sharded weights; inference tensors have no versions.
        versions = [
            each._version  # noqa: SLF001
            for each in (x, *parameters)
            if not (each.is_inference() or (each is not x and is_sharded(each)))
        ]
        adapter: Any = None
        if self._is_adapted:
            flags = module.training, module.disable_adapters, module.merged
            adapter = (tuple(module.active_adapters), flags, tuple(module.scaling.items()))
        return versions, weights, adapter, vars(module).get("forward") == self._in_forward

    def _in_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `_work` if it is set, or else the module's own forward."""
        if self._work is None:
            return self._forward(*args, **kwargs)
        linear, low_rank = self.linear, self._low_rank(*args) if self._is_adapted else None
        return self._work(*args, linear.weight, bias=linear.bias, low_rank=low_rank)

    def _low_rank(self, x: Tensor) -> LowRank:
        """Return both factors of an adapter's product: scaled low-rank rows, and the weight of `lora_B`."""
        layer = self.module
        name = layer._plain_adapter(x)  # noqa: SLF001
        low: Tensor = layer.lora_A[name](layer.lora_dropout[name](x))
        return low * layer.scaling[name], layer.lora_B[name].weight

    @contextmanager
    def _as_at(self, call: Call, work: Callable[..., Tensor] | None) -> Generator[None]:
        """Run `work` in place of the module's forward, with the autocast settings of an earlier call.

        The module's state must still equal the state at the time of that call.
        """
        if call.state != self._state(call.x):
            refuse(call.x, "logits that are read after their weights or inputs have changed")
        self._work = work
        try:
            with torch.autocast(**call.autocast):
                yield
        finally:
            self._work = None

    @_untraced
    def compute(self, call: Call, reader: str) -> None:
        """Compute those logits of a call that are still referenced, as the model would compute them.

        Derived logits are computed at the same time. A later in-place write then changes a tensor and its
        views, but no other logits.
        """
        self.readers[reader] += 1
        for each in call.logits:
            logits = each()
            if logits is None:
                continue
            # Build a graph if the logits need a gradient, even if their first reader runs under no_grad.
            with torch.set_grad_enabled(logits.requires_grad):
                if logits.origin is None:
                    with self._as_at(call, None):
                        logits.computed = self._call_with_hooks(call.x)
                else:
                    source, use = logits.origin
                    logits.computed = use.on(source.computed)  # pyright: ignore[reportArgumentType]

    def compute_held(self, *_: object) -> None:
        """Compute logits that are still referenced (for example by a metric) before the weights change."""
        for call in [*self._calls]:
            is_held = any((each := ref()) is not None and each.computed is None for ref in call.logits)
            if is_held and call.state == self._state(call.x):  # otherwise, a later read is rejected
                self.compute(call, "a later reader")
        self._calls.clear()

    @_untraced
    def in_tiles(self, logits: LazyLogits, kernel: Any, target: Tensor, **options: Any) -> Tensor:
        """Compute a loss of logits in tiles, with a function of `kernels.cross_entropy`."""
        self.num_losses += 1
        rows = logits.x.reshape(-1, logits.x.shape[-1])
        # The report shows the figures of the largest loss.
        if len(rows) >= self.rows:
            self.rows, self.held_bytes = len(rows), len(rows) * self.width * logits.itemsize
            self.tile_rows = tile_rows_of(rows, self.width, self.tile_budget_mib)
        # The kernels apply the pending transform to each tile.
        options |= {"softcap": logits.form.softcap, "temperature": logits.form.temperature}
        work = partial(kernel, target=target, tile_budget_mib=self.tile_budget_mib, **options)
        has_gradient = torch.is_grad_enabled() and logits.requires_grad
        with torch.set_grad_enabled(has_gradient), self._as_at(logits.call, work):
            result = self._call_with_hooks(logits.x)
        logits.call.has_loss = True
        # The kernels return float32; `F.cross_entropy` of float64 logits returns float64.
        return result.to(torch.promote_types(result.dtype, logits.dtype))

    @_untraced
    @torch.no_grad()
    def argmax(self, logits: LazyLogits) -> Tensor:
        """Return the class of the largest logit of each row."""
        rows = logits.x.reshape(-1, logits.x.shape[-1])
        # The temperature and the soft cap keep the order of the logits, so they can be omitted.
        step = tile_rows_of(rows, self.width, self.tile_budget_mib)

        def largest(rows: Tensor, _: Tensor, **__: Any) -> Tensor:
            return torch.cat([self._forward(part).argmax(-1) for part in rows.split(step)])

        with self._as_at(logits.call, largest):
            return self._call_with_hooks(rows).view(logits.x.shape[:-1])


def node_of(loss: Tensor) -> Any:
    """Return the autograd node that computed a loss; skip the identities that DeepSpeed applies to losses."""
    node: Any = loss.grad_fn
    while type(node).__name__ in IDENTITIES:
        node = node.next_functions[0][0]
    return node


def _reshaped(logits: LazyLogits, use: Use) -> dict[str, Any] | None:
    """Reshape the hidden states; return None unless V stays the last axis of the logits."""
    # Find the new shape by a call on a meta tensor, which has no memory.
    found = use.on(torch.empty(logits.shape, dtype=logits.dtype, device="meta"))
    is_same = found.shape[-1:] == (logits.call.projection.width,) and found.dtype == logits.dtype
    if logits.form.is_class_second or not is_same:
        return None
    return {"x": logits.x.reshape(*found.shape[:-1], logits.x.shape[-1])}


def _indexed(logits: LazyLogits, use: Use) -> dict[str, Any] | None:
    """Index the hidden states; return None unless the index selects rows and keeps the full last axis."""
    *batch, width = logits.x.shape
    # An index that keeps the full last axis selects the same rows whatever the length of that axis.
    probe = torch.empty(*batch, logits.call.projection.width + width, device="meta")
    # Keep the values of a bool index, which decide the size of the result; other indices need only a shape.
    on_meta = tree_map_only(Tensor, lambda i: i if i.dtype == torch.bool else i.to("meta"), use.args[0])
    try:
        found = probe[on_meta]
        # On a GPU, an index of classes on the hidden states would end in a device-side assert.
        is_rows = found.shape[-1:] == probe.shape[-1:] and not logits.form.is_class_second
        x = use.on(logits.x) if is_rows else None
    except (RuntimeError, IndexError):
        return None  # the index selects classes, or is invalid for the full logits too
    return {"x": x} if x is not None and x.shape == (*found.shape[:-1], width) else None


def _permuted(logits: LazyLogits, use: Use) -> dict[str, Any] | None:
    """Move the classes from the last axis to the second."""
    meta = torch.empty(logits.shape, device="meta")
    # Compare strides too: an exchange of two axes of equal length changes only the strides.
    found, wanted = use.on(meta), meta.movedim(-1, min(1, meta.ndim - 1))
    is_same = (found.shape, found.stride()) == (wanted.shape, wanted.stride())
    if logits.form.is_class_second or logits.ndim < 3 or not is_same:
        return None
    return {"form": replace(logits.form, is_class_second=True)}


def _cast(logits: LazyLogits, use: Use) -> Any:
    """Return lazy logits for a cast to a wider dtype; compute full logits for a cast to a narrower dtype."""
    # Losses are computed in at least float32, so a wider dtype changes only the dtype of the result.
    to = use.on(torch.empty(0, dtype=logits.dtype, device=logits.device))
    if to.device != logits.device:
        return None
    is_wider = to.dtype in (torch.float32, torch.float64) and to.itemsize >= logits.itemsize
    if to.dtype == logits.dtype or is_wider:
        return {"dtype": to.dtype}
    return use.on(logits.whole(f"a cast {logits.dtype} -> {to.dtype}".replace("torch.", "")))


def _detached(logits: LazyLogits, _: Use) -> dict[str, Any]:
    # While gradients are disabled, keep x itself, since an autograd function may detach an input it returns.
    x = logits.x.detach() if torch.is_grad_enabled() else logits.x
    return {"x": x, "requires_grad": False}


def _scaled(logits: LazyLogits, use: Use) -> dict[str, Any] | None:
    """Multiply or divide the logits by a number."""
    form, number = logits.form, use.args[0] if len(use.args) == 1 else None
    # Only positive numbers: a negative factor would reverse the order of the logits.
    if use.kwargs or form.is_log or not isinstance(number, (int, float)) or not 1e-30 < number < 1e30:
        return None
    is_quotient = use.func in (Tensor.div, Tensor.__truediv__, torch.div)
    temperature = form.temperature * number if is_quotient else form.temperature / number
    return {"form": replace(form, temperature=temperature)} if 1e-30 < temperature < 1e30 else None


def _capped(logits: LazyLogits, use: Use) -> dict[str, Any] | None:
    form = logits.form
    # A form has only one soft cap.
    if use.args or use.kwargs or form.is_log or form.softcap is not None:
        return None
    return {"form": replace(form, softcap=form.temperature)}  # tanh(l / t) = t * tanh(l / t) / t


def _is_over_classes(logits: LazyLogits, use: Use) -> bool:
    """Return whether the function's `dim` is the class axis."""
    dim = use.args[0] if use.args else use.kwargs.get("dim")
    classes = 1 if logits.form.is_class_second else logits.ndim - 1
    return isinstance(dim, int) and dim % logits.ndim == classes


def _log_softmax(logits: LazyLogits, use: Use) -> dict[str, Any] | None:
    dtype = use.kwargs.get("dtype") or logits.dtype
    is_known = len(use.args) <= 1 and set(use.kwargs) <= {"dim", "dtype", "_stacklevel"}
    is_known &= dtype in (logits.dtype, torch.float32)
    if not is_known or not _is_over_classes(logits, use) or logits.form.is_log:
        return None
    return {"dtype": dtype, "form": replace(logits.form, is_log=True)}


def _loss(logits: LazyLogits, use: Use) -> Tensor | None:
    """Compute `F.cross_entropy`, or `F.nll_loss` of a log-softmax, in tiles."""
    # Arguments may be positional or named, as in torch's own signature.
    bound = inspect.signature(use.func).bind(logits, *use.args, **use.kwargs)
    bound.apply_defaults()
    options, projection = bound.arguments, logits.call.projection
    target, _, class_weight = options.pop("target"), options.pop("input"), options.pop("weight")
    is_old = options.pop("size_average") is not None or options.pop("reduce") is not None
    is_class = isinstance(target, Tensor) and not target.dtype.is_floating_point
    # torch takes axis 1 as the class axis. In logits [B, T, V], axis 1 would be T.
    is_plain = type(target) is not LazyLogits and (logits.ndim <= 2 or logits.form.is_class_second)
    if is_old or not is_class or not is_plain or logits.form.is_log is not (use.func is F.nll_loss):
        return None
    if target.shape != logits.x.shape[:-1] or options["reduction"] not in ("mean", "sum", "none"):
        return None
    loss = projection.in_tiles(logits, linear_cross_entropy, target, class_weight=class_weight, **options)
    is_mean = options["reduction"] == "mean" and class_weight is None
    if projection.means is not None and is_mean and loss.grad_fn is not None:
        # `TiledLoss` compares this node with the node of the loss that `training_step` returns.
        projection.means.append((node_of(loss), (target != options["ignore_index"]).sum()))
    return loss


def _gathered(logits: LazyLogits, use: Use) -> Tensor | None:
    """Gather one log-probability per row, in tiles."""
    if use.kwargs or len(use.args) != 2 or not logits.form.is_log or logits.form.is_class_second:
        return None
    index = use.args[1]
    if not _is_over_classes(logits, use) or index.shape != (*logits.shape[:-1], 1):
        return None
    return logits.call.projection.in_tiles(logits, token_logprobs, index.squeeze(-1)).unsqueeze(-1)


def _argmax(logits: LazyLogits, use: Use) -> Tensor | None:
    if len(use.args) > 1 or set(use.kwargs) - {"dim"} or not _is_over_classes(logits, use):
        return None
    return logits.call.projection.argmax(logits)


def _hooked(logits: LazyLogits, use: Use) -> Any:
    """Attach a library's hook that does not read the gradient of logits."""
    hook = use.args[0] if use.args else None
    source = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    if source.startswith("torch.distributed."):  # FSDP2 adds the same hook to the loss
        return use.on(logits)
    return use.on(logits.x) if source == FABRIC and logits.x.requires_grad else None


RULES: dict[Any, Callable[[LazyLogits, Use], Any]] = {
    func: rule
    for rule, functions in (
        (_loss, (F.cross_entropy, F.nll_loss)),
        (_log_softmax, (F.log_softmax, torch.log_softmax, Tensor.log_softmax)),
        (_gathered, (Tensor.gather, torch.gather)),
        (_argmax, (Tensor.argmax, torch.argmax)),
        (_reshaped, (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)),
        (_reshaped, (Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze, Tensor.contiguous)),
        (_indexed, (Tensor.__getitem__,)),
        (_permuted, (Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.swapaxes)),
        (_permuted, (Tensor.movedim, torch.movedim, inspect.getattr_static(Tensor, "mT").__get__)),
        (_cast, (Tensor.float, Tensor.double, Tensor.to)),
        (_detached, (Tensor.detach, torch.detach)),
        (_scaled, (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)),
        (_scaled, (Tensor.div, Tensor.__truediv__, torch.div)),
        (_capped, (Tensor.tanh, torch.tanh)),
        (_hooked, (Tensor.register_hook,)),
    )
    for func in functions
}
"""Rules for the functions that accept lazy logits; every other function gets full logits.

A rule returns the function's result or, for derived logits, a dictionary of changed arguments of `_lazy`. A
rule returns None if the function needs full logits.
"""
