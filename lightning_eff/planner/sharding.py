"""What each of many devices would keep and send in a composed run, before anything of it is started.

The Trainer's strategy has its arithmetic (report/sharded_memory.py), the model is built without memory and
given the run's adapters, and the configured optimizer steps once on a sample, to see what state it keeps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core.errors import root_cause_line
from lightning_eff.core.model_surgery import LowersFrozen, select
from lightning_eff.core.optimization.build import build
from lightning_eff.core.rules import ddp_options
from lightning_eff.core.technique import name_of
from lightning_eff.report.sharding_table import HasShardingScheme, ShardingTable, ShardingScheme, shares_by_devices, micro_batches_per_step
from lightning_eff.report.sharded_memory import DDPMemory
from lightning_eff.report.model_weights import ModelWeights, OptimizerState, sample_model
from lightning_eff.run import model_without_memory

CAST = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Formats that Lightning casts a model's weights to."""


def sharding_table_of(values: Mapping[str, Any], trainer: pl.Trainer) -> ShardingTable:
    """Return the shares of 1 to 1,024 devices; empty for one device that divides nothing.

    A model that cannot be built without memory, or an optimizer that cannot be tried, is told in `about`.

    Args:
        values: From `config.compose_recipe`.
        trainer: Built from them.
    """
    scheme = scheme_of(trainer)
    if scheme is None:
        return ShardingTable()
    cast = CAST.get(str(trainer.precision))
    what = "the model cannot be built without memory"
    try:
        built = model_without_memory(values, adapted_by=trainer)
        model = ModelWeights.of(built, select(built, getattr(trainer.strategy, "blocks", None)).values(), cast)
        what = "the optimizer cannot be tried"
        state = _state(trainer, torch.float32 if scheme.own_weights else cast or _dtype(built))
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything, and stops nothing here
        reason = root_cause_line(error).removeprefix("error: ").splitlines()[0]
        return ShardingTable(f"memory divided: {what}: {reason}")
    count, words = micro_batches_per_step(values, trainer.world_size)
    about = f"memory divided by {name_of(trainer.strategy)}, by arithmetic: {model}, {trainer.precision}"
    assumed = scheme.assumptions()
    if isinstance(trainer.precision_plugin, LowersFrozen):
        assumed.append("frozen weights are counted as they were, not in the bits that they will be kept in")
    shares = shares_by_devices(scheme, model, state, count, also=trainer.world_size)
    return ShardingTable(f"{about}; {words}; {state}", shares, tuple(assumed))


def scheme_of(trainer: pl.Trainer) -> ShardingScheme | None:
    """Return how a Trainer's strategy divides a model, or copies it; None for one device and for others'."""
    strategy = trainer.strategy
    if isinstance(strategy, HasShardingScheme):
        return strategy.scheme()
    copies = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if not copies or trainer.world_size == 1:
        return None
    return DDPMemory(bucket_view=bool(ddp_options(strategy).get("gradient_as_bucket_view")))


def _state(trainer: pl.Trainer, dtype: torch.dtype) -> OptimizerState:
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    choice = next(each for each in callbacks if isinstance(each, OptimizerChoice))
    sample = sample_model(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return OptimizerState.of(build(sample, choice.optimizer), sample)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
