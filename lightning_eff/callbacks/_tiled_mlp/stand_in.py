"""A copy of a module that computes like it without its weights, for a trial on the CPU."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.core.shards import full_shape

LINEARS = ("bitsandbytes.", "lightning_eff.", "torchao.")
"""Packages whose linear layers are plain but for their rounding."""


def stand_in(module: nn.Module) -> nn.Module:
    """Return a float64 copy on the CPU: plain linear layers replaced, other parameters random, no hooks."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, nn.Linear) and _is_plain(part):
            memo[id(part)] = _CheapLinear(part.in_features, part.out_features)
            continue
        for parameter in part.parameters(recurse=False):
            values = torch.randn(full_shape(parameter)).double()  # DeepSpeed's Init ignores dtype=
            memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
        for buffer in part.buffers(recurse=False):
            dtype = torch.float64 if buffer.is_floating_point() else buffer.dtype
            memo[id(buffer)] = torch.ones(buffer.shape).to(dtype)
        for name, value in vars(part).items():
            if name.endswith("_hooks") or "_hooks_" in name:
                memo[id(value)] = OrderedDict() if isinstance(value, dict) else value
    return copy.deepcopy(module, memo)


def _is_plain(linear: nn.Linear) -> bool:
    """Return whether a linear layer computes a product with its weight: its class may add anything to that.

    FSDP2 makes a class of its own without a forward. Those of LINEARS round tokens together, at most.
    """
    own = dict(linear.named_parameters(recurse=False))  # without a weight that is parametrized
    is_known = type(linear).forward is nn.Linear.forward or type(linear).__module__.startswith(LINEARS)
    return is_known and "weight" in own and "forward" not in vars(linear)


def input_features(module: nn.Module) -> list[int]:
    """Return sizes that the input's last axis may have, the most likely first."""
    sizes: list[int] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            sizes.append(part.in_features)
            continue
        for parameter in part.parameters(recurse=False):
            sizes.extend(full_shape(parameter) if parameter.dim() < 3 else ())
    return list(dict.fromkeys(sizes))


class _CheapLinear(nn.Module):
    """Mixes features like a linear layer of these sizes, with a vector of numbers."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = in_features, out_features, None
        # Read by adapters for its dtype; a product with it is token-wise as well.
        self.weight = torch.full((), 0.5).double().expand(out_features, in_features)
        self.scale = torch.randn(out_features).double()
        self.source = torch.arange(out_features) % in_features

    @override
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            msg = f"{x.shape[-1]} features instead of {self.in_features}"
            raise ValueError(msg)
        return x[..., self.source] * self.scale + x.mean(-1, keepdim=True)
