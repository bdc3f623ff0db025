"""Shard a model's blocks, then the rest, with PyTorch's `fully_shard`; explain its error in steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lightning_eff.core.model_surgery import BlockSelector, select_blocks
from lightning_eff.core.remedies import TO_ZERO
from lightning_eff.strategy._shared import checks
from lightning_eff.strategy._shared.collectives import broadcast_from_rank0

DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Dtype = Literal["bf16", "fp16", "fp32"]
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MIXED = "got mixed torch.Tensor and DTensor"
"""Part of torch 2.13's error about an operation on a sharded and a plain tensor."""


def shard(
    model: nn.Module,
    mesh: Any,
    *,
    blocks: BlockSelector = None,
    policy: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    reshard_after_forward: bool = True,
) -> int:
    """Shard a model's blocks and then the rest, in place; also for loops without a Trainer.

    Args:
        model: Before its optimizer is built.
        mesh: One dimension of a DeviceMesh: the ranks.
        blocks: As in `model_surgery.select`; None finds them.
        policy: Dtypes of computation and reduction.
        offload: Keep shards on the host.
        reshard_after_forward: Free a block's full weights after its forward, until its backward.

    Returns:
        Number of sharded modules; 0 for a model that is sharded already.

    Raises:
        ConflictError: A parameter cannot be sharded, or has a hook that would be lost.
    """
    if isinstance(model, FSDPModule):
        return 0
    offloading = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    policies: Any = {"mp_policy": policy or MixedPrecisionPolicy(), "offload_policy": offloading}
    selected = [block for block in select_blocks(model, blocks).values() if [*block.parameters()]]
    checks.check_parameters(checks.FSDP2, model)
    checks.check_hooks(model)
    checks.check_groups(model, selected)
    attributes = parameter_attributes(model)
    # Inner modules first: the root takes the parameters that no block has.
    for block in selected:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, **policies)
    # By default (torch 2.13) the root stays gathered after its forward, since its backward comes next.
    fully_shard(model, mesh=mesh, **policies)
    restore_attributes(model, attributes)
    return len(selected) + 1


def shard_for(strategy: Any, model: nn.Module) -> int:
    """Shard rank 0's values of a model as an FSDP2 strategy's arguments say; a collective of all ranks.

    Returns:
        Number of sharded modules; 0 for a model that is sharded already.
    """
    if isinstance(model, FSDPModule):
        return 0
    if getattr(model, "peft_config", None) and any(p.is_meta for p in model.parameters()):
        problem = "the model is on the meta device, and materializing it would re-initialize the adapters"
        raise checks.conflict(checks.FSDP2, problem, "build the model with values")
    # Before sharding, while every rank still has full tensors.
    broadcast_from_rank0([*model.parameters(), *model.buffers()], strategy.root_device)
    num_sharded = shard(
        model,
        strategy.device_mesh["data_parallel"],
        blocks=strategy.blocks,
        policy=MixedPrecisionPolicy(
            param_dtype=DTYPES[strategy.param_dtype], reduce_dtype=DTYPES[strategy.reduce_dtype]
        ),
        offload=strategy.cpu_offload,
        reshard_after_forward=strategy.reshard_after_forward,
    )
    for step in STEPS:  # which gather the weights outside of blocks, as `forward` does
        if hasattr(model, step):  # not of a plain module, under Fabric
            register_fsdp_forward_method(model, step)
    return num_sharded


def parameter_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that users set on parameters, for example to build an optimizer's groups."""
    return {name: dict(vars(p)) for name, p in model.named_parameters() if type(p) is nn.Parameter}


def restore_attributes(model: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set these attributes again: sharding a model, and moving it afterwards, makes new parameters."""
    for name, parameter in model.named_parameters():
        for key, value in attributes.get(name, {}).items():
            vars(parameter).setdefault(key, value)


def explained_step(name: str) -> Any:
    """Return a strategy's step that explains torch's error about a sharded weight.

    Raises:
        ConflictError: A step used a sharded weight.
    """

    def step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return getattr(Strategy, name)(self, *arguments, **keywords)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise checks.conflict(
                checks.FSDP2,
                "a step used a weight while it was sharded. Weights outside of blocks are gathered from the "
                "beginning of a step to its first backward; weights of a block only in its forward",
                "one backward per step, of the sum of the losses",
                "call the layer instead of reading its weight",
                TO_ZERO,
            ) from error

    return step
