"""Compute the loss of a language model in tiles, without storing all logits [tokens, vocabulary].

The logits, their gradient and the log-softmax between them are often the largest tensors of a step. With this
callback, the output projection returns a placeholder for the logits, which are computed when a function reads
them (`_lazy_logits.py`). A cross-entropy of the placeholder is computed a few rows at a time
(kernels/cross_entropy.py). Every other function that reads the placeholder gets full logits, so
`training_step` needs no change. If `training_step` returns the mean loss unchanged, GradientAccumulation and
MicroBatch weight the loss by its number of targets.

Saves: the logits of a language model, their gradient and the log-softmax. Each of these tensors has tokens x
    vocabulary values.
Costs: a fourth GEMM of the projection if the dtype is float16, if the projection is recomputed, or if the
    loss has one value per row. A 16-bit gradient is rounded once per tile, at most 16 times.
When not: the vocabulary is small; metrics read full logits, which are then computed in addition to the tiles.
Conflicts: a quantized projection; strategies that wait for the gradient of a model's logits. If the
    projection has hooks, or an adapter with dropout, the logits are computed immediately. Logits that are
    still referenced at an optimizer step, or after a validation batch, are computed then. After any other
    change of weights or inputs, the logits cannot be read any more; changes through `.data` are not detected.
    A fully compiled model has a graph break at its output projection. `torch.jit.script` of the projection
    fails during a fit.
Source: kernels/cross_entropy.py; learned from Liger-Kernel, TRL and torch.nn.functional.linear_cross_entropy
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.callbacks._lazy_logits import LateProjection, node_of
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import Positive, check_arguments
from lightning_eff.core.errors import TO_FSDP2, ConfigError, ConflictWarning, NoEffectWarning, Remedy
from lightning_eff.core.managed import Tiling
from lightning_eff.core.technique import TRANSFORM, Facts, Outcome, Rule, Try
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels.cross_entropy import tile_rows_of
from lightning_eff.microbatching import lightning_loop
from lightning_eff.report.advice import Observed, Suggestion

GEMMS = ("mm", "addmm", "bmm", "linear")
TILED = ("_log_softmax", "_to_copy", "clone", "mul", "div")
"""Operations of the forward pass that run in tiles, by the names that torch dispatches."""
NOT_FOUND = "no output projection with more outputs than inputs"
NAME_IT = "; name it with head="
CHANGE = "loss = linear_cross_entropy(hidden, self.head.weight, targets)"
"""Line of a `training_step` that computes the same loss."""


@check_arguments
def tile_loss(
    model: nn.Module, *, head: str | None = None, tile_budget_mib: Positive | None = None
) -> dict[str, LateProjection]:
    """Compute a model's loss in tiles, with Fabric or in your own training loop.

    Args:
        model: Any module.
        head: Name of the output projection; if None, the projection is detected.
        tile_budget_mib: As in `kernels.cross_entropy.linear_cross_entropy`.

    Returns:
        A dictionary that maps the projection's name to the delayed projection, whose method `restore` undoes
        the change. Empty if the model has no projection, or already computes its loss in tiles.

    Raises:
        ConfigError: A value is outside its range, the projection is not found, or the projection is not a
            linear layer.

    Warns:
        NoEffectWarning: The model has no output projection.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
        >>> list(tile_loss(model))
        ['1']
        >>> logits = model(torch.zeros(1, 4, dtype=torch.long))
        >>> nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(4, dtype=torch.long)).backward()
    """
    if find_head(model, head) is None:
        text = f"tile_loss had no effect: {NOT_FOUND}{NAME_IT}"
        warnings.warn(text, NoEffectWarning, stacklevel=3)
    return _tile(model, head, tile_budget_mib)


def _tile(model: nn.Module, head: str | None, tile_budget_mib: float | None) -> dict[str, LateProjection]:
    name, module = find_head(model, head) or ("", None)
    # If a projection is delayed already, its `_call_impl` has been replaced.
    if module is None or "_call_impl" in vars(module):
        return {}
    return {name: LateProjection(module, name, tile_budget_mib=tile_budget_mib)}


class TiledLoss(Tiling):
    """Compute the loss of a language model in tiles.

    Args:
        head: Name of the output projection (`model.lm_head`); if None, the projection is detected.
        tile_budget_mib: Memory for the float32 logits of a tile, in MiB. If None, the budget is the larger
            of the size of the hidden states and a default for the device. The default on a CPU is 16 MiB; a
            tile then has at least 128 rows and at most an eighth of all rows. The default on a GPU is a 64th
            of the GPU's memory; a tile then has at most 2,048 rows.

    Raises:
        ConfigError: A value is outside its range, the projection is not found, or the projection is not a
            linear layer.

    Warns:
        NoEffectWarning: The model has no output projection, or no loss was computed in tiles.
        ConflictWarning: The backward passes of a step had unequal numbers of targets, and no weights.

    Example:
        >>> trainer = pl.Trainer(callbacks=[TiledLoss()], logger=False, accelerator="cpu")
        >>> TiledLoss(tile_budget_mib=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: tile_budget_mib=0: expected a finite number above 0...
    """

    hint = f"\n  try: {CHANGE}"
    hint_if_none = NAME_IT
    lowers = ("activations",)
    try_as = (Try(),)

    @check_arguments
    def __init__(self, *, head: str | None = None, tile_budget_mib: Positive | None = None) -> None:
        super().__init__()
        self.head = head
        self.tile_budget_mib = tile_budget_mib
        self._unweighted: list[Tensor] = []
        """Targets per sample of each backward pass without a loss weight, in the current step."""
        self._has_warned = False

    def facts(self) -> Facts:
        """Declare that TiledLoss changes the model; reject strategies that wait for the logits' gradient."""
        unseen = tuple(
            Rule(
                name=name,
                reason="it waits for the gradient of the model's logits, which is never computed",
                remedies=(TO_FSDP2, Remedy("~callbacks.tiled_loss", "remove TiledLoss")),
            )
            for name in ("lightning/FSDPStrategy", "lightning/ModelParallelStrategy")
        )
        return Facts(provides=(TRANSFORM,), excludes=unseen)

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest TiledLoss if a log-softmax reads the output projection's logits."""
        try:
            name, head = find_head(run.module, None) or ("", None)
        except ConfigError:  # several layers may be the output projection
            return None
        blocks = tuple(f"{block}." for block in model_surgery.repeated_blocks(run.module))
        outside = {i: each for i, each in run.activations() if not each.path.startswith(blocks)}
        of_head = [i for i, each in outside.items() if each.path == name and each.operation in GEMMS]
        of_loss = [i for i, each in outside.items() if each.operation == "_log_softmax"]
        size, log_softmax = (max((run.sizes[i] for i in each), default=0) for each in (of_head, of_loss))
        # A log-softmax of the head's logits has their size, or half or double the size in another dtype.
        if not isinstance(head, nn.Linear) or not size or not size // 2 <= log_softmax <= 2 * size:
            return None
        # Sizes of the logits, their gradient and the log-softmax, each in any dtype.
        sizes = {factor * each // 2 for each in (size, log_softmax) for factor in (1, 2, 4)}
        whole = {i: each for i, each in outside.items() if run.sizes[i] in sizes}
        if not {each.operation for each in whole.values() if each.phase == "forward"} <= {*GEMMS, *TILED}:
            return None  # another operation reads the logits, so full logits would be computed anyway
        # The log-softmax is float32 [rows, vocabulary]: 4 bytes per value.
        num_rows = log_softmax // (4 * head.out_features)
        # An expanded tensor has the shape of the hidden states without their memory.
        rows = torch.empty(1, 1, device=head.weight.device).expand(num_rows, head.in_features)
        fraction = tile_rows_of(rows, head.out_features, None) / max(1, num_rows)
        return Suggestion(
            technique=TiledLoss(),
            why=f"logits of {name}, {human_bytes(size)}, and as much each for log-softmax and gradient",
            peak_bytes=run.peak_if(dict.fromkeys(whole, fraction)),
        )

    @override
    def tile(self, model: nn.Module) -> dict[str, LateProjection]:
        """Make the output projection compute its logits only when they are read."""
        return _tile(model, self.head, self.tile_budget_mib)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pass the number of targets to GradientAccumulation and MicroBatch."""
        self._unweighted, self._has_warned = [], False
        step = trainer.fit_loop.epoch_loop.automatic_optimization
        # Without these two callbacks, Lightning's own loop runs, which does not weight batches.
        if isinstance(step, lightning_loop.ExactStep):
            step.weigh, step.weighs_by = self._weigh, "targets of the tiled loss"
            for projection in self._tiled.values():
                projection.means = []

    def _weigh(self, output: Any, num_samples: int | None) -> Any:
        """Add `loss_weight` to a step's output if the loss is an unchanged tiled mean without a weight.

        `num_samples` is 0 when the loop checks the loss outside of a step.
        """
        means: list[tuple[object, Tensor]] = []
        for projection in self._tiled.values():
            means += projection.means or ()
            projection.means = []
        named: dict[str, Any] = output if isinstance(output, dict) else {"loss": output}
        loss = named.get("loss")
        if not isinstance(loss, Tensor) or named.get("loss_weight") is not None:
            return output
        # An unchanged tiled mean keeps its autograd node; a sum such as `loss + aux` has another node.
        node = node_of(loss)
        targets = next((count for each, count in means if each is node), None)
        if targets is not None:
            return named | {"loss_weight": targets}
        if means and num_samples:
            # Equal numbers of targets per sample need no weights; `on_before_optimizer_step` checks this.
            self._unweighted.append(torch.stack([count for _, count in means]).sum() / num_samples)
        return output

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute logits that are still referenced; warn about backward passes that need a loss weight."""
        # Why here too: the optimizer's own step hook runs before the closure that computes the batch.
        self._compute_held()
        passes, self._unweighted = self._unweighted, []
        if len(passes) > 1 and not self._has_warned and len(set(torch.stack(passes).tolist())) > 1:
            self._has_warned = True
            text = (
                "TiledLoss: the backward passes of a step had unequal numbers of targets and count by their "
                "samples: a loss that was changed after its mean gives no weight\n"
                '  try: return {"loss": loss, "loss_weight": num_targets} from training_step'
            )
            warnings.warn(text, ConflictWarning, stacklevel=2)

    @override
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Compute logits that are still referenced, with the weights of their batch."""
        # Lightning's WeightAveraging replaces the weights before the module reads logits at the epoch's end.
        self._compute_held()

    def _compute_held(self) -> None:
        for projection in self._tiled.values():
            projection.compute_held()

    @override
    def outcome(self) -> Outcome:
        """Report the tiles, the bytes that were saved, and the functions that read full logits."""
        for name, each in self._tiled.items():  # at most one projection
            by = ", ".join(f"{reader} ({count})" for reader, count in each.readers.most_common(3))
            numbers = {
                "head": name, "losses": each.num_losses, "tile_rows": each.tile_rows, "rows": each.rows,
                "bytes_not_held": each.held_bytes, "whole": dict(each.readers),
            }  # fmt: skip
            if not each.num_losses:
                did = f"no loss of {name}'s logits was computed in tiles"
                did += f", since they were read by {by}" if by else ""
                return Outcome(did=did, effective=False, numbers=numbers)
            did = (
                f"{each.num_losses} loss{'es' * (each.num_losses != 1)} of {name} in tiles of "
                f"{each.tile_rows} of up to {each.rows} rows: {each.held_bytes / 2**20:.4g} MiB of logits "
                f"[{each.rows}, {each.width}] not held" + (f"; computed whole for {by}" if by else "")
            )
            return Outcome(did=did, numbers=numbers)
        return Outcome(did=NOT_FOUND, effective=False)


def find_head(model: nn.Module, head: str | None) -> tuple[str, nn.Module] | None:
    """Return a model's output projection with its name, or None if the model has no output projection.

    Hugging Face's models have a method that returns their output projection. In any other model, the
    projection is a linear layer outside of the repeated blocks. A layer that shares its weight with an
    embedding is preferred. Otherwise, the projection is the layer with the most outputs, if this layer has
    more outputs than inputs.

    Args:
        model: The model.
        head: Name of the projection; if None, the projection is detected.

    Raises:
        ConfigError: No module has that name, or several layers qualify.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if head is not None:
        if head not in named:
            linear = [name for name, module in named.items() if isinstance(module, nn.Linear)]
            example = linear[-1] if linear else "model.head"
            allowed = f"the name of the output projection, for example {example}"
            raise ConfigError(key="head", value=head, allowed=allowed)
        return head, _trained_copy(named[head])
    # Hugging Face's models have this method; it returns None if a model has no head.
    getters = [getattr(module, "get_output_embeddings", None) for module in (model, *named.values())]
    outputs = {id(get()) for get in getters if callable(get)}
    names = [name for name, module in named.items() if id(module) in outputs]
    if not names:
        adapters = [name for name, module in named.items() if hasattr(module, model_surgery.ADAPTER)]
        # Layers inside blocks and adapters are never the head.
        inner = tuple(f"{name}." for name in (*model_surgery.repeated_blocks(model), *adapters))
        layers = {
            name: layer
            for name, module in named.items()
            if isinstance(layer := _plain(module), nn.Linear) and not name.startswith(inner)
        }
        # Why not `layer.weight`: in a parametrized layer, this read changes the state of spectral_norm.
        tables = [module for module in named.values() if isinstance(module, nn.Embedding)]
        shared = {id(p) for table in tables for p in table.parameters(recurse=False)}
        names = [
            name
            for name, layer in layers.items()
            if not shared.isdisjoint(map(id, layer.parameters(recurse=False)))
        ]
        if not names:
            # The head widens the hidden states to the vocabulary.
            widths = {
                name: layer.out_features
                for name, layer in layers.items()
                if layer.out_features > layer.in_features
            }
            names = [name for name, width in widths.items() if width == max(widths.values())]
    if not names:
        return None
    if len(names) > 1:
        raise ConfigError(key="head", value=None, allowed=f"one of {', '.join(names)}")
    return names[0], _trained_copy(named[names[0]])


def _plain(module: nn.Module) -> Any:
    """Return a linear layer without its adapter."""
    trained = _trained_copy(module)
    return getattr(trained, "base_layer", trained)


def _trained_copy(module: Any) -> nn.Module:
    """Return the copy of a module that PEFT trains (`modules_to_save`); return any other module unchanged."""
    copies: Any = getattr(module, "modules_to_save", None)
    return next(iter(copies.values())) if isinstance(copies, nn.ModuleDict) and len(copies) == 1 else module
