"""Test that a module computes every token from that token alone, without its weights.

The test is `f(x) == cat(f(tile), ...)` in float64, on random tokens of several samples and on the tiles that
`split` makes of them. It runs on a stand-in: a copy of the module whose plain linear layers, which are
token-wise by definition, are replaced by cheap functions of the same sizes, and whose other parameters are
random numbers. So it reads no weights: they may be sharded, quantized, on the meta device or fake (`plan`),
it takes no memory of their size, and neither the module nor the random generators change.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_eff.core.model_surgery import ADAPTER, MODULE_HOOKS, is_foreign
from lightning_eff.core.shards import full_shape
from lightning_eff.core.torch_private import real_tensors

State = dict[str, list[tuple[Any, int]]]
"""Objects in each attribute of a module and of all inside it, tensors with their versions."""


def split(x: Tensor, tile_tokens: int) -> tuple[Tensor, ...]:
    """Return the tiles of an input; they have as many axes as it has, since a forward may count them.

    Example:
        >>> [list(tile.shape) for tile in split(torch.ones(3, 5, 2), 7)]
        [[1, 7, 2], [1, 7, 2], [1, 1, 2]]
    """
    return x.reshape(*([1] * (x.dim() - 2)), -1, x.shape[-1]).split(tile_tokens, dim=-2)


def join(outputs: list[Tensor], x: Tensor) -> Tensor:
    """Return the outputs of the tiles of `x` as one tensor with its samples."""
    return torch.cat(outputs, dim=-2).reshape(*x.shape[:-1], -1)


def hooked(module: nn.Module) -> str:
    """Return the name of a module inside that has hooks of its own, which may do anything with a tile."""
    for name, part in module.named_modules():
        hooks = [hook for kind in MODULE_HOOKS for hook in vars(part)[kind].values()] if name else []
        if any(map(is_foreign, hooks)):
            return name
    return ""


def state_of(module: nn.Module) -> State:
    """Return what a forward may change in a module; `side_effect` compares two."""
    found: State = {}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            items: list[Any] = [*value, *value.values()] if isinstance(value, dict) else [value]
            if isinstance(value, (list, set, tuple, deque)):
                items = list(value)
            versions = [each._version if isinstance(each, Tensor) else 0 for each in items]  # noqa: SLF001
            found[f"{prefix}.{name}" if prefix else name] = list(zip(items, versions, strict=True))
    return found


def side_effect(before: State, after: State) -> str:
    """Return in words what a forward changed; empty where it changed nothing."""
    changed = [name for name, values in after.items() if not _is_same(before.get(name, []), values)]
    if any(name.endswith("_buffers") for name in changed):
        return "its forward changes buffers, as batch statistics"
    return f"its forward keeps something of its input: {', '.join(changed)}" if changed else ""


def _is_same(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    return len(before) == len(after) and all(
        old_version == version and (old is new or (isinstance(new, (int, float, str)) and old == new))
        for (old, old_version), (new, version) in zip(before, after, strict=True)
    )


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
            raise ValueError(f"{x.shape[-1]} features instead of {self.in_features}")
        return x[..., self.source] * self.scale + x.mean(-1, keepdim=True)


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
