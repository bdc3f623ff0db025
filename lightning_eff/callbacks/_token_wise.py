"""Test, without reading a module's weights, whether the module computes each token from that token alone.

`callbacks/tiled_mlp` calls `check_token_wise` before it tiles a module. The test checks in float64 that
`f(x) == cat(f(tile), ...)`. x has random tokens of several samples, and `split` cuts x into tiles. The test
runs on a stand-in, a copy of the module with other weights. Plain linear layers are token-wise by definition,
so the stand-in replaces them by cheap functions of the same sizes. All other parameters get random values. So
the real weights may be sharded, quantized, on the meta device, or fake tensors (in `plan`). The test needs
little memory, and changes neither the module nor the random generators.
"""

from __future__ import annotations

import copy
import inspect
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
from lightning_eff.core.random_states import capture, differing, held_by
from lightning_eff.core.shards import full_shape
from lightning_eff.core.torch_private import real_tensors

SHAPES = ((33,), (3, 11), (3, 2, 11))
"""Sample and token axes of the test inputs: odd token counts, no axis of length one."""
TILE_TOKENS = 16
"""Tokens per test tile: an even number, larger than a sample in most shapes. The last tile is shorter."""
FAILS = "its forward fails on a tensor of tokens x features"
DRAWS = "it draws random numbers that are not per token"
LINEARS = ("bitsandbytes.", "lightning_eff.", "torchao.")
"""Packages whose linear layers compute only a product with the weight, apart from rounding."""
ROUTING = (
    *("topk", "sort", "argsort", "nonzero", "_grouped_mm"),
    *("index_add", "index_add_", "scatter", "scatter_add"),
)
"""Operations that route tokens to experts. With tiles, an expert of limited capacity would drop different
tokens, and a loss on the routing would cover only one tile."""


@dataclass(frozen=True)
class TokenWise:
    """Result of testing a module.

    Args:
        refusal: Reason why the module cannot be tiled; empty if the module is token-wise.
        widest: Number of features of the module's widest activation.
        ranks: Numbers of axes of the inputs that the module accepted.
    """

    refusal: str = ""
    widest: int = 0
    ranks: tuple[int, ...] = ()


def split(x: Tensor, tile_tokens: int) -> tuple[Tensor, ...]:
    """Split an input into tiles with the same number of axes, since a forward may check this number.

    Example:
        >>> [list(tile.shape) for tile in split(torch.ones(3, 5, 2), 7)]
        [[1, 7, 2], [1, 7, 2], [1, 1, 2]]
    """
    return x.reshape(*([1] * (x.dim() - 2)), -1, x.shape[-1]).split(tile_tokens, dim=-2)


def join(outputs: list[Tensor], x: Tensor) -> Tensor:
    """Join the outputs of the tiles of `x` into one tensor with the batch axes of `x`."""
    return torch.cat(outputs, dim=-2).reshape(*x.shape[:-1], -1)


def num_matrices(module: nn.Module) -> int:
    """Count the matrices among a module's parameters, without adapters.

    Example:
        >>> num_matrices(nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
        2
    """
    # An adapted layer counts as one matrix, because its adapter's matrices are not wide.
    if isinstance(module, nn.Linear) or hasattr(module, ADAPTER):
        return 1
    own = sum(len(full_shape(parameter)) > 1 for parameter in module.parameters(recurse=False))
    return own + sum(map(num_matrices, module.children()))


def check_token_wise(module: nn.Module) -> TokenWise:
    """Check whether a module is token-wise; if not, the result's `refusal` gives the reason.

    Example:
        >>> check_token_wise(nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2)))
        TokenWise(refusal='', widest=8, ranks=(2, 3, 4))
        >>> check_token_wise(nn.Sequential(nn.Linear(2, 8), nn.Softmax(-2), nn.Linear(8, 2))).refusal
        "a token's output depends on other tokens"
    """
    parameters = inspect.signature(module.forward).parameters.values()
    # A call may omit `*args` and `**kwargs`.
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    num_required = sum(each.default is each.empty and each.kind not in variadic for each in parameters)
    if num_required != 1:
        return TokenWise(f"its forward takes {num_required} inputs")
    for name, part in module.named_modules():
        # Hooks of the module itself are allowed, because they run once, around all tiles.
        if name and any(is_foreign(hook) for kind in MODULE_HOOKS for hook in vars(part)[kind].values()):
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
        sizes, refusal = _sizes(module), FAILS
        # The number of input features is unknown, so try the sizes of the parameters until a size fits.
        for features in sizes:
            refusal, ranks = _try(trial, features)
            if not refusal.startswith(FAILS):
                return TokenWise(refusal) if refusal else TokenWise(widest=max(sizes), ranks=ranks)
    return TokenWise(refusal)


def _sizes(module: nn.Module) -> list[int]:
    """Return the feature counts inside a module; the likeliest number of input features comes first."""
    sizes: list[int] = []
    for part in module.modules():
        if isinstance(part, nn.Linear):
            # Not `weight.shape`: a quantized weight may be packed.
            sizes += [part.in_features, part.out_features]
            continue
        for parameter in part.parameters(recurse=False):
            sizes.extend(full_shape(parameter) if parameter.dim() < 3 else ())
    return list(dict.fromkeys(sizes))


