"""Reject models and optimizers that cannot be sharded, before the sharding starts; errors name the tensor.

Both sharding strategies call these checks. Without the checks, PyTorch or DeepSpeed would fail with unclear
errors, or silently train something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_eff.core.errors import TO_DDP, TO_FSDP2, TO_ZERO, ConflictError, Remedy
from lightning_eff.core.shards import full_shape
from lightning_eff.core.technique import Rule
from lightning_eff.core.torch_private import has_gradient_hook

FSDP2 = "strategy/fsdp2"
ZERO = "strategy/deepspeed_zero"
WRAPPED = "_orig_mod"
"""Attribute with the original module in torch.compile's wrapper (OptimizedModule in torch 2.13)."""
_NOT_FLOAT32 = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
"""Dtypes that would lose digits or an imaginary part in DeepSpeed's float32 partitions."""


SYNC_BATCH_NORM = Rule(
    name="run/sync_batch_norm",
    reason="only Lightning's own DDP and FSDP convert batch norms, so the setting would be ignored",
    remedies=(TO_DDP, Remedy("trainer.sync_batchnorm=false", "sync_batchnorm=False")),
)


def conflict(strategy: str, problem: str, *remedies: str | Remedy) -> ConflictError:
    """Return a strategy's error, with one line per remedy."""
    return ConflictError("\n".join([f"{strategy}: {problem}", *(f"  try: {remedy}" for remedy in remedies)]))


def check_parameters(strategy: str, model: nn.Module) -> None:
    """Reject empty and scalar parameters and, under ZeRO, dtypes whose values do not fit into float32."""
    for name, parameter in model.named_parameters():
        shape = tuple(full_shape(parameter))
        if 0 in shape:
            size = " x ".join(map(str, shape))
            problem = f"{name} is {size}; a parameter without elements cannot be sharded"
            raise conflict(strategy, problem, "remove it, or make it a buffer", TO_DDP)
        if not shape:
            problem = f"{name} is a scalar and has no dimension to shard"
            remedy = "make it a vector of one element: torch.tensor([1.0])"
            raise conflict(strategy, problem, remedy, TO_DDP)
        if strategy == ZERO and parameter.dtype in _NOT_FLOAT32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            problem = f"{name} is {dtype}, but DeepSpeed trains in float32"
            remedies = [] if parameter.is_complex() else ["make the model float32: model.float()"]
            raise conflict(ZERO, problem, TO_FSDP2, TO_DDP, *remedies)


def check_hooks(model: nn.Module) -> None:
    """Reject hooks on parameters, because FSDP2 replaces the parameters and would never call the hooks."""
    for name, parameter in model.named_parameters():
        if has_gradient_hook(parameter):
            raise conflict(
                FSDP2,
                f"{name} has a hook on its gradient, which would never run: FSDP2 replaces parameters",
                TO_ZERO,
                TO_DDP,
                "a hook of the module: on_before_optimizer_step",
            )


def check_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Reject weights tied across blocks, because `fully_shard` gathers each block separately."""
    # Index of each module's block; `len(blocks)` stands for modules outside of blocks.
    group_of = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    first_use: dict[int, tuple[int, str]] = {}
    for prefix, module in model.named_modules():
        group = group_of.get(id(module), len(blocks))
        for name, parameter in module.named_parameters(prefix, recurse=False):
            # A tied weight is one object under several names.
            first_group, first_name = first_use.setdefault(id(parameter), (group, name))
            if first_group != group:
                problem = f"{first_name} and {name} are one weight, but each block is gathered separately"
                raise conflict(FSDP2, problem, TO_ZERO, TO_DDP)


def check_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    remedy: str = "take parameters in configure_optimizers: self.parameters(), self.layer.weight",
) -> None:
    """Reject an optimizer that holds unsharded parameters, because the shards would not be trained."""
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise conflict(
                    FSDP2,
                    f"{type(optimizer).__name__} holds a tensor {tuple(parameter.shape)} (group {index}, "
                    f"position {position}) that is not a parameter of the sharded model: it was taken before "
                    "sharding and would not be trained",
                    remedy,
                    TO_DDP,
                )
