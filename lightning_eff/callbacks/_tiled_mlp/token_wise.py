"""Test that a module computes every token from that token alone, without its weights.

The test is `f(x) == cat(f(tile), ...)` in float64, on random tokens of several samples and on the tiles that
`tiles` makes of them. It runs on a stand-in: a copy of the module whose plain linear layers, which are
token-wise by definition, are replaced by cheap functions of the same sizes, and whose other parameters are
random numbers. So it reads no weights: they may be sharded, quantized, on the meta device or fake (`plan`),
it takes no memory of their size, and neither the module nor the random generators change.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from typing_extensions import override

from lightning_eff.callbacks._tiled_mlp.tiles import join, split
from lightning_eff.core.model_surgery import ADAPTER
from lightning_eff.core.shards import full_shape

SHAPES = ((33,), (3, 11), (3, 2, 11))
"""Samples and tokens of the inputs on trial: odd lengths, no axis of one."""
TILE_TOKENS = 16
"""Of a tile: more than a sample has, and even; the last tile has fewer."""
LINEARS = ("bitsandbytes.", "lightning_eff.", "torchao.")
"""Packages whose linear layers are plain but for their rounding."""
FAILS = "its forward fails on a tensor of tokens x features"
ROUTING = (
    "topk",
    "sort",
    "argsort",
    "nonzero",
    "index_add",
    "index_add_",
    "scatter",
    "scatter_add",
    "_grouped_mm",
)
"""Operations by which tokens are distributed: each expert then has other tokens in every tile."""


@dataclass(frozen=True)
class TokenWise:
    """Verdict on a module.

    Args:
        refusal: Why it cannot be tiled; empty if it is token-wise.
        widest: Features of its widest activation.
        ranks: Numbers of axes that its input may have.
    """

    refusal: str = ""
    widest: int = 0
    ranks: tuple[int, ...] = ()


def num_matrices(module: nn.Module) -> int:
    """Return the number of matrices among a module's parameters, without those of adapters.

    Example:
        >>> num_matrices(nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
        2
    """
    if isinstance(module, nn.Linear) or hasattr(module, ADAPTER):
        return 1
    own = sum(len(full_shape(parameter)) > 1 for parameter in module.parameters(recurse=False))
    return own + sum(map(num_matrices, module.children()))


def check_token_wise(module: nn.Module) -> TokenWise:
    """Return whether a module is token-wise, or why not.

    Example:
        >>> check_token_wise(nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2)))
        TokenWise(refusal='', widest=8, ranks=(2, 3, 4))
        >>> check_token_wise(nn.Sequential(nn.Linear(2, 8), nn.Softmax(-2), nn.Linear(8, 2))).refusal
        "a token's output depends on other tokens"
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    required = [
        p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) != 1:
        return TokenWise(f"its forward takes {len(required)} inputs")
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        isolate_rng(),
        torch.no_grad(),
        warnings.catch_warnings(action="ignore"),
    ):
        torch.manual_seed(0)
        try:
            trial = stand_in(module)
        except Exception as error:  # noqa: BLE001 - a module may hold anything
            return TokenWise(f"it cannot be copied: {type(error).__name__}")
        found = TokenWise(FAILS)
        for features in _input_features(module):
            found = _try(trial, features)
            if not found.refusal.startswith(FAILS):
                break
    return found


def _try(trial: nn.Module, features: int) -> TokenWise:
    """Compare inputs of several ranks with their tiles; a rank that the module cannot take is left out."""
    failure, widest, ranks = FAILS, 0, list[int]()
    for shape in SHAPES:
        x = torch.randn(*shape, features).double()
        try:
            found = _compare(trial, x)
        except Exception as error:  # noqa: BLE001 - a forward may raise anything
            failure = f"{FAILS}: {type(error).__name__}"
            continue
        if found.refusal:
            return found
        widest, ranks = max(widest, found.widest), [*ranks, x.dim()]
    return TokenWise(widest=widest, ranks=tuple(ranks)) if ranks else TokenWise(failure)


def _compare(trial: nn.Module, x: Tensor) -> TokenWise:
    """Run the stand-in on all tokens, and on tiles of them as they will be passed to the module."""
    num_tokens = math.prod(x.shape[:-1])
    with _Observed(num_tokens) as observed:
        full = trial.eval()(x)
    if not isinstance(full, Tensor):
        return TokenWise(f"its forward returns a {type(full).__name__}")
    if observed.routing:
        return TokenWise(f"it distributes tokens ({observed.routing})")
    outputs = [trial(tile) for tile in split(x, TILE_TOKENS)]
    if full.shape[:-1] != x.shape[:-1]:
        return TokenWise(f"{list(x.shape)} becomes {list(full.shape)}")
    if not torch.allclose(full, join(outputs, x), rtol=1e-9, atol=1e-12):
        return TokenWise("a token's output depends on other tokens")
    before = [buffer.clone() for buffer in trial.buffers()]
    trial.train()(x)
    if not all(map(torch.equal, before, trial.buffers())):
        return TokenWise("its forward changes buffers, as batch statistics")
    return TokenWise(widest=max(observed.widest, x.shape[-1]))


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


def _input_features(module: nn.Module) -> list[int]:
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


class _Observed(TorchDispatchMode):
    """Notes the widest activation, and operations that distribute tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens, self.widest, self.routing = num_tokens, 0, ""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.routing = self.routing or (name if name in ROUTING else "")
        if isinstance(out, Tensor) and out.dim() > 1 and math.prod(out.shape[:-1]) == self.num_tokens:
            self.widest = max(self.widest, out.shape[-1])
        return out
