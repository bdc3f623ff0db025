"""Compute chains of convolutions in spatial tiles, so that what is between the layers exists for one tile.

For large images and volumes, the activations at full resolution are most of what a step holds. Here the
children of each `nn.Sequential` that are local (a pixel of the output depends on a window of the input:
convolutions, pooling, pointwise activations, dropout, normalization in evaluation mode) are computed in tiles
with a halo, by one autograd function: the forward pass keeps the first one's input alone, and the backward
pass computes one tile at a time again. Parameters, names and checkpoints stay the same, hooks of the
container run once, and each weight gets one gradient.

Statistics of all pixels end a segment: batch normalization in training, instance and group normalization.
So do a second input, a branch, a class that is not torch's own, hooks on a layer, and sharded weights.
Layers that a forward of your own calls one after another are left alone: whether something else reads what
is between them is not known before it does. Put them into an `nn.Sequential`.

A segment is tiled where its input has `min_pixels` or more, one tile is not enough for the budget, at most a
quarter is computed twice for the halo, and the tiles hold less than the layers would keep: both by
arithmetic, before anything runs. Samples have no halo, so a batch is divided first. A chain whose halo would
be larger is cut into shorter ones. Evaluation is tiled alike: it takes less memory there too, and dropout
draws the same in a forward pass without gradients as in one with them.

Saves: activations between the convolutions of a chain, on large images and volumes.
Costs: one more forward of the segments, by operations at most a third of theirs, and the halo. Nothing more
    in blocks that `callbacks/gradient_checkpointing` recomputes and that end with the segment; where a block
    saves something after it (a norm, a second segment), the segment is computed three times. Dropout draws
    for each tile: statistically equal, not to the bit. No second derivatives.
When not: images are small: it says so; norms over all pixels, which end a chain.
Conflicts: `callbacks/torch_compile`, which unrolls tiles; `callbacks/gradient_checkpointing` with
    `selective`, which would keep the convolutions of all tiles.
Source: StreamingCNN, https://arxiv.org/abs/1911.04432; torch.utils.checkpoint
"""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_eff.callbacks._tiled_conv.forward import TiledContainer
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import Count, Positive, check_arguments
from lightning_eff.core.candidates import Candidate
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.technique import RECOMPUTE, TRANSFORM, Facts, Outcome, Rule, name_of
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels.conv import has_windows, is_container

NOT_FOUND = "no nn.Sequential with convolutions or pooling found"
MAX_ENDS = 3
"""Reasons that a report has in its line."""


@check_arguments
def tile_convs(
    model: nn.Module,
    *,
    modules: BlockSelector = None,
    tile_budget_mib: Positive | None = None,
    min_pixels: Count = 65536,
) -> dict[str, TiledContainer]:
    """Compute chains of convolutions of a model in tiles from now on; for Fabric, or your own training loop.

    Args:
        model: Any module; containers whose forward is replaced are left as they are.
        modules: As in `TiledConv`.
        tile_budget_mib: As in `TiledConv`.
        min_pixels: As in `TiledConv`.

    Returns:
        What replaces the forward of each container, by name; its `restore` undoes it.

    Raises:
        ConfigError: A value is outside its range, or `modules` selects nothing or what is no container.

    Warns:
        NoEffectWarning: No container with convolutions was found.

    Example:
        >>> level = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        >>> list(tile_convs(nn.ModuleDict({"level": level, "head": nn.Linear(8, 2)})))
        ['level']
    """
    tiled = _tile(model, modules, tile_budget_mib, min_pixels)
    before = (vars(each).get("forward") for each in model.modules())
    if not tiled and not any(isinstance(forward, TiledContainer) for forward in before):
        warnings.warn(f"tile_convs had no effect: {NOT_FOUND}", NoEffectWarning, stacklevel=3)
    return tiled


def _tile(
    model: nn.Module, modules: BlockSelector, tile_budget_mib: float | None, min_pixels: int
) -> dict[str, TiledContainer]:
    budget_bytes = None if tile_budget_mib is None else max(1, int(tile_budget_mib * 2**20))
    tiled = {
        name: TiledContainer(module, budget_bytes=budget_bytes, min_pixels=min_pixels)
        for name, module in _containers(model, modules).items()
        if "forward" not in vars(module) and has_windows(module)
    }
    for forward in tiled.values():
        forward.attach()
    return tiled


