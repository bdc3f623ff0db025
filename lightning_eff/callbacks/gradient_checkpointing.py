"""Recompute activations in the backward pass instead of keeping them (activation checkpointing).

The forward pass of a block saves only the block's inputs. When the backward pass needs the activations inside
the block, the block runs again. The policies are:

- `full` recomputes every repeated block, and `every_n` recomputes one block in n.
- `selective` recomputes all operations except matrix products, convolutions and attention. If a block changes
  an output in place, as recurrent layers do, `selective` also recomputes that output.
- `offload` recomputes like `full`, and keeps the blocks' inputs in host memory.
- `budget` lets the compiler choose which activations to keep, up to a fraction of all activations.
- `fit` chooses `keep`, `selective`, `full` or `offload` for each block. Among the choices whose predicted
  peak is within `memory`, `fit` takes the cheapest. `fit` uses `offload` only if nothing else fits.

A block runs again with the random numbers, autocast state, attributes, parameters, buffers and containers
that its forward pass had, so the result is bit-identical. The documentation page lists the changes that stop
the run, and changes that are not detected, for example changes of global variables.

Saves: activations, because a recomputed block stores only its inputs for the backward pass.
Costs: one more forward pass of the recomputed blocks. With `full`, this extra pass adds a third to a step's
    operations. With `selective`, only pointwise operations run again. `offload` copies each block's inputs
    over the bus twice, and needs pinned host memory of up to twice the size of these inputs. A block's hooks
    run twice. `fit` predicts a few steps before training; each prediction takes a fraction of a second to
    several seconds.
When not: the batch fits in memory, or the memory peak is in the optimizer step.
Conflicts: a model or strategy that already recomputes activations. `budget` needs `callbacks/torch_compile`;
    `selective` cannot be used with compiled blocks. `fit` needs the full, uncompiled model on each device,
    and a step that runs on fake tensors. A block that modifies its inputs in place needs `offload`.
Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; torch.utils.checkpoint
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import lightning.pytorch as pl
from torch import nn
from typing_extensions import override

from lightning_eff.callbacks._memory_fit import MemoryFit, num_bytes
from lightning_eff.callbacks._recomputed_block import RecomputedBlock, recompute
from lightning_eff.core import model_surgery
from lightning_eff.core.arguments import Count, Fraction, check_arguments
from lightning_eff.core.call_state import oldest_graphs_first
from lightning_eff.core.errors import ConfigError, NoEffectWarning, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.technique import (
    MEMORY_BUDGET,
    RECOMPUTE,
    SHARDED,
    TRANSFORM,
    Facts,
    Outcome,
    Rule,
    Try,
    name_of,
)
from lightning_eff.core.torch_private import torch_private
from lightning_eff.report.advice import Observed, Suggestion

Policy = Literal["full", "every_n", "selective", "budget", "offload", "fit"]
FRACTION = 0.9
"""Fraction of the device's memory that `fit` may fill by default."""
_OFF = Remedy("~callbacks.gradient_checkpointing", "remove GradientCheckpointing")


