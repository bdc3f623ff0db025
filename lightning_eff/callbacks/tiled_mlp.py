"""Compute the MLPs of a model in tiles of tokens, so that only one tile's wide activations exist at a time.

On long sequences, an MLP's wide activations take most of the memory of a block's backward pass. The wide
activations of a gated MLP are the outputs of two linear layers, an activation, an elementwise product and a
gradient. With this callback, each MLP is computed in tiles of its tokens, and each tile is checkpointed
(non-reentrant). The MLP saves only its input, and its backward pass recomputes one tile at a time.
Parameters, names and checkpoints stay the same, hooks of the MLP run once, and each weight gets one gradient.

A child of a repeated block is treated as an MLP if it is token-wise and has at least two weight matrices. A
module is token-wise if the output for a token depends on that token alone. A numeric test decides whether a
module is token-wise; its name does not matter. Attention, routed experts, and modules with batch statistics
or side effects are not tiled.

An MLP is tiled if its input has at least `min_tokens` tokens, and its wide activations exceed the budget. If
the widest activation has `widest` features, the wide activations take `tokens x widest x 5 x itemsize` bytes.
The number of tiles is this size divided by the budget. Tiles always lower the memory of the MLP's backward
pass. The peak of the step may lie elsewhere, for example in the loss; `lightning-eff plan` predicts whether
tiles lower the peak.

The default budget is the larger of 64 MiB and the input's size. A smaller budget gains little, because the
rest of a block then needs more memory than a tile. The default also limits the number of tiles: an MLP that
is four times as wide as its input gets at most 20 tiles. The gradient of a weight is the sum over tiles in
the weight's dtype, so the sum rounds once per tile.

Saves: the wide activations of MLPs on long sequences.
Costs: one more forward pass of the MLPs, which adds at most a third to their operations. If a block is
    recomputed by `callbacks/gradient_checkpointing`, tiles cost no further pass. If such a block saves a
    tensor after the MLP (for dropout, or for a norm of the MLP's output), the MLP is computed three times.
    Dropout inside an MLP draws a mask per tile, so results are statistically equal, but not bit-identical.
When not: sequences are short (a warning says so); the peak lies in the loss or the optimizer step; the MLP is
    not one module. `nn.TransformerEncoderLayer` has no module for its MLP, and BERT has two. A model with
    only such MLPs gets a `NoEffectWarning`.
Conflicts: `callbacks/torch_compile`; `callbacks/gradient_checkpointing` with `selective`, which keeps the
    products of all tiles; `callbacks/triton_gemm` with `fuse_mlps`, which replaces the same forward.
Source: Arctic long sequence training, https://arxiv.org/abs/2506.13996; torch.utils.checkpoint
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_eff.callbacks._token_wise import TokenWise, check_token_wise, join, num_matrices, split
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import Count, Positive, check_arguments
from lightning_eff.core.call_state import CallState, stops_early
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.managed import Tiling
from lightning_eff.core.model_surgery import BlockSelector
from lightning_eff.core.shards import GatheredAtOnce
from lightning_eff.core.technique import Outcome, Try
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels.matmul import in_forward_mode, is_traced
from lightning_eff.report.advice import Observed, Suggestion

NOT_FOUND = "no token-wise MLP found in repeated blocks"
MIN_MATRICES = 2
"""Minimum number of weight matrices in an MLP; a single linear layer has no inner activations."""
NUM_WIDE = 5
"""Number of [tokens, widest] tensors in a gated MLP's backward pass: outputs of two linear layers, an
activation, an elementwise product, and a gradient."""
MIN_BUDGET_BYTES = 64 << 20


@check_arguments
def tile_mlps(
    model: nn.Module,
    *,
    modules: BlockSelector = None,
    tile_budget_mib: Positive | None = None,
    min_tokens: Count = 16384,
) -> dict[str, TiledForward]:
    """Compute a model's MLPs in tiles, with Fabric or in your own training loop.

    Args:
        model: Any module; the function skips MLPs that are tiled already, or whose forward is replaced.
        modules: As in `TiledMLP`.
        tile_budget_mib: As in `TiledMLP`.
        min_tokens: As in `TiledMLP`.

    Returns:
        The new forward of each MLP, by the MLP's name; the method `restore` undoes a replacement.

    Raises:
        ConfigError: A value is outside its range, `modules` selects nothing, or a selected module is not
            token-wise.

    Warns:
        NoEffectWarning: No MLP was found.

    Example:
        >>> block = lambda: nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4)))
        >>> list(tile_mlps(nn.Sequential(block(), block())))
        ['0.1', '1.1']
    """
    tiled, refused = _tile(model, modules, tile_budget_mib, min_tokens)
    if not tiled and not any(isinstance(vars(each).get("forward"), TiledForward) for each in model.modules()):
        text = f"tile_mlps had no effect: {NOT_FOUND}{_left_out(refused)}; name them with modules="
        warnings.warn(text, NoEffectWarning, stacklevel=3)
    return tiled


def _tile(
    model: nn.Module, modules: BlockSelector, tile_budget_mib: float | None, min_tokens: int
) -> tuple[dict[str, TiledForward], dict[str, str]]:
    """Tile MLPs; return their new forwards, and the reasons why other children of blocks are not tiled."""
    budget_bytes = None if tile_budget_mib is None else max(1, int(tile_budget_mib * 2**20))
    tiled: dict[str, TiledForward] = {}
    refused: dict[str, str] = {}
    for name, module in _candidates(model, modules).items():
        if isinstance(vars(module).get("forward"), TiledForward):
            continue
        found = check_token_wise(module)
        refusal = "its forward is replaced already" if "forward" in vars(module) else found.refusal
        if refusal and modules is not None:
            allowed = f"modules that compute every token from that token alone: {refusal}"
            raise ConfigError(key="modules", value=name, allowed=allowed)
        if refusal:
            refused[name] = refusal
        else:
            tiled[name] = TiledForward(module, found, budget_bytes=budget_bytes, min_tokens=min_tokens)
    for forward in tiled.values():
        forward.attach()
    return tiled, refused


def _candidates(model: nn.Module, modules: BlockSelector) -> Mapping[str, nn.Module]:
    """Return the selected modules; by default, children of repeated blocks with at least two matrices."""
    if modules is not None:
        return model_surgery.select_blocks(model, modules, key="modules")
    # A child with a single matrix has no wide activation inside it.
    return {
        f"{prefix}.{name}": child
        for prefix, block in model_surgery.repeated_blocks(model).items()
        for name, child in block.named_children()
        if num_matrices(child) >= MIN_MATRICES
    }


class TiledMLP(Tiling):
    """Compute the MLPs of repeated blocks in tiles of their tokens.

    Args:
        modules: Class names or patterns of module names (`net.layers.*.mlp`), classes, or a predicate of name
            and module; if None, the MLPs of repeated blocks are detected.
        tile_budget_mib: Memory for the wide activations of one tile, in MiB; if None, the larger of 64 MiB
            and the size of the MLP's input.
        min_tokens: Inputs with fewer tokens (samples x length) are not tiled.

    Raises:
        ConfigError: A value is outside its range, `modules` selects nothing, or a selected module is not
            token-wise.
        ConflictError: The blocks are compiled, another technique replaces the same forward, or another
            technique would store the activations of all tiles.

    Warns:
        NoEffectWarning: No MLP was found, or each MLP was computed as one tile.

    Example:
        >>> import lightning.pytorch as pl
        >>> callback = TiledMLP(tile_budget_mib=256)
        >>> trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> TiledMLP(min_tokens=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: min_tokens=0: expected a whole number of at least 1
    """

    hint_if_none = "; name them with modules="
    lowers = ("activations",)
    try_as = (Try(),)

    @check_arguments
    def __init__(
        self,
        *,
        modules: BlockSelector = None,
        tile_budget_mib: Positive | None = None,
        min_tokens: Count = 16384,
    ) -> None:
        super().__init__()
        self.modules = modules
        self.tile_budget_mib = tile_budget_mib
        self.min_tokens = min_tokens
        self._refused: dict[str, str] = {}

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest TiledMLP for MLPs of repeated blocks on long sequences."""
        callback = TiledMLP()
        if run.recorder is None or run.num_tokens < callback.min_tokens:
            return None
        found = {name: check_token_wise(each) for name, each in _candidates(run.module, None).items()}
        widest = {name: each.widest for name, each in found.items() if not each.refusal}
        # The size in float32; in 16 bits, half as many tiles are needed.
        wide_bytes = run.num_tokens * max(widest.values(), default=0) * NUM_WIDE * 4
        num_tiles = max(1, -(-wide_bytes // MIN_BUDGET_BYTES))
        # With tiles, only 1 / num_tiles of each activation of a recomputed MLP is in memory at a time.
        inside = [index for index, owner in enumerate(run.owners(widest)) if owner]
        return Suggestion(
            technique=callback,
            why=f"wide activations of {len(widest)} MLPs, up to {human_bytes(wide_bytes)} each",
            peak_bytes=run.peak_if(dict.fromkeys(inside, 1 / num_tiles), recomputed=widest),
        )

    @override
    def tile(self, model: nn.Module) -> dict[str, TiledForward]:
        """Replace the forward of MLPs."""
        tiled, self._refused = _tile(model, self.modules, self.tile_budget_mib, self.min_tokens)
        return tiled

    @override
    def outcome(self) -> Outcome:
        """Report the number of tiled MLPs, and the bytes that were saved."""
        # An MLP that had a single tile in every call was in effect not tiled.
        tiled = {name: each for name, each in self._tiled.items() if each.max_tiles > 1}
        tiles = max((each.max_tiles for each in tiled.values()), default=1)
        not_held = max((each.not_held_bytes for each in tiled.values()), default=0)
        tokens = max((each.max_tokens for each in self._tiled.values()), default=0)
        if not self._tiled:
            did = NOT_FOUND
        elif not tiled:
            why = "wide activations fit tile_budget_mib"
            why = why if tokens >= self.min_tokens else f"min_tokens={self.min_tokens:,}"
            did = f"{tokens:,} tokens: one tile ({why})"
        else:
            did = (
                f"{len(tiled)} MLP{'s' * (len(tiled) != 1)} in up to {tiles} tiles of {tokens:,} tokens: "
                f"each backward pass holds {human_bytes(not_held)} less"
            )
        did += _left_out(self._refused)
        numbers = {
            "mlps": list(tiled), "tiles": tiles, "tokens": tokens, "not_held_bytes": not_held,
            "refused": dict(self._refused),
        }  # fmt: skip
        return Outcome(did=did, effective=bool(tiled), numbers=numbers)


def _left_out(refused: Mapping[str, str]) -> str:
    """List the children of blocks that are not tiled, with the reasons."""
    kinds = {name.rpartition(".")[2]: reason for name, reason in refused.items()}
    return "".join(f"; {kind} is not tiled: {reason}" for kind, reason in kinds.items())


class TiledForward:
    """Replaces the forward of a token-wise module; stored in the module's attribute `forward`.

        y = cat(f(x[0:n]), f(x[n:2n]), ...)        x [*batch, T, C] as [T, C], n tokens per tile

    The forward pass saves only x; the backward pass recomputes one tile at a time. Autograd sums the tiles'
    gradients of a weight before the weight's hooks run. So DDP, FSDP2, ZeRO and optimizers that step in the
    backward pass get one gradient per weight.

    In a recomputed block, a tile could be computed three times: in the block's forward, in the block's
    recomputation, and in the tile's own recomputation. To avoid the second computation, the inputs of all
    tiles are saved before the first tile runs. The recomputation of a block ends at the last tensor that the
    block saved. The last saved tensor is now the MLP's input, so the block's recomputation runs no tile. If
    the block saves another tensor after its MLP (a dropout mask, the input of a norm), its recomputation does
    run the tiles.

    Args:
        module: The module.
        token_wise: Result of `check_token_wise`; an input is tiled only if its number of axes is in `ranks`.
        budget_bytes: Memory for the wide activations of one tile; if None, the larger of 64 MiB and the
            size of the input.
        min_tokens: Inputs with fewer tokens are not tiled.
    """

    def __init__(
        self,
        module: nn.Module,
        token_wise: TokenWise,
        *,
        budget_bytes: int | None,
        min_tokens: int,
    ) -> None:
        self.module, self._token_wise = module, token_wise
        self.budget_bytes, self.min_tokens = budget_bytes, min_tokens
        self._stops_early = stops_early(module)
        self._gathered: GatheredAtOnce | None = None
        self.max_tokens = 0
        self.max_tiles = 0
        self.not_held_bytes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module in tiles, or without tiles if traced, or if the argument is not one tensor."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or is_traced() or in_forward_mode():
            return self._compute(*args, **kwargs)
        num_tiles = self.num_tiles(x) if x.dim() in self._token_wise.ranks else 1
        return self._compute(x) if num_tiles == 1 else self._tiled(x, num_tiles)

    def num_tiles(self, x: Tensor) -> int:
        """Return the number of tiles for an input, and store it for the report."""
        num_tokens = math.prod(x.shape[:-1])
        device = x.device.type
        # Under autocast, the results of GEMMs and of later operations have autocast's dtype.
        is_cast = torch.is_autocast_enabled(device) and x.dtype == torch.float32
        itemsize = torch.get_autocast_dtype(device).itemsize if is_cast else x.itemsize
        wide_bytes = num_tokens * self._token_wise.widest * NUM_WIDE * itemsize
        budget_bytes = self.budget_bytes or max(MIN_BUDGET_BYTES, x.nbytes)
        # Round the quotient up; a tile has at least one token.
        num_tiles = min(-(-wide_bytes // budget_bytes), num_tokens) if num_tokens >= self.min_tokens else 1
        self.max_tokens, num_tiles = max(self.max_tokens, num_tokens), max(num_tiles, 1)
        self.max_tiles = max(self.max_tiles, num_tiles)
        # Without tiles, all wide activations are in memory at once; with tiles, only one tile's activations.
        self.not_held_bytes = max(self.not_held_bytes, wide_bytes - wide_bytes // num_tiles)
        return num_tiles

    def attach(self) -> None:
        """Replace the module's forward, and gather its weights once for all tiles.

        Otherwise ZeRO stage 3 would gather the weights in every tile, and ranks with different numbers of
        tiles would wait for each other.
        """
        self.module.forward = self
        self._gathered = GatheredAtOnce(self.module)

    def restore(self) -> None:
        """Restore the module's own forward; a second call does nothing."""
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._gathered is not None:
                self._gathered.undo()

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        # Do not call `self.module.forward`, which is this object.
        return type(self.module).forward(self.module, *args, **kwargs)

    def _tiled(self, x: Tensor, num_tiles: int) -> Tensor:
        tiles = split(x, -(-math.prod(x.shape[:-1]) // num_tiles))
        if not torch.is_grad_enabled():
            outputs = [self._compute(tile) for tile in tiles]
        else:
            saved = [_save(tile) for tile in tiles]  # before any tile runs
            # All tiles share one state, so each recomputation has the flags and parameters of this call.
            state = CallState(self.module)
            # Hide the tiles' saved tensors from an outer checkpoint, which would recompute the tiles.
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                outputs = [self._checkpointed(*each, state) for each in zip(tiles, saved, strict=True)]
            state.end_forward()
        return join(outputs, x)

    def _checkpointed(self, tile: Tensor, saved: Tensor, state: CallState) -> Tensor:
        first = [tile]  # the first run pops the tile, so that the checkpoint has no reference to it
        run = functools.partial(self._run, first, state)
        # `checkpoint` restores random states and autocast of the device of `saved`, which has no elements.
        early: Any = {"early_stop": self._stops_early}
        return checkpoint(run, saved, use_reentrant=False, **early)  # pyright: ignore[reportReturnType]

    def _run(self, first: list[Tensor], state: CallState, saved: Tensor) -> Any:
        if first:
            return self._compute(first.pop())
        # The second run reads the tile from the graph, where `_save` put it.
        node: Any = saved.grad_fn
        (tile,) = node.saved_tensors
        with state.again("a tiled MLP"):
            return self._compute(tile)


class _Save(torch.autograd.Function):
    """Saves a tensor for the backward pass; the result has no elements."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, needs_grad: Tensor) -> Tensor:
        # Save through autograd, so that an outer checkpoint can drop and restore the tensor.
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def _save(x: Tensor) -> Tensor:
    # This tensor gives the result an autograd node, even if x needs no gradient.
    needs_grad = torch.empty(0, requires_grad=True)
    apply: Callable[..., Tensor] = _Save.apply  # pyright: ignore[reportAssignmentType]
    return apply(x, needs_grad)