def _containers(model: nn.Module, modules: BlockSelector) -> dict[str, nn.Module]:
    """Return the selected containers and those inside them; by default all."""
    selected = {"": model}
    if modules is not None:
        try:
            selected = model_surgery.select_blocks(model, modules)
        except ConfigError as error:
            raise ConfigError(key="modules", value=error.value, allowed=error.allowed) from error
        for name, module in selected.items():
            if not is_container(module):
                allowed = f"modules of class nn.Sequential with its forward; {type(module).__name__} is none"
                raise ConfigError(key="modules", value=name, allowed=allowed)
    return {
        name: inner
        for prefix, module in selected.items()
        for name, inner in module.named_modules(prefix=prefix)
        if is_container(inner)
    }


class TiledConv(Managed):
    """Compute the chains of convolutions in `nn.Sequential` containers in spatial tiles.

    Args:
        modules: Class names or patterns of names of containers (`net.levels.*`), classes, or a predicate of
            name and module; None takes every `nn.Sequential`.
        tile_budget_mib: MiB that the layers' outputs and two gradients may take on one tile; None for the
            larger of 64 and a quarter of the segment's input.
        min_pixels: Inputs with fewer pixels or voxels (samples x space) are not tiled.

    Raises:
        ConfigError: A value is outside its range, or `modules` selects nothing or what is no container.
        ConflictError: The blocks are compiled, or another technique keeps what is tiled.

    Warns:
        NoEffectWarning: No container with convolutions was found, or nothing was computed in tiles.

    Example:
        >>> callback = TiledConv(tile_budget_mib=256)
        >>> trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> TiledConv(min_pixels=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: min_pixels=0: expected a whole number of at least 1
    """

    exact = True
    try_as = (Candidate(words=("+callbacks=tiled_conv",), needs=("peak/convolution",)),)

    @check_arguments
    def __init__(
        self,
        *,
        modules: BlockSelector = None,
        tile_budget_mib: Positive | None = None,
        min_pixels: Count = 65536,
    ) -> None:
        self.modules = modules
        self.tile_budget_mib = tile_budget_mib
        self.min_pixels = min_pixels
        self._tiled: dict[str, TiledContainer] = {}

    def facts(self) -> Facts:
        """State that compiled blocks are not tiled, and that products of tiles are not kept."""
        compiled = Rule(
            name="callbacks/torch_compile",
            reason="the compiler chooses what a compiled block keeps, and unrolls its tiles",
            remedies=("~callbacks.tiled_conv", "~callbacks.torch_compile"),
        )
        return Facts(provides=(TRANSFORM, RECOMPUTE), excludes=(compiled,))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._tiled = {}
            model_surgery.queue(trainer, pl_module, Stage.TILE, self._apply)
            self.cleanup.callback(self._restore)
            self.cleanup.callback(model_surgery.restore, pl_module)

    def _apply(self, model: nn.Module) -> int:
        try:
            new = _tile(model, self.modules, self.tile_budget_mib, self.min_pixels)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        self._tiled |= new
        if not self._tiled:
            text = f"TiledConv had no effect: {self.outcome().did}"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return len(new)

    def _restore(self) -> None:
        for forward in self._tiled.values():
            forward.restore()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        outcome = self.outcome()
        if self._tiled and not outcome.effective:
            warnings.warn(f"TiledConv had no effect: {outcome.did}", NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report the segments, their tiles and halo, the bytes not held, and what ended segments."""
        segments = {
            f"{name}.{part}" if name else part: segment
            for name, each in self._tiled.items()
            for part, segment in each.segments.items()
        }
        ends = {
            f"{name}.{child}" if name else child: reason
            for name, each in self._tiled.items()
            for child, reason in each.ends.items()
        }
        tiles = max((each.num_tiles for each in segments.values()), default=1)
        halo = max((each.halo for each in segments.values()), default=0.0)
        not_held = sum(each.not_held_bytes for each in segments.values())
        pixels = max((each.max_pixels for each in self._tiled.values()), default=0)
        if not self._tiled:
            did = NOT_FOUND
        elif not segments:
            why = "no chain of two layers or more exceeds its budget (tile_budget_mib)"
            why = why if pixels >= self.min_pixels else f"min_pixels={self.min_pixels:,}"
            did = f"{pixels:,} pixels: nothing in tiles ({why})"
        else:
            did = (
                f"{len(segments)} segment{'s' * (len(segments) != 1)} in up to {tiles} tiles: "
                f"{human_bytes(not_held)} not kept for the backward pass, {halo:.0%} more pixels for the halo"
            )
        reasons = list(dict.fromkeys(ends.values()))
        did += f"; segments end: {', '.join(reasons[:MAX_ENDS])}" if reasons else ""
        numbers = {
            "segments": {name: vars(each) for name, each in segments.items()}, "tiles": tiles, "halo": halo,
            "not_held_bytes": not_held, "pixels": pixels, "ends": ends,
        }  # fmt: skip
        return Outcome(did=did, effective=bool(segments), numbers=numbers)
