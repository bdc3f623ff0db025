"""Add LoRA's product to the layer's result in place, with one large operation where PEFT needs four.

    y [T, N] = x [T, K] @ W.T + b;  y += s * (x @ A.T) @ B.T        A [r, K], B [N, r]

PEFT computes `(x @ A.T) @ B.T`, multiplies the product by s, and adds the result to y. Each of PEFT's steps
reads and writes tensors of the size of y, and so does the backward pass of the multiplication. Here `addmm_`
adds the product with alpha = s, and rounds once instead of three times. Parameters, names and checkpoints are
the same as in PEFT. PEFT's own forward runs for layers with several adapters, a variant of LoRA, different
dtypes, or hooks. `callbacks/peft_adapter` calls `add_in_place`.

Source: learned from https://github.com/huggingface/peft, tuners/lora/layer.py
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from typing_extensions import override

from lightning_eff.core.model_surgery import MODULE_HOOKS
from lightning_eff.core.torch_private import torch_private
from lightning_eff.kernels.linear import TritonLinear
from lightning_eff.kernels.matmul import is_traced

PLAIN = (nn.Linear, TritonLinear)
GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")
"""Hooks that turn results into views, which must not be changed in place."""


class LoraLinear(PeftLinear):  # pyright: ignore[reportUntypedBaseClass]
    """PEFT's LoRA around a linear layer; `add_in_place` converts PEFT's layers to this class."""

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's result `[*batch, N]` from `x` of shape `[*batch, K]`."""
        adapter = None if args or kwargs else self._plain_adapter(x)
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        # Compute y as a matrix, because autograd copies the gradient of an in-place operation on a view.
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])  # [T, K]
        y: Tensor = self.base_layer(rows)  # [T, N]
        low: Tensor = self.lora_A[adapter](self.lora_dropout[adapter](rows))  # [T, r]
        weight: Tensor = self.lora_B[adapter].weight  # pyright: ignore[reportAssignmentType]
        add = torch.addmm if _keeps_results() else Tensor.addmm_
        y = add(y, low.to(y.dtype), weight.T.to(y.dtype), alpha=self.scaling[adapter])
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _plain_adapter(self, x: Tensor) -> str | None:
        """Return the name of the only adapter if its product can be added in place, else None."""
        names, base = self.active_adapters, self.base_layer
        if len(names) != 1 or self.disable_adapters or self.merged or names[0] not in self.lora_A:
            return None
        name: str = names[0]
        if name in self.lora_variant or self.lora_bias[name]:
            return None
        parts = (base, self.lora_A[name], self.lora_B[name], self.lora_dropout[name])
        is_number = isinstance(self.scaling[name], (int, float))
        if not is_number or any(type(part) not in PLAIN for part in parts[:3]):
            return None
        # Here a hook on the base would see a result that changes later, and a hook on A would see a different
        # shape. A hook on B would not run, because B is not called.
        if any(map(has_hooks, parts)) or any(vars(torch_module)[hooks] for hooks in GLOBAL_HOOKS):
            return None
        b = self.lora_B[name]
        is_one_dtype = x.dtype == base.weight.dtype == b.weight.dtype
        return name if is_one_dtype or torch.is_autocast_enabled(x.device.type) else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a custom forward on the instance."""
    state = vars(module)
    return "forward" in state or any(state[hooks] for hooks in MODULE_HOOKS)


def _keeps_results() -> bool:
    """Return whether results must stay unchanged, since checkpointing or a compiler may store them."""
    if is_traced():
        return True
    modes = torch_private("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", "LoRA")()
    caching = torch_private("torch.utils.checkpoint:_CachingTorchDispatchMode", "LoRA")
    cached = torch_private("torch.utils.checkpoint:_CachedTorchDispatchMode", "LoRA")
    return any(isinstance(mode, (caching, cached)) for mode in modes)


def add_in_place(model: nn.Module) -> int:
    """Convert a model's LoRA layers around linear layers; return the number of converted layers."""
    layers = [module for module in model.modules() if type(module) is PeftLinear]
    for layer in layers:
        layer.__class__ = LoraLinear
    return len(layers)