class GradientCheckpointing(Managed):
    """Recompute the repeated blocks of any model.

    Args:
        policy: `full`, `every_n`, `selective`, `budget`, `offload` or `fit`.
        every_n_blocks: With `every_n`, the first block and every n-th block after it are recomputed.
        memory_budget: With `budget`, the fraction of the activations that may be kept, from 0 to 1.
        blocks: Class names, classes, patterns of module names (`net.layers.*`), or a function that gets a
            name and a module and returns a bool; None selects the repeated blocks.
        memory: With `fit`, the maximum peak of a step on each device. Either a size with its unit (`20GiB`),
            or a fraction of the device's memory.

    Raises:
        ConfigError: A value is outside its range, `memory` is set without `fit`, `blocks` matches nothing, or
            a block is scripted (`torch.jit.script`). With `fit`, also raised before the first step if no
            choice fits in `memory`, or if no step can be predicted.
        ConflictError: The model or the strategy already recomputes activations, no compiler supports
            `budget`, or `selective` is used with compiled blocks.
        EnvironmentLacksError: torch is older than 2.13, and a block with `selective` modifies a kept output
            in place, as recurrent layers do.
        RecomputationError: A block depends on something that changed before its backward pass.

    Warns:
        NoEffectWarning: The model has no repeated blocks, or no block was recomputed in training.

    Example:
        >>> callback = GradientCheckpointing(policy="every_n", every_n_blocks=3)
        >>> trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
        >>> GradientCheckpointing(policy="some")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: policy='some': expected one of full, every_n, selective, ...
    """

    exact = True
    lowers = ("activations",)
    try_as = (
        Try(),
        Try(overrides=("callbacks.gradient_checkpointing.policy=selective",)),
        Try(overrides=("callbacks.gradient_checkpointing.policy=offload",), needs=("run/cuda",)),
    )

    @check_arguments
    def __init__(
        self,
        *,
        policy: Policy = "full",
        every_n_blocks: Count = 2,
        memory_budget: Fraction = 0.5,
        blocks: BlockSelector = None,
        memory: str | Fraction = FRACTION,
    ) -> None:
        num_bytes(memory, 0)  # raises an error if `memory` is not a size
        # Other policies ignore `memory`, so the setting would have no effect.
        if memory != FRACTION and policy != "fit":
            fit = Remedy(
                "callbacks.gradient_checkpointing.policy=fit",
                f'GradientCheckpointing(policy="fit", memory={memory!r})',
            )
            raise ConfigError(
                key="memory", value=memory, allowed="no memory limit without policy=fit", remedies=[fit]
            )
        self.policy = policy
        self.memory = memory
        self._fit: MemoryFit | None = None
        self.every_n_blocks = every_n_blocks
        self.memory_budget = memory_budget
        self.blocks = blocks
        self._num_blocks = 0
        self._recomputed: dict[str, RecomputedBlock] = {}
        self._is_budget_set = False

    def facts(self) -> Facts:
        """Reject models and strategies that already recompute, and compilers that do not suit the policy."""
        full, selective, budget = (
            Remedy(
                f"callbacks.gradient_checkpointing.policy={policy}",
                f'GradientCheckpointing(policy="{policy}")',
            )
            for policy in ("full", "selective", "budget")
        )
        if self.policy == "budget":
            reason = "policy=budget leaves the choice of recomputed operations to inductor"
            remedies = (Remedy("+callbacks=torch_compile", "TorchCompile()"), selective)
            return Facts(needs=(Rule(name=MEMORY_BUDGET, reason=reason, remedies=remedies),))
        twice = "the blocks would be recomputed twice"
        disable = "the model's own activation_checkpointing_disable() or gradient_checkpointing_disable()"
        excludes = [
            Rule(name="run/model_checkpointing", reason=twice, remedies=(disable, _OFF)),
            Rule(name="run/strategy_checkpointing", reason=twice, remedies=(_OFF,)),
        ]
        if self.policy == "fit":
            sharded = "predictions run the full model on one device"
            reasons = dict.fromkeys(SHARDED, sharded) | {
                "callbacks/torch_compile": "the compiler chooses which activations a compiled block keeps",
                "lightning/GradientAccumulationScheduler": "predictions ignore its number of batches",
                "lightning/BaseFinetuning": "predictions ignore the weights that it freezes",
                "run/dataloader_iter": "the module fetches its batches itself, so no step can be predicted",
            }
            excludes += [Rule(name=name, reason=why, remedies=(full,)) for name, why in reasons.items()]
        if self.policy == "selective":
            reason = "compiled blocks hide the matrix products to keep"
            remedies = (budget, full)
            excludes.append(Rule(name="callbacks/torch_compile", reason=reason, remedies=remedies))
            reason = "the products of all tiles would be kept"
            for tiled, class_name in (("tiled_mlp", "TiledMLP"), ("tiled_conv", "TiledConv")):
                remedies = (full, Remedy(f"~callbacks.{tiled}", f"remove {class_name}"))
                excludes.append(Rule(name=f"callbacks/{tiled}", reason=reason, remedies=remedies))
        return Facts(provides=(TRANSFORM, RECOMPUTE), excludes=tuple(excludes))

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest this technique for a model whose repeated blocks do not modify their inputs in place."""
        blocks = run.recorder.called_blocks if run.recorder is not None else ()
        if run.recorder is None or run.recorder.writes_inputs or not blocks:
            return None
        return Suggestion(
            technique=GradientCheckpointing(),
            why=f"activations inside {len(blocks)} blocks ({min(blocks)}, ...), which are computed again",
            peak_bytes=run.peak_if({}, recomputed=blocks),
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if self.policy == "fit":
            # MemoryFit copies the module, so create it before a technique changes the module.
            self._fit = MemoryFit(trainer, self, pl_module)
        self.cleanup.enter_context(oldest_graphs_first())
        if self.policy == "budget":
            self._is_budget_set = True
            config = torch_private("torch._functorch:config", "policy=budget")
            budget = config.patch(activation_memory_budget=self.memory_budget)
            self.cleanup.enter_context(budget)
        else:
            self.cleanup.callback(model_surgery.restore, pl_module)
            model_surgery.queue(trainer, pl_module, Stage.CHECKPOINT, self._apply)

    def _apply(self, model: nn.Module) -> int:
        policy = self.policy if self._fit is None else self._fit.policies
        try:
            self._num_blocks = len(model_surgery.select_blocks(model, self.blocks))
            new = recompute(model, policy=policy, every_n_blocks=self.every_n_blocks, blocks=self.blocks)
        except ConfigError as error:
            raise error.under(name_of(self).replace("/", ".")) from error
        for recomputed in new.values():
            self.cleanup.callback(recomputed.remove)
        # With `fit` this method runs twice, so add to the blocks of the first call.
        self._recomputed |= new
        if not self._num_blocks:
            text = "GradientCheckpointing found no repeated blocks: name them with blocks="
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return len(new)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Set the hook on the instance, for one batch. A hook of the class would cost time in every batch.
        # `OptimizerChoice` would also assume that a hook of the class reads gradients.
        if self._fit is not None:
            vars(self)["on_train_batch_start"] = self._choose

    def _choose(self, _trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        """Choose each block's policy before the first step."""
        vars(self)["on_train_batch_start"] = None
        if self._fit is not None and self._num_blocks:
            self._fit.choose(pl_module, batch)
            self._apply(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        outcome = self.outcome()
        if self._recomputed and not outcome.effective:
            text = f"GradientCheckpointing recomputed nothing: {outcome.did}"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    def assumptions(self) -> list[str]:
        """Describe the policies that `fit` chose; the planner prints this text with its prediction."""
        return [f"policy=fit: {self.outcome().did}"] if self._fit is not None else []

    def outcome(self) -> Outcome:
        """Report which blocks were recomputed, and how often."""
        if self.policy == "budget":
            did = f"the compiler keeps {self.memory_budget:.0%} of the activations of each graph"
            return Outcome(did=did, effective=self._is_budget_set)
        if self._fit is not None:
            return self._fit.outcome()
        names = list(self._recomputed)
        count = sum(recomputed.num_recomputed for recomputed in self._recomputed.values())
        times = "once" if count == 1 else f"{count} times"
        did = f"{len(names)} of {self._num_blocks} blocks recomputed ({self.policy}), {times}"
        if any(recomputed.is_cache_disabled for recomputed in self._recomputed.values()):
            did += "; their key-value cache stays empty"
        numbers = {"blocks": names, "num_blocks": self._num_blocks, "recomputations": count}
        return Outcome(did=did, effective=count > 0, numbers=numbers)
