"""The output projection of a model, whose logits are computed when they are read.

A call of the module returns `LazyLogits`; a loss calls it again, with its hooks, and computes in its forward.
There its weight is whole under ZeRO-3 and FSDP2, and what they do for a backward pass they do once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_eff.callbacks._lazy_logits import IDENTITIES, LazyLogits, lazy, refuse
from lightning_eff.core.errors import ConfigError
from lightning_eff.core.model_surgery import MODULE_HOOKS, is_foreign
from lightning_eff.core.shards import GatheredAtOnce, is_sharded
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
    """Computes the logits of a linear layer when they are read, until `restore` is called.

    Args:
        module: An `nn.Linear`, or PEFT's LoRA of one.
        name: Its name in its model.
        tile_budget_mib: As in `linear_cross_entropy`.

    Raises:
        ConfigError: Another kind of layer.
    """

    def __init__(self, module: nn.Module, name: str, *, tile_budget_mib: float | None = None) -> None:
        self.module: Any = module
        self.linear: Any = getattr(module, "base_layer", module)
        is_adapted = self.linear is not module
        if type(self.linear) not in PLAIN or (is_adapted and not hasattr(module, "_plain_adapter")):
            allowed = (
                f"the name of an nn.Linear, or of one with a LoRA adapter, not of {type(module).__name__}"
            )
            raise ConfigError(key="head", value=name, allowed=allowed)
        self._gathered = GatheredAtOnce(module) if is_adapted else None  # its weights and the adapter's
        self.tile_budget_mib = tile_budget_mib
        self.num_losses = 0
        self.rows = 0  # of the largest loss
        self.tile_rows = 0
        self.held_bytes = 0  # of its logits, which were not
        self.readers: Counter[str] = Counter()
        """Functions that needed whole logits."""
        self.counted = self.counts()
        self.keeps_means = False
        self._means: list[tuple[object, Tensor]] = []
        """What `take_means` returns, if `keeps_means`."""
        self._alive: list[weakref.ref[LazyLogits]] = []
        self._step_hook = register_optimizer_step_pre_hook(self.compute_held)
        self._compute: Compute | None = None
        self._forward: Compute = self.module.forward
        self._call_with_hooks: Any = self.module._call_impl  # noqa: SLF001 - as of torch 2.10 to 2.13
        self.module.forward, self.module._call_impl = self._in_forward, self._call  # noqa: SLF001

    @staticmethod
    def is_late(module: nn.Module) -> bool:
        """Return whether a module's logits are computed when they are read."""
        return "_call_impl" in vars(module)

    def restore(self) -> None:
        """Have the module compute its logits when it is called."""
        self._step_hook.remove()
        for name, own in (("forward", self._in_forward), ("_call_impl", self._call)):
            if vars(self.module).get(name) == own:
                del self.module.__dict__[name]
        if self._gathered is not None:
            self._gathered.undo()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_means": [], "_alive": [], "_step_hook": None}

    @_untraced
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        obstacle = "its call" if not isinstance(x, Tensor) or type(x) is LazyLogits else self._obstacle(x)
        if obstacle:
            self.readers[obstacle] += 1
            return self._run(None, *args, **kwargs)
        dtype = autocast_dtype(x.device.type, x.dtype, self.linear.weight.dtype) or x.dtype
        logits = lazy(self, x, self.linear.out_features, dtype)
        logits.call = self._state(x), _autocast_of(x)
        self._alive = [each for each in self._alive if each() is not None]
        self._alive.append(weakref.ref(logits))
        return logits

    def _obstacle(self, x: Tensor) -> str:
        """Return why logits cannot wait to be read; empty where they would be the same then."""
        if vars(self.module).get("forward") != self._in_forward:
            return "its replaced forward"
        if not x.is_floating_point() or not x.ndim or is_transformed():
            return "a transform of torch.func"
        if has_foreign_hooks(self.module):
            return "its hooks"
        if self.linear is self.module:
            return ""
        name = self.module._plain_adapter(x)  # noqa: SLF001
        dropout: Any = None if name is None else self.module.lora_dropout[name]
        if dropout is None or (dropout.training and getattr(dropout, "p", 0.0) > 0.0):
            return "its adapter, which is more than a plain one without dropout"
        return ""

    def _state(self, x: Tensor) -> tuple[Any, ...]:
        """Return what the logits of x depend on."""
        own = [parameter for parameter in self.module.parameters() if not is_sharded(parameter)]
        versions = [0 if each.is_inference() else each._version for each in (x, *own)]  # noqa: SLF001
        weights = [(id(each), each.requires_grad, each.dtype) for each in self.module.parameters()]
        adapter: Any = None
        if self.linear is not self.module:
            layer = self.module
            adapter = (*layer.active_adapters, layer.disable_adapters, layer.merged, *layer.scaling.items())
        return (
            versions,
            weights,
            self.module.training,
            adapter,
            vars(self.module).get("forward") == self._in_forward,
        )

    def compute_held(self, *_: object) -> None:
        """Compute the logits that are still referenced, before the weights change."""
        for each in self._alive:
            logits = each()
            if logits is not None and logits.computed is None:
                logits.whole("a reader after the optimizer step")
        self._alive = []

    def _in_forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compute or self._forward)(*args, **kwargs)

    def _run(self, compute: Compute | None, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its hooks, and compute in its forward."""
        self._compute = compute
        try:
            return self._call_with_hooks(*args, **kwargs)
        finally:
            self._compute = None

    @_untraced
    def _run_late(self, compute: Compute | None, logits: LazyLogits, x: Tensor) -> Tensor:
        """Do it for logits of an earlier call, whose state must be the same."""
        first = logits.first
        state, autocast = first.call
        if state != self._state(first.x):
            refuse(logits, "logits that are read after what they depend on has changed")
        with torch.autocast(**autocast):
            return self._run(compute, x)

    def needs_gradient(self) -> bool:
        """Return whether a weight of it is trained."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def whole(self, logits: LazyLogits, reader: str) -> Tensor:
        """Return the logits as the model would have computed them, for the function `reader`."""
        self.readers[reader] += 1
        return self._run_late(None, logits, logits.x)

    def cross_entropy(self, logits: LazyLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the cross-entropy in tiles."""
        self._count(logits)
        loss = self._tiled(linear_cross_entropy, logits, target, options)
        is_mean = options["reduction"] == "mean" and options["class_weight"] is None
        if self.keeps_means and is_mean and loss.grad_fn is not None:
            self._means.append((node_of(loss), (target != options["ignore_index"]).sum()))
        return loss

    def counts(self) -> tuple[int, Counter[str]]:
        """Return the numbers of losses and of readers so far."""
        return self.num_losses, self.readers.copy()

    def take_means(self) -> list[tuple[object, Tensor]]:
        """Return the nodes of mean losses since the last call, and their numbers of targets."""
        means, self._means = self._means, []
        return means

    def logprobs(self, logits: LazyLogits, target: Tensor) -> Tensor:
        """Return the log-probabilities of targets in tiles."""
        self._count(logits)
        return self._tiled(token_logprobs, logits, target, {})

    @torch.no_grad()
    def argmax(self, logits: LazyLogits) -> Tensor:
        """Return the class of the largest logit of each row."""
        x = logits.x
        rows = x.reshape(-1, x.shape[-1])
        step = tile_rows_of(rows, self.linear.out_features, self.tile_budget_mib)

        def compute(rows: Tensor) -> Tensor:
            return torch.cat([self._forward(part).argmax(-1) for part in rows.split(step)])

        return self._run_late(compute, logits, rows).view(x.shape[:-1])

    def _tiled(self, function: Any, logits: LazyLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            linear, low_rank = self.linear, self._low_rank(x)
            return function(
                x, linear.weight, target, linear.bias, low_rank=low_rank, **options,
                tile_budget_mib=self.tile_budget_mib, **logits.form.scale(),
            )  # fmt: skip

        with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
            result = self._run_late(compute, logits, logits.x)
        logits.first.has_loss = True
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


def _autocast_of(x: Tensor) -> dict[str, Any]:
    device = x.device.type
    enabled = torch.is_autocast_enabled(device)
    return {"device_type": device, "dtype": torch.get_autocast_dtype(device), "enabled": enabled}


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active, which follows no tensor that is not computed."""
    functorch: Any = torch._C._functorch  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return functorch.peek_interpreter_stack() is not None


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return whether a module, or every module, has hooks that would see a loss where they expect logits."""
    state = vars(module) | vars(torch_module)
    names = (*MODULE_HOOKS, "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
             "_global_backward_pre_hooks")  # fmt: skip
    return any(is_foreign(hook) for name in names for hook in state[name].values())


def node_of(loss: Tensor) -> Any:
    """Return what computed a loss, whatever identities of autograd came after it."""
    node: Any = loss.grad_fn
    while type(node).__name__ in IDENTITIES:
        node = node.next_functions[0][0]
    return node
