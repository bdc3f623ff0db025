"""The output projection of a model: finding it, and having its logits computed when they are read.

A call of the module returns `LazyLogits`; a loss calls it again, with its hooks, and computes in its forward.
There its weight is whole under ZeRO-3 and FSDP2, and what they do for a backward pass they do once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.callbacks._tiled_loss.lazy_logits import IDENTITIES, LazyLogits, lazy
from lightning_eff.callbacks._tiled_loss.rules import RULES
from lightning_eff.core import model_surgery
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.shards import GatheredAtOnce
from lightning_eff.kernels.cross_entropy import (
    LowRank,
    linear_cross_entropy,
    tile_rows_of,
    token_logprobs,
)
from lightning_eff.kernels.linear import TritonLinear
from lightning_eff.kernels.matmul import autocast_dtype

PLAIN = (nn.Linear, TritonLinear)
_untraced: Any = torch.compiler.disable
Compute = Callable[[Tensor], Tensor]


class LateProjection:
    """Computes the logits of a linear layer when they are read, until `remove` is called.

    Args:
        module: An `nn.Linear`, or PEFT's LoRA of one.
        tile_budget_mib: As in `linear_cross_entropy`.

    Raises:
        ConfigError: Another kind of layer.
    """

    def __init__(self, module: nn.Module, *, tile_budget_mib: float | None = None) -> None:
        self.module: Any = module
        self.linear: Any = getattr(module, "base_layer", module)
        is_adapted = self.linear is not module
        if type(self.linear) not in PLAIN or (is_adapted and not hasattr(module, "_plain_adapter")):
            kind = type(module).__name__
            raise ConfigError(key="head", value=kind, allowed="an nn.Linear, or one with a LoRA adapter")
        self._gathered = GatheredAtOnce(module) if is_adapted else None  # its weights and the adapter's
        self.tile_budget_mib = tile_budget_mib
        self.num_losses = 0
        self.rows = 0  # of the largest loss
        self.tile_rows = 0
        self.held_bytes = 0  # of its logits, which were not
        self.readers: Counter[str] = Counter()
        """Functions that needed whole logits."""
        self.keeps_mean = False
        self._mean: tuple[object, Tensor] | None = None
        """The node of the last mean loss, and its number of targets; if `keeps_mean`."""
        self._compute: Compute | None = None
        self._forward: Compute = self.module.forward
        self._call_with_hooks: Any = self.module._call_impl  # noqa: SLF001 - as of torch 2.10 to 2.13
        self.module.forward, self.module._call_impl = self._in_forward, self._call  # noqa: SLF001

    @staticmethod
    def is_late(module: nn.Module) -> bool:
        """Return whether a module's logits are computed when they are read."""
        return "_call_impl" in vars(module)

    def remove(self) -> None:
        """Have the module compute its logits when it is called."""
        for name in ("forward", "_call_impl"):
            self.module.__dict__.pop(name, None)
        if self._gathered is not None:
            self._gathered.undo()

    @_untraced
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        is_plain = (
            isinstance(x, Tensor) and type(x) is not LazyLogits and x.is_floating_point() and x.ndim > 0
        )
        is_adapted = self.linear is not self.module
        if not is_plain or (is_adapted and self.module._plain_adapter(x) is None):  # noqa: SLF001
            return self._run(None, *args, **kwargs)
        dtype = autocast_dtype(x.device.type, x.dtype, self.linear.weight.dtype) or x.dtype
        return lazy(self, x, self.linear.out_features, dtype)

    def _in_forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compute or self._forward)(*args, **kwargs)

    def _run(self, compute: Compute | None, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its hooks, and compute in its forward."""
        self._compute = compute
        try:
            return self._call_with_hooks(*args, **kwargs)
        finally:
            self._compute = None

    def needs_gradient(self) -> bool:
        """Return whether a weight of it is trained."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def whole(self, x: Tensor, reader: str) -> Tensor:
        """Return the logits as the model would have computed them, for the function `reader`."""
        self.readers[reader] += 1
        return self._run(None, x)

    def read(self, logits: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function makes of logits, without them; None where it needs them."""
        rule = RULES.get(func)
        return None if rule is None else rule(logits, func, args, kwargs)

    def cross_entropy(self, logits: LazyLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the cross-entropy in tiles."""
        self._count(logits)
        loss = self._tiled(linear_cross_entropy, logits, target, options)
        is_mean = options["reduction"] == "mean" and options["class_weight"] is None
        if self.keeps_mean and is_mean and loss.grad_fn is not None:
            self._mean = _node(loss), (target != options["ignore_index"]).sum()
        return loss

    def targets_of(self, loss: Tensor) -> Tensor | None:
        """Return the number of targets of a loss, if it is the last mean loss itself; forget that one."""
        mean, self._mean = self._mean, None
        return mean[1] if mean is not None and _node(loss) is mean[0] else None

    def logprobs(self, logits: LazyLogits, target: Tensor) -> Tensor:
        """Return the log-probabilities of targets in tiles."""
        self._count(logits)
        return self._tiled(token_logprobs, logits, target, {})

    @torch.no_grad()
    def argmax(self, x: Tensor) -> Tensor:
        """Return the class of the largest logit of each row."""
        rows = x.reshape(-1, x.shape[-1])
        step = tile_rows_of(rows, self.linear.out_features, self.tile_budget_mib)

        def compute(rows: Tensor) -> Tensor:
            return torch.cat([self._forward(part).argmax(-1) for part in rows.split(step)])

        return self._run(compute, rows).view(x.shape[:-1])

    def _tiled(self, function: Any, logits: LazyLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            linear, low_rank = self.linear, self._low_rank(x)
            return function(
                x, linear.weight, target, linear.bias, low_rank=low_rank, **options,
                tile_budget_mib=self.tile_budget_mib, **logits.form.scale(),
            )  # fmt: skip

        with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
            result: Tensor = self._run(compute, logits.x)
        return result.to(torch.promote_types(result.dtype, logits.dtype))

    def _low_rank(self, x: Tensor) -> LowRank | None:
        """Return what an adapter adds: its rows, and its second weight."""
        if self.linear is self.module:
            return None
        layer = self.module
        name = layer._plain_adapter(x)  # noqa: SLF001
        low: Tensor = layer.lora_A[name](layer.lora_dropout[name](x))
        return low * layer.scaling[name], layer.lora_B[name].weight

    def _count(self, logits: LazyLogits) -> None:
        self.num_losses += 1
        rows = logits.x.numel() // max(logits.x.shape[-1], 1)
        if rows >= self.rows:
            flat = logits.x.reshape(-1, logits.x.shape[-1])
            self.rows, self.held_bytes = rows, rows * logits.width * logits.dtype.itemsize
            self.tile_rows = tile_rows_of(flat, logits.width, self.tile_budget_mib)


def _node(loss: Tensor) -> Any:
    """Return what computed a loss, whatever identities of autograd came after it."""
    node: Any = loss.grad_fn
    while type(node).__name__ in IDENTITIES:
        node = node.next_functions[0][0]
    return node


def find_head(model: nn.Module, head: str | None) -> tuple[str, nn.Module] | None:
    """Return the output projection of a model and its name; None where it has none.

    That of Hugging Face's models is what they name as such. Else it is the linear layer outside of the
    repeated blocks that shares its weight with an embedding, or has the most outputs, more than inputs.

    Args:
        model: The model.
        head: Its name; None to find it.

    Raises:
        ConfigError: No module has that name, or several may be meant.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if head is not None:
        if head not in named:
            linear = [name for name, module in named.items() if isinstance(module, nn.Linear)]
            allowed = (
                f"the name of the output projection, for example {linear[-1] if linear else 'model.head'}"
            )
            raise ConfigError(key="head", value=head, allowed=allowed)
        return head, _trained_copy(named[head])
    getters = [getattr(module, "get_output_embeddings", None) for module in (model, *named.values())]
    found = {id(module): module for get in getters if callable(get) and (module := get()) is not None}
    if not found:
        adapters = [name for name, module in named.items() if hasattr(module, model_surgery.ADAPTER)]
        inner = tuple(f"{name}." for name in (*model_surgery.repeated_blocks(model), *adapters))
        outside = {
            id(module): module
            for name, module in named.items()
            if isinstance(_plain(module), nn.Linear) and not name.startswith(inner)
        }
        embeddings = [module.weight for module in named.values() if isinstance(module, nn.Embedding)]
        tied = {
            key: each for key, each in outside.items() if any(_plain(each).weight is w for w in embeddings)
        }
        wide = {
            key: each for key, each in outside.items() if _plain(each).out_features > _plain(each).in_features
        }
        most = max((_plain(each).out_features for each in wide.values()), default=0)
        found = tied or {key: each for key, each in wide.items() if _plain(each).out_features == most}
    if not found:
        return None
    names = [name for name, module in named.items() if id(module) in found]
    if len(found) > 1:
        raise ConfigError(key="head", value=None, allowed=f"one of {', '.join(names)}")
    return names[0], _trained_copy(named[names[0]])


def _plain(module: nn.Module) -> Any:
    """Return the layer that a module computes, without its adapter."""
    trained = _trained_copy(module)
    return getattr(trained, "base_layer", trained)


def _trained_copy(module: Any) -> nn.Module:
    """Return the copy that PEFT trains of a module in `modules_to_save`; else the module."""
    copies: Any = getattr(module, "modules_to_save", None)
    return next(iter(copies.values())) if isinstance(copies, nn.ModuleDict) and len(copies) == 1 else module