def _try(trial: nn.Module, features: int) -> tuple[str, tuple[int, ...]]:
    """Run the test on inputs of `features` features; return the refusal, and the accepted numbers of axes."""
    failure, ranks = FAILS, list[int]()
    for shape in SHAPES:
        # In float64, so that a tolerance of 1e-9 detects a dependence on other tokens.
        x = torch.randn(*shape, features).double()
        try:
            for training in (False, True):
                if refusal := _compare(trial.train(training), x):
                    return refusal, ()
        except Exception as error:  # noqa: BLE001 - a forward may raise anything
            failure = f"{FAILS}: {type(error).__name__}"
        else:
            ranks.append(x.dim())
    return "" if ranks else failure, tuple(ranks)


def _compare(trial: nn.Module, x: Tensor) -> str:
    """Compare the stand-in's outputs with and without tiles; describe the difference, if there is one."""
    # `_Observed` counts the random numbers of torch only. Others may be drawn once per call.
    others = {name: each for name, each in held_by(trial).items() if not isinstance(each, torch.Generator)}
    before, states = _contents(trial), capture(generators=others)
    with _Observed() as observed:
        full = trial(x)
    routing = f"it distributes tokens ({observed.routing})" if observed.routing else ""
    draws = DRAWS if differing(states, capture(generators=others)).keys() - {"torch"} else ""
    if refusal := _side_effect(before, _contents(trial)) or routing or draws:
        return refusal
    if not isinstance(full, Tensor):
        return f"its forward returns a {type(full).__name__}"
    if full.shape[:-1] != x.shape[:-1]:
        return f"{list(x.shape)} becomes {list(full.shape)}"
    outputs: list[Tensor] = []
    for tile in split(x, TILE_TOKENS):
        with _Observed() as of_tile:
            outputs.append(trial(tile))
        # Random numbers per sample, weight or call are not token-wise. So each operation must draw the same
        # count per token: drawn_all / tokens_all == drawn_tile / tokens_tile, here as products of integers.
        per_token = [drawn * tile.shape[-2] for drawn in observed.drawn]
        if per_token != [drawn * x[..., 0].numel() for drawn in of_tile.drawn]:
            return DRAWS
    if not torch.allclose(full, join(outputs, x), rtol=1e-9, atol=1e-12):
        return "a token's output depends on other tokens" + " in training" * trial.training
    return ""


class _Observed(TorchDispatchMode):
    """Records routing operations, and the count of random numbers that each operation draws.

    Random numbers are replaced by a constant, so that the outputs with and without tiles can be compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.routing = ""
        self.drawn: list[int] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.routing = self.routing or (name if name in ROUTING else "")
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor):
            self.drawn.append(out.numel())
            # A mask of ones keeps all values, so dropout does not hide a dependence.
            out.fill_("bernoulli" in name or (0.5 if out.is_floating_point() else 0))
        return out


def stand_in(module: nn.Module) -> nn.Module:
    """Return a float64 CPU copy without hooks, with cheap linear layers; other parameters are random."""
    # `deepcopy` does not copy the objects in `memo`, but uses their replacements.
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
                # Empty, so that no hook runs in the test.
                memo[id(value)] = OrderedDict() if isinstance(value, dict) else value
    return copy.deepcopy(module, memo)


def _is_plain(linear: nn.Linear) -> bool:
    """Return whether a linear layer computes only the product with its weight."""
    own = dict(linear.named_parameters(recurse=False))  # has no entry for a parametrized weight
    # A subclass may compute anything, unless it inherits the forward (FSDP2's class) or is from LINEARS.
    is_known = type(linear).forward is nn.Linear.forward or type(linear).__module__.startswith(LINEARS)
    return is_known and "weight" in own and "forward" not in vars(linear)


class _CheapLinear(nn.Module):
    """Mixes features like a linear layer of the same sizes, but has only a vector of weights."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = in_features, out_features, None
        # Adapters read the dtype of this weight. A module that multiplies by this weight stays token-wise.
        self.weight = torch.full((), 0.5).double().expand(out_features, in_features)
        self.scale = torch.randn(out_features).double()
        # Every output depends on one input feature and, through the mean, on all features of the token.
        self.source = torch.arange(out_features) % in_features

    @override
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{x.shape[-1]} features instead of {self.in_features}")
        return x[..., self.source] * self.scale + x.mean(-1, keepdim=True)


Contents = dict[str, list[tuple[Any, int]]]


def _contents(module: nn.Module) -> Contents:
    """Return the objects in each attribute of a module and its submodules, with the versions of tensors."""
    found: Contents = {}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            # Include the keys, because a forward may add an entry.
            items: list[Any] = [*value, *value.values()] if isinstance(value, dict) else [value]
            if isinstance(value, (list, set, tuple, deque)):
                items = list(value)
            versions = [each._version if isinstance(each, Tensor) else 0 for each in items]  # noqa: SLF001
            found[f"{prefix}.{name}" if prefix else name] = list(zip(items, versions, strict=True))
    return found


def _side_effect(before: Contents, after: Contents) -> str:
    """Describe the change that a forward made to its module; empty if the module did not change."""

    def is_same(old: tuple[Any, int], new: tuple[Any, int]) -> bool:
        is_plain = isinstance(new[0], (int, float, str))
        return old[1] == new[1] and (old[0] is new[0] or (is_plain and old[0] == new[0]))

    changed = [
        name
        for name, values in after.items()
        if len(old := before.get(name, [])) != len(values) or not all(map(is_same, old, values))
    ]
    if any(name.endswith("_buffers") for name in changed):
        return "its forward changes buffers, for example batch statistics"
    return f"its forward stores part of its input: {', '.join(changed)}" if changed else ""
