"""Compute the loss of a language model in tiles, without its logits [tokens, vocabulary].

The logits, their gradient and the log-softmax between them are often the largest tensors of a step. The
output projection then returns logits that are not computed; the cross-entropy that reads them is computed
some rows at a time (kernels/cross_entropy.py), and where something else reads them they are computed as ever.
So an unchanged `training_step` profits, by whatever functions it or a library reaches the loss. A mean loss
that is returned gives its number of targets to GradientAccumulation and MicroBatch as its weight.

Saves: the logits of a language model, their gradient and the log-softmax: three times tokens x
    vocabulary.
Costs: in float16, and within recomputed blocks, the projection's GEMM a fourth time. A metric of whole logits
    has them computed beside the loss. A gradient of 16 bits is rounded once per tile, of which there are at
    most 16.
When not: the vocabulary is small; metrics of whole logits, which have them computed beside the loss.
Conflicts: a projection that is quantized; strategies that wait for the gradient of a model's logits. Where
    the projection has hooks, or an adapter with dropout, its logits are computed at once. Logits that are
    read after what they depend on has changed are refused, but for those that are held when an optimizer
    steps. A model that is compiled as a whole has a graph break at its projection.
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

from lightning_eff.callbacks._late_projection import LateProjection, node_of
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import Positive, check_arguments
from lightning_eff.core.errors import TO_FSDP2, ConfigError, ConflictWarning, NoEffectWarning, Remedy
from lightning_eff.core.managed import Tiling
from lightning_eff.core.technique import TRANSFORM, Facts, Outcome, Rule, Try
from lightning_eff.core.text import human_bytes
from lightning_eff.kernels.cross_entropy import tile_rows_of
from lightning_eff.microbatching import lightning_loop
from lightning_eff.report.advice import Observed, Suggestion
from lightning_eff.report.module_tracker import FORWARD

GEMMS = ("mm", "addmm", "bmm", "linear")
TILED = ("_log_softmax", "_to_copy", "clone", "mul", "div")
"""Operations of the forward pass that are computed in tiles, by the names that torch dispatches."""
NOT_FOUND = "no output projection with more outputs than inputs"
NAME_IT = "; name it with head="
CHANGE = "loss = linear_cross_entropy(hidden, self.head.weight, targets)"
"""What a `training_step` can do itself."""


@check_arguments
def tile_loss(
    model: nn.Module, *, head: str | None = None, tile_budget_mib: Positive | None = None
) -> dict[str, LateProjection]:
    """Have a model's loss computed in tiles from now on; for Fabric, or your own training loop.

    Args:
        model: Any module.
        head: Name of its output projection; None to find it.
        tile_budget_mib: As in `kernels.cross_entropy.linear_cross_entropy`.

    Returns:
        The projection by name, whose `restore()` undoes it; empty where the model has none, or it is done.

    Raises:
        ConfigError: A value is outside its range, or the projection is not found or no linear layer.

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
    if module is None or LateProjection.is_late(module):
        return {}
    return {name: LateProjection(module, name, tile_budget_mib=tile_budget_mib)}


