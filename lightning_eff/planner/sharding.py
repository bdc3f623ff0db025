"""Compute what each of many devices keeps and sends in a composed run, before any process is started.

The Trainer's strategy has its arithmetic (report/sharded_memory.py). The model is built on the meta device
with the run's adapters, and the configured optimizer steps once on a sample to measure its state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core.model_surgery import CastsFrozen, select_blocks
from lightning_eff.core.optimization.build import build
from lightning_eff.core.rules import ddp_options
from lightning_eff.core.technique import name_of
from lightning_eff.planner.prediction import reason_of
from lightning_eff.report.model_weights import ModelWeights, OptimizerState, sample_model
from lightning_eff.report.sharded_memory import DDPMemory
from lightning_eff.report.sharding_table import (
    ShardingScheme,
    ShardingTable,
    micro_batches_per_step,
    shares_by_devices,
)
from lightning_eff.run import model_without_memory

CAST = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Precisions for which Lightning casts the model's weights."""


def sharding_table_of(values: Mapping[str, Any], trainer: pl.Trainer) -> ShardingTable:
    """Return bytes per device for 1 to 1,024 devices; an empty table for a single device without sharding.

    If the model cannot be built on the meta device, or the optimizer cannot step, `about` has the reason.

    Args:
        values: From `config.compose_recipe`.
        trainer: Built from them.
    """
    strategy = trainer.strategy
    scheme: ShardingScheme | None = None
    # FSDP2 and DeepSpeedZero of this package have one.
    own_scheme: Callable[[], ShardingScheme] | None = getattr(strategy, "scheme", None)
    if own_scheme is not None:
        scheme = own_scheme()
    elif isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy):
        bucket_view = bool(ddp_options(strategy).get("gradient_as_bucket_view"))
        scheme = DDPMemory(bucket_view=bucket_view) if trainer.world_size > 1 else None
    if scheme is None:
        return ShardingTable()
    cast = CAST.get(str(trainer.precision))
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    failure = "the model cannot be built on the meta device"
    try:
        module = model_without_memory(values, adapted_by=trainer)
        blocks = select_blocks(module, getattr(strategy, "blocks", None)).values()
        model = ModelWeights.of(module, blocks, cast)
        failure = "the optimizer cannot step on a sample"
        own = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
        sample = sample_model(torch.float32 if scheme.own_weights else cast or own)
        choice = next(callback for callback in callbacks if isinstance(callback, OptimizerChoice))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = OptimizerState.of(build(sample, choice.optimizer), sample)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return ShardingTable(f"memory per device: {failure}: {reason_of(error)}")
    count, micro_batches = micro_batches_per_step(values, trainer.world_size)
    about = f"memory per device with {name_of(strategy)}, by arithmetic: {model}, {trainer.precision}"
    assumed = scheme.assumptions()
    if isinstance(trainer.precision_plugin, CastsFrozen):
        assumed.append("frozen weights are counted in their original dtype, not quantized")
    shares = shares_by_devices(scheme, model, state, count, also=trainer.world_size)
    return ShardingTable(f"{about}; {micro_batches}; {state}", shares, tuple(assumed))
