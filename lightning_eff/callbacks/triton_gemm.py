"""Compute linear layers with our tiled GEMM, and accumulate weight gradients in place.

Every trained `nn.Linear` with enough features gets the class `TritonLinear`; parameters, names and
checkpoints stay the same. On a CUDA GPU, the first call with a new shape measures the times of torch's
library and of the most promising configs of our kernels. Our kernels are used if they are more than 3 %
faster than the library; later runs read the choice from a file (kernels/dispatch.py). If GradientAccumulation
or MicroBatch runs several backward passes per step, the GEMM adds a weight's gradient directly to
`weight.grad`. So neither our kernels nor the library allocate a second tensor of the gradient's size. Layers
that gain nothing are converted back after the first batch.

Saves: a second copy of each large weight gradient if a step has several backward passes; with `fuse_mlps`,
    half of an MLP's wide activations.
Costs: measurements in the first step of the first run on a GPU. The measurements take about 0.1 s per shape
    (predicted), plus seconds to compile each new kernel. The measurements also need 256 MiB, and memory for
    two more outputs of the layer. Each call of a layer that uses our kernels or accumulates in place costs 15
    to 35 microseconds of Python time. With `fuse_mlps`, the backward pass computes activations a second time.
When not: steps have one backward pass and there is no CUDA GPU; the blocks are compiled.
Conflicts: `callbacks/torch_compile`, which computes the layers of compiled blocks. Subclasses of `nn.Linear`,
    and layers that are frozen when the run begins, are not converted.
Source: learned from Megatron-LM's fused weight gradients; kernels/matmul.py
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_eff.callbacks._fused_mlp import FusedMLP, fuse_mlps
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import Count, check_arguments
from lightning_eff.core.errors import ConfigError, NoEffectWarning, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.technique import TRANSFORM, Facts, Outcome, Rule, Try, Verdict, name_of
from lightning_eff.kernels import dispatch
from lightning_eff.kernels.choices import LIBRARY, Choices
from lightning_eff.kernels.linear import Accumulation, TritonLinear, forget_copies
from lightning_eff.microbatching import lightning_loop


@check_arguments
def swap(
    model: nn.Module,
    *,
    min_features: Count = 256,
    blocks: BlockSelector = None,
    accumulation: Accumulation | None = None,
) -> dict[str, TritonLinear]:
    """Convert linear layers to `kernels.linear.TritonLinear`, with Fabric or in your own training loop.

    Args:
        model: Any module; layers that are already converted do not change.
        min_features: Layers with fewer input or output features stay `nn.Linear`.
        blocks: Blocks of the model whose layers are converted; if None, the full model.
        accumulation: Context in which weight gradients may be added in place; if None, they never are.

    Returns:
        The converted layers by name; `unswap` converts a layer back.

    Raises:
        ConfigError: A value is outside its range, or `blocks` matches nothing.

    Warns:
        NoEffectWarning: The model has no layer to convert.

    Example:
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
        >>> list(swap(model))
        ['0']
    """
    selected = {"": model} if blocks is None else model_surgery.select_blocks(model, blocks)
    swapped: dict[str, TritonLinear] = {}
    for prefix, block in selected.items():
        for name, each in block.named_modules(prefix=prefix):
            # Compare the exact type, because a subclass may compute something else.
            is_large = type(each) is nn.Linear and min(each.in_features, each.out_features) >= min_features
            if is_large and each.weight.requires_grad:
                each.__class__ = TritonLinear
                layer: TritonLinear = each  # pyright: ignore[reportAssignmentType]
                layer.accumulation = accumulation
                swapped[name] = layer
    if not swapped and not any(isinstance(module, TritonLinear) for module in model.modules()):
        text = f"no trained linear layer has {min_features} or more input and output features"
        warnings.warn(f"TritonGemm had no effect: {text}; lower min_features", NoEffectWarning, stacklevel=3)
    return swapped


def unswap(layer: TritonLinear) -> None:
    """Convert a layer back to `nn.Linear`; a second call does nothing."""
    for name in ("backend", "accumulation"):
        layer.__dict__.pop(name, None)
    if type(layer) is TritonLinear:  # torch's parametrizations may have set a subclass later
        layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]


class TritonGemm(Managed):
    """Convert linear layers to `kernels.linear.TritonLinear` while a model is trained.

    Args:
        min_features: Layers with fewer input or output features are not converted.
        blocks: Blocks to convert, by class, name (`blocks.*.mlp`) or predicate; if None, the full model.
        accumulate: Add weight gradients in place if a step has several backward passes.
        fuse_mlps: Compute each MLP of GPT- and Llama-like blocks as one function. The function stores half
            as many activations, and recomputes the others in the backward pass.

    Raises:
        ConfigError: A value is outside its range, or `blocks` matches nothing.

    Warns:
        NoEffectWarning: No layer was converted.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TritonGemm(min_features=64)], logger=False, accelerator="cpu")
        >>> TritonGemm(min_features=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: min_features=0: expected ...
    """

    exact = True
    lowers = ("time",)
    try_as = (Try(),)

    @check_arguments
    def __init__(
        self,
        *,
        min_features: Count = 256,
        blocks: BlockSelector = None,
        accumulate: bool = True,
        fuse_mlps: bool = False,
    ) -> None:
        self.min_features = min_features
        self.blocks = blocks
        self.accumulate = accumulate
        self.fuse_mlps = fuse_mlps
        self._accumulation = Accumulation()
        self._swapped: dict[str, TritonLinear] = {}
        self._fused: dict[str, FusedMLP] = {}
        self._choices: Choices | None = None  # measurements on this GPU; None if our kernels cannot run
        self._num_left = 0  # layers that gain nothing and were converted back
        self._is_settled = False
        self._step: lightning_loop.ExactStep | None = None

    def facts(self) -> Facts:
        """Warn about compiled layers; reject a second callback that replaces the forward of an MLP."""
        compiled = Rule(
            name="callbacks/torch_compile",
            reason="the compiler computes the linear layers of a compiled block itself",
            remedies=(
                Remedy("~callbacks.triton_gemm", "remove TritonGemm"),
                Remedy("~callbacks.torch_compile", "remove TorchCompile"),
            ),
            verdict=Verdict.WARNED,
        )
        either = (
            Remedy("callbacks.triton_gemm.fuse_mlps=false", "TritonGemm(fuse_mlps=False)"),
            Remedy("~callbacks.tiled_mlp", "remove TiledMLP"),
        )
        tiled = Rule(name="callbacks/tiled_mlp", reason="both replace the forward of an MLP", remedies=either)
        return Facts(provides=(TRANSFORM,), excludes=(compiled, tiled) if self.fuse_mlps else (compiled,))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._swapped, self._fused, self._accumulation.num_added = {}, {}, 0
            self._num_left, self._is_settled = 0, False
            dispatch.forget()
            model_surgery.queue(trainer, pl_module, Stage.TILE, self._apply)
            self.cleanup.callback(self._restore)
            self.cleanup.callback(model_surgery.restore, pl_module)  # pushed last, so it runs first

    def _restore(self) -> None:
        for layer in self._swapped.values():
            unswap(layer)
        for mlp in self._fused.values():
            mlp.restore()

    def _apply(self, model: nn.Module) -> int:
        how: dict[str, Any] = {
            "min_features": self.min_features, "blocks": self.blocks,
            "accumulation": self._accumulation if self.accumulate else None,
        }  # fmt: skip
        try:
            fused = fuse_mlps(model, **how) if self.fuse_mlps else {}
            new = swap(model, **how)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        self._fused |= fused
        for name, layer in list(new.items()):
            if any(layer in (mlp.layers.up, mlp.layers.down) for mlp in fused.values()):
                # A fused MLP computes these layers itself. The gate is still called as a module, so the gate
                # stays converted.
                unswap(new.pop(name))
        self._swapped |= new
        return len(new) + len(fused)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Enable in-place accumulation, and load earlier measurements of this GPU."""
        device = trainer.strategy.root_device
        can_choose = dispatch.may_use_triton("auto", device, torch.float32)
        self._choices = dispatch.choices_of(device) if can_choose else None
        step = trainer.fit_loop.epoch_loop.automatic_optimization
        self._step = step if self.accumulate and isinstance(step, lightning_loop.ExactStep) else None
        if self._step is not None:
            self._step.around_backward = lambda: self._adding(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Drop cached casts, and record whether the step may have several backward passes."""
        # The previous step has changed the weights, so the cached casts are out of date.
        forget_copies()
        self._accumulation.is_expected = self._step is not None and self._step.may_have_several_passes

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the first batch, convert back the layers that gain nothing."""
        if self._is_settled:
            return
        self._is_settled = True
        self._follow_rank_0(trainer)
        ours = self._choices.ours() if self._choices is not None else []
        # With accumulation, every layer gains, so no layer is converted back.
        for layer in self._swapped.values() if self._step is None else ():
            # Choices are stored by size, not by layer.
            is_ours = any({layer.out_features, layer.in_features} <= sizes for sizes in ours)
            if layer.backend == "auto" and not is_ours:
                unswap(layer)
                self._num_left += 1

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._follow_rank_0(trainer)

    def _follow_rank_0(self, trainer: pl.Trainer) -> None:
        """Adopt the choices of rank 0, the only rank that measures; shapes without a choice use torch."""
        if self._choices is not None and trainer.world_size > 1:
            self._choices.adopt(trainer.strategy.broadcast(self._choices.text()))

    def _adding(self, trainer: pl.Trainer) -> AbstractContextManager[None]:
        """Return a context for one backward pass, inside which gradients may be added in place.

        In-place addition is not allowed in the pass in which DDP reduces gradients, or if a strategy shards
        or scales gradients.
        """
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # In the last pass of a step, DDP's reducer waits for every gradient to pass through autograd.
            may_add = not model.require_backward_grad_sync
        else:
            may_add = trainer.world_size == 1
        may_add = may_add and not isinstance(trainer.strategy, lightning_loop.ScalesGradients)
        return self._accumulation if may_add else nullcontext()

    def outcome(self) -> Outcome:
        """Report the number of converted layers, the backend per shape, and the gradients added in place."""
        rows = self._choices.rows() if self._choices is not None else []
        added, num_layers = self._accumulation.num_added, len(self._swapped)
        ratios = [row["ratio"] for row in rows if row["by"] != LIBRARY]
        num_mlps = sum(mlp.num_fused > 0 for mlp in self._fused.values())
        did = f"{num_mlps} MLP{'s' * (num_mlps != 1)} as one function each; " if self.fuse_mlps else ""
        did += f"{num_layers} linear layer{'s' * (num_layers != 1)} converted"
        which = "all" if self._num_left == num_layers else self._num_left
        did += f", {which} of them converted back, since nothing was gained" if self._num_left else ""
        did += "" if num_layers else f" (without frozen ones and those below {self.min_features} features)"
        who = f"our kernels compute {len(ratios)} of {len(rows)} shapes" if rows else f"{LIBRARY} computes"
        did += f": {who}"
        did += f", up to {max(ratios):.2f} times as fast as {LIBRARY}" if ratios else ""
        did += f"; {added} weight gradient{'s' * (added != 1)} added in place" if self.accumulate else ""
        numbers: dict[str, Any] = {
            "shapes": rows, "added_in_place": added, "left": self._num_left,
            "mlps": [name for name, mlp in self._fused.items() if mlp.num_fused],
        }  # fmt: skip
        return Outcome(did=did, effective=bool(ratios or added or num_mlps), numbers=numbers)