class TiledLoss(Tiling):
    """Compute the loss of a language model in tiles.

    Args:
        head: Name of the output projection (`model.lm_head`); None finds it.
        tile_budget_mib: MiB that a tile's float32 logits may take; None for the larger of the hidden states
            and 16 on a CPU or 64 on a GPU, but at most an eighth of them all.

    Raises:
        ConfigError: A value is outside its range, or the projection is not found or no linear layer.

    Warns:
        NoEffectWarning: The model has no output projection, or no loss was computed in tiles.
        ConflictWarning: Backward passes of a step had unequal numbers of targets, and none as its weight.

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
        """Targets per sample of those backward passes of a step that got no weight."""
        self._has_warned = False

    def facts(self) -> Facts:
        """State that it changes the model, and which strategies would miss the backward pass of its loss."""
        unseen = tuple(
            Rule(
                name=name,
                reason="it waits for the gradient of the model's logits, which there is not",
                remedies=(TO_FSDP2, Remedy("~callbacks.tiled_loss", "remove TiledLoss")),
            )
            for name in ("lightning/FSDPStrategy", "lightning/ModelParallelStrategy")
        )
        return Facts(provides=(TRANSFORM,), excludes=unseen)

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest it where the outputs of a linear layer go into a log-softmax."""
        try:
            name, head = find_head(run.module, None) or ("", None)
        except ConfigError:  # several layers may be meant
            return None
        blocks = tuple(f"{block}." for block in model_surgery.repeated_blocks(run.module))
        outside = {i: each for i, each in run.activations() if not each.path.startswith(blocks)}
        logits = [
            run.sizes[i] for i, each in outside.items() if each.path == name and each.operation in GEMMS
        ]
        losses = [run.sizes[i] for i, each in outside.items() if each.operation == "_log_softmax"]
        if not isinstance(head, nn.Linear) or not logits or not losses:
            return None
        # The logits, their gradient and the log-softmax, in another dtype half or double of their size.
        size, log_softmax = max(logits), max(losses)
        sizes = {factor * each // 2 for each in (size, log_softmax) for factor in (1, 2, 4)}
        whole = {i: each for i, each in outside.items() if run.sizes[i] in sizes}
        read = {each.operation for each in whole.values() if each.phase == FORWARD}
        if log_softmax not in range(size // 2, 2 * size + 1) or not read <= {*GEMMS, *TILED}:
            return None  # another log-softmax, or logits that are read otherwise and computed all the same
        rows = torch.empty(1, 1).expand(log_softmax // (4 * head.out_features), head.in_features)
        fraction = tile_rows_of(rows, head.out_features, None) / max(1, len(rows))
        return Suggestion(
            technique=TiledLoss(),
            why=f"logits of {name}, {human_bytes(size)}, and as much each for log-softmax and gradient",
            peak_bytes=run.peak_if(dict.fromkeys(whole, fraction)),
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._unweighted, self._has_warned = [], False

    @override
    def tile(self, model: nn.Module) -> dict[str, LateProjection]:
        """Let the output projection compute its logits when they are read."""
        return _tile(model, self.head, self.tile_budget_mib)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the number of targets to exact accumulation."""
        step = trainer.fit_loop.epoch_loop.automatic_optimization
        if isinstance(step, lightning_loop.ExactStep):
            step.weigh, step.weighs_by = self._weigh, "targets of the tiled loss"
            for projection in self._tiled.values():
                projection.keeps_means, projection.counted = True, projection.counts()

    def _weigh(self, output: Any, num_samples: int | None) -> Any:
        """Add the weight to a step's output, where that is the mean loss itself and has none."""
        rest: dict[str, Any] = output if isinstance(output, dict) else {"loss": output}
        for projection in self._tiled.values():
            if num_samples == 0:  # of a check, which the report does not count
                projection.num_losses, projection.readers = projection.counted
            projection.counted = projection.counts()
        means = [mean for projection in self._tiled.values() for mean in projection.take_means()]
        loss = rest.get("loss")
        node = node_of(loss) if isinstance(loss, Tensor) else None
        targets = next((count for each, count in means if each is node), None)
        if targets is not None:
            return {"loss_weight": targets, **rest}
        if means and num_samples and rest.get("loss_weight") is None:
            self._unweighted.append(torch.stack([count for _, count in means]).sum() / num_samples)
        return output

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute logits that were returned or kept; an optimizer's own hook comes before its closure."""
        for projection in self._tiled.values():
            projection.compute_held()
        passes, self._unweighted = self._unweighted, []
        is_due = len(passes) > 1 and not self._has_warned
        if is_due and len(set(torch.stack(passes).tolist())) > 1:
            self._has_warned = True
            text = (
                "TiledLoss: the backward passes of a step had unequal numbers of targets and count by their "
                "samples: a loss that was changed after its mean gives no weight\n"
                '  try: return {"loss": loss, "loss_weight": num_targets} from training_step'
            )
            warnings.warn(text, ConflictWarning, stacklevel=2)

    @override
    def outcome(self) -> Outcome:
        """Report the tiles, the bytes that were not held, and what needed whole logits."""
        for name, each in self._tiled.items():
            width = each.linear.out_features
            by = ", ".join(f"{reader} ({count})" for reader, count in each.readers.most_common(3))
            numbers = {
                "head": name, "losses": each.num_losses, "tile_rows": each.tile_rows, "rows": each.rows,
                "bytes_not_held": each.held_bytes, "whole": dict(each.readers),
            }  # fmt: skip
            if not each.num_losses:
                did = f"no loss of {name}'s logits was computed in tiles"
                did += f", since they were read by {by}" if by else ""
                return Outcome(did=did, effective=False, numbers=numbers)
            did = f"{each.num_losses} loss{'es' * (each.num_losses != 1)} of {name} "
            did += f"in tiles of {each.tile_rows} of up to {each.rows} rows:"
            did += f" {each.held_bytes / 2**20:.4g} MiB of logits [{each.rows}, {width}] not held"
            did += f"; computed whole for {by}" if by else ""
            return Outcome(did=did, numbers=numbers)
        return Outcome(did=NOT_FOUND, effective=False)


def find_head(model: nn.Module, head: str | None) -> tuple[str, nn.Module] | None:
    """Return the output projection of a model and its name; None where it has none.

    That of Hugging Face's models is what they name as such. Else it is the linear layer outside of the
    repeated blocks that shares its weight with an embedding, or has the most outputs, more than inputs.

    Args:
        model: The model.
        head: Its name; None to find it.

    Raises:
        ConfigError: No module has that name, or several may be meant.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if head is not None:
        if head not in named:
            linear = [name for name, module in named.items() if isinstance(module, nn.Linear)]
            allowed = (
                f"the name of the output projection, for example {linear[-1] if linear else 'model.head'}"
            )
            raise ConfigError(key="head", value=head, allowed=allowed)
        return head, _trained_copy(named[head])
    getters = [getattr(module, "get_output_embeddings", None) for module in (model, *named.values())]
    found = {id(module): module for get in getters if callable(get) and (module := get()) is not None}
    if not found:
        adapters = [name for name, module in named.items() if hasattr(module, model_surgery.ADAPTER)]
        inner = tuple(f"{name}." for name in (*model_surgery.repeated_blocks(model), *adapters))
        outside = {
            id(module): module
            for name, module in named.items()
            if isinstance(_plain(module), nn.Linear) and not name.startswith(inner)
        }
        # Not `weight`: a parametrized layer computes it, and spectral_norm counts each computation.
        embeddings = [module for module in named.values() if isinstance(module, nn.Embedding)]
        weights = {p for module in embeddings for p in module.parameters(recurse=False)}
        tied = {
            key: each
            for key, each in outside.items()
            if not weights.isdisjoint(_plain(each).parameters(recurse=False))
        }
        wide = {
            key: each for key, each in outside.items() if _plain(each).out_features > _plain(each).in_features
        }
        most = max((_plain(each).out_features for each in wide.values()), default=0)
        found = tied or {key: each for key, each in wide.items() if _plain(each).out_features == most}
    if not found:
        return None
    names = [name for name, module in named.items() if id(module) in found]
    if len(found) > 1:
        raise ConfigError(key="head", value=None, allowed=f"one of {', '.join(names)}")
    return names[0], _trained_copy(named[names[0]])


def _plain(module: nn.Module) -> Any:
    """Return the layer that a module computes, without its adapter."""
    trained = _trained_copy(module)
    return getattr(trained, "base_layer", trained)


def _trained_copy(module: Any) -> nn.Module:
    """Return the copy that PEFT trains of a module in `modules_to_save`; else the module."""
    copies: Any = getattr(module, "modules_to_save", None)
    return next(iter(copies.values())) if isinstance(copies, nn.ModuleDict) and len(copies) == 1 else module
