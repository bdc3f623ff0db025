"""Test that a module computes every token from that token alone, without its weights.

The test is `f(x) == cat(f(tile), ...)` in float64, on random tokens of several samples and on the tiles that
`tiles` makes of them. It runs on a stand-in: a copy of the module whose plain linear layers, which are
token-wise by definition, are replaced by cheap functions of the same sizes, and whose other parameters are
random numbers. So it reads no weights: they may be sharded, quantized, on the meta device or fake (`plan`),
it takes no memory of their size, and neither the module nor the random generators change.
"""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_eff.callbacks._tiled_mlp.side_effects import hooked, side_effect, state_of
from lightning_eff.callbacks._tiled_mlp.stand_in import input_features, stand_in
from lightning_eff.callbacks._tiled_mlp.tiles import join, split
from lightning_eff.core.model_surgery import ADAPTER
from lightning_eff.core.shards import full_shape
from lightning_eff.core.torch_private import real_tensors

SHAPES = ((33,), (3, 11), (3, 2, 11))
"""Samples and tokens of the inputs on trial: odd lengths, no axis of one."""
TILE_TOKENS = 16
"""Of a tile: more than a sample has, and even; the last tile has fewer."""
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
    if name := hooked(module):
        return TokenWise(f"hooks of {name} would run for every tile")
    with (
        real_tensors(),
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
        for features in input_features(module):
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
            for training in (False, True):
                found = _compare(trial.train(training), x)
                if found.refusal:
                    return found
                widest = max(widest, found.widest)
        except Exception as error:  # noqa: BLE001 - a forward may raise anything
            failure = f"{FAILS}: {type(error).__name__}"
        else:
            ranks.append(x.dim())
    return TokenWise(widest=widest, ranks=tuple(ranks)) if ranks else TokenWise(failure)


def _compare(trial: nn.Module, x: Tensor) -> TokenWise:
    """Run the stand-in on all tokens, and on tiles of them as they will be passed to the module."""
    before = state_of(trial)
    with _Observed(math.prod(x.shape[:-1])) as observed:
        full = trial(x)
    routing = f"it distributes tokens ({observed.routing})" if observed.routing else ""
    if refusal := side_effect(before, state_of(trial)) or routing or _wrong_output(full, x):
        return TokenWise(refusal)
    outputs: list[Tensor] = []
    for tile in split(x, TILE_TOKENS):
        with _Observed(tile.shape[-2]) as of_tile:
            outputs.append(trial(tile))
        if of_tile.drawn != observed.drawn:
            return TokenWise("it draws random numbers that are not of one token each")
    if not torch.allclose(full, join(outputs, x), rtol=1e-9, atol=1e-12):
        return TokenWise("a token's output depends on other tokens" + " in training" * trial.training)
    return TokenWise(widest=max(observed.widest, x.shape[-1]))


def _wrong_output(output: Any, x: Tensor) -> str:
    if not isinstance(output, Tensor):
        return f"its forward returns a {type(output).__name__}"
    return "" if output.shape[:-1] == x.shape[:-1] else f"{list(x.shape)} becomes {list(output.shape)}"


class _Observed(TorchDispatchMode):
    """Notes the widest activation, operations that distribute tokens, and how many numbers a token draws.

    What is drawn becomes a constant, so that tiles can be compared.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens, self.widest, self.routing = num_tokens, 0, ""
        self.drawn: list[float] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.routing = self.routing or (name if name in ROUTING else "")
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor):
            self.drawn.append(out.numel() / self.num_tokens)
            out.fill_("bernoulli" in name or (0.5 if out.is_floating_point() else 0))
        if isinstance(out, Tensor) and out.dim() > 1 and math.prod(out.shape[:-1]) == self.num_tokens:
            self.widest = max(self.widest, out.shape[-1])
        return out
