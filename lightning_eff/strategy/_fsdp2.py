"""Code shared by the Trainer's and Fabric's FSDP2: shard a model, save and load shards, count bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_eff.checkpoint.atomic_io import AtomicFiles
from lightning_eff.checkpoint.full_state import COUNTS
from lightning_eff.checkpoint.sharded import LazyShardedTensor, Ranks
from lightning_eff.core.model_surgery import select_blocks
from lightning_eff.core.shards import full_tensor, local_rows
from lightning_eff.report.model_weights import ModelWeights, Weight
from lightning_eff.report.sharding import DeviceShare, Sharding
from lightning_eff.strategy._shared import checks, fabric_checkpoint
from lightning_eff.strategy._shared.collectives import broadcast_from_rank0

DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Dtype = Literal["bf16", "fp16", "fp32"]
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard(strategy: Any, model: nn.Module) -> int:
    """Broadcast rank 0's values, and shard the model in place: first the blocks, then the other weights.

    All ranks must call this function.

    Args:
        strategy: An FSDP2 or FSDP2Fabric with a `device_mesh`.
        model: The model, before its optimizer is built.

    Returns:
        Number of sharded modules; 0 if the model was already sharded.

    Raises:
        ConflictError: A parameter cannot be sharded, or has a hook that would be lost.
    """
    if isinstance(model, FSDPModule):
        return 0
    if getattr(model, "peft_config", None) and any(p.is_meta for p in model.parameters()):
        problem = "the model is on the meta device, and materializing it would re-initialize the adapters"
        raise checks.conflict(checks.FSDP2, problem, "build the model with values")
    selected = [block for block in select_blocks(model, strategy.blocks).values() if [*block.parameters()]]
    checks.check_parameters(checks.FSDP2, model)
    checks.check_hooks(model)
    checks.check_groups(model, selected)
    # Broadcast before sharding, while every rank still has full tensors.
    broadcast_from_rank0([*model.parameters(), *model.buffers()], strategy.root_device)
    offloading = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    param_dtype, reduce_dtype = DTYPES[strategy.param_dtype], DTYPES[strategy.reduce_dtype]
    policies: Any = {
        "mesh": strategy.device_mesh["data_parallel"],
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype),
        "offload_policy": offloading if strategy.cpu_offload else OffloadPolicy(),
    }
    # `fully_shard` creates new parameters, without the attributes that users have set on the old parameters.
    attributes = parameter_attributes(model)
    # Shard the blocks first, so that the root module shards only the parameters outside of all blocks.
    for block in selected:
        fully_shard(block, reshard_after_forward=strategy.reshard_after_forward, **policies)
    # By default (torch 2.13) the root stays gathered after its forward pass, since its backward comes next.
    fully_shard(model, **policies)
    restore_attributes(model, attributes)
    for step in STEPS:  # these methods must gather the weights outside of blocks, as `forward` does
        if hasattr(model, step):  # a plain module under Fabric has none of these methods
            register_fsdp_forward_method(model, step)
    return len(selected) + 1


def parameter_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that users have set on parameters, such as `weight.no_weight_decay`."""
    return {name: dict(vars(p)) for name, p in model.named_parameters() if type(p) is nn.Parameter}


def restore_attributes(model: nn.Module, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set saved attributes on the parameters that sharding or moving the model has created."""
    for name, parameter in model.named_parameters():
        for key, value in attributes.get(name, {}).items():
            vars(parameter).setdefault(key, value)


class DTensorState:
    """Reads and sets full tensors of a model with DTensor parameters; implements `full_state.ShardedState`.

    Args:
        optimizer: Optimizer of these parameters; None if nothing is trained.
        gathers: Whether to gather tensors; False for checkpoint folders, where each rank saves its own rows.
    """

    def __init__(self, optimizer: Optimizer | None = None, *, gathers: bool = True) -> None:
        self._optimizer = optimizer
        self._gathers = gathers
        self.options = optimizer.param_groups if optimizer is not None else []
        self.groups = [group["params"] for group in self.options]

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the full tensor after an all-gather; all ranks must call this method."""
        return full_tensor(tensor) if self._gathers else tensor

    def load_tensor(self, tensor: Tensor, value: Tensor) -> None:
        """Set a tensor, or this rank's shard of a DTensor, from the full value."""
        if isinstance(tensor, DTensor):
            _load_shard(tensor, value)
        else:
            tensor.data.copy_(value)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's optimizer state as full tensors; all ranks must call this method."""
        state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        return {
            key: self.full_tensor(value) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    def load_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Load a parameter's optimizer state from full tensors; each rank sets its own shard."""
        if self._optimizer is None:
            return
        self._optimizer.state.pop(parameter, None)
        if not state:
            return  # before the first step there is no state; the optimizer creates it later
        own = self._optimizer.state[parameter]
        for key, value in state.items():
            # Tensors with the parameter's shape are sharded like the parameter. A step count is not sharded.
            is_like = isinstance(value, Tensor) and key not in COUNTS and value.shape == parameter.shape
            if is_like and isinstance(parameter, DTensor):
                own[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                _load_shard(own[key], value)
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _load_shard(tensor: DTensor, value: Tensor) -> None:
    """Set this rank's shard without communication, because every rank has the full value."""
    own = local_rows(tensor)
    if own is None:  # the tensor is not sharded by rows
        value = value.to(tensor.device)
        tensor.copy_(distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None))
    else:  # a lazy value reads only this rank's rows from the file
        rows = value.rows(*own) if isinstance(value, LazyShardedTensor) else value[slice(*own)]
        tensor.to_local().copy_(rows)


def replace_parameters(optimizer: Optimizer, names: Mapping[Tensor, str], module: nn.Module) -> None:
    """Replace an optimizer's original parameters by the sharded parameters, and shard their state."""
    # Parameters are matched by name, since sharding replaced the objects that the optimizer holds.
    sharded = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[p]] if p in names else p for p in group["params"]]
    state = DTensorState(optimizer)
    for parameter, name in names.items():
        if parameter in optimizer.state and sharded[name] is not parameter:
            state.load_state(sharded[name], optimizer.state.pop(parameter))


def sharded_state(self: Any, optimizer: Any = None) -> DTensorState:
    """Return an object that reads and sets full tensors of a model and of its optimizer."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # the optimizer inside a LightningOptimizer
    return DTensorState(optimizer, gathers=self.checkpoints == "full")


def save_checkpoint(
    self: Any, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
) -> None:
    """Write one file, or a folder with a file per rank; if a rank fails, all ranks raise its error."""
    if self.checkpoints == "full":
        fabric_checkpoint.write_checkpoint(self, checkpoint, str(filepath), storage_options)
    else:
        folder_io(self).save_shards(checkpoint, filepath, Ranks(self.root_device), storage_options)


def load_checkpoint(
    self: Any,
    checkpoint_path: str | Path,
    weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
) -> dict[str, Any]:
    """Return a checkpoint from a file or a folder; from a folder each rank reads only its own rows."""
    # The argument `checkpoints` is not used, because a run may resume from the other kind of checkpoint.
    if Path(checkpoint_path).expanduser().is_dir():
        ranks = Ranks(self.root_device)
        return folder_io(self).load_shards(checkpoint_path, ranks, weights_only=weights_only)
    return fabric_checkpoint.read_checkpoint(self, str(checkpoint_path), weights_only=weights_only)


def folder_io(strategy: Any) -> AtomicFiles:
    """Return the run's CheckpointIO if it can write folders; otherwise return the strategy's AtomicFiles."""
    io = strategy.checkpoint_io
    return io if isinstance(io, AtomicFiles) else vars(strategy).setdefault("_folder_io", AtomicFiles())


@dataclass(frozen=True, kw_only=True)
class FSDP2Memory(Sharding):
    """Memory of FSDP2, which shards every tensor by rows and gathers a block while the block computes.

    Args:
        compute_itemsize: Bytes per element of a gathered weight; None for the itemsize of the weight's dtype.
        reduce_itemsize: Bytes per element of a reduced gradient; None for `compute_itemsize`.
        on_host: Whether shards, gradients and optimizer state are in host memory.
        reshard: Whether a block's full weights are freed after its forward pass (`reshard_after_forward`).
        reduce_each: Whether gradients are reduced after every micro-batch.
    """

    stage: int = 3
    compute_itemsize: int | None = None
    reduce_itemsize: int | None = None
    on_host: bool = False
    reshard: bool = True
    reduce_each: bool = False

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Return each weight with its number of elements on the first device, which has the most rows."""
        # ceil(rows / devices) rows, each with numel / rows elements.
        return [(w, -(-w.rows // devices) * (w.numel // max(w.rows, 1))) for w in model.weights]

    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Implement `Sharding.share`."""
        share = self.kept(model, devices)
        # Bytes of full weights and full gradients, by block; block -1 holds the weights outside of blocks.
        block_weights, block_gradients = Counter[int](), Counter[int]()
        for weight in model.weights:
            size = weight.numel * (self.compute_itemsize or weight.itemsize)
            block_weights[weight.block] += size
            block_gradients[weight.block] += size if weight.trained else 0
        outside, outside_gradients = block_weights.pop(-1, 0), block_gradients.pop(-1, 0)
        # Gathered at the same time: weights outside of blocks, one block, and the next block (prefetched).
        sizes = [size for _, size in sorted(block_weights.items())]
        largest_pair = max((size + next_size for size, next_size in pairwise(sizes)), default=sum(sizes))
        # Without a reduce-scatter per micro-batch, full gradients accumulate until the last micro-batch.
        waits = accumulates and not self.reduce_each
        itemsize = self.reduce_itemsize or self.compute_itemsize
        full = sum(w.numel * (itemsize or w.itemsize) for w in model.trained) if waits else 0
        share = replace(
            share,
            gathered=outside + (largest_pair if self.reshard else sum(sizes)),
            # The full gradients of one block and of the weights outside of blocks exist until they are
            # reduce-scattered.
            buffers=0 if waits else outside_gradients + max(block_gradients.values(), default=0),
        )
        if not self.on_host:
            # A reduce-scatter frees full gradients and creates their shards, so the larger size is added.
            return replace(share, gradients=max(full, share.gradients))
        # Buffers are neither sharded nor offloaded, so they stay on the device.
        host = share.weights - model.buffers_bytes + share.gradients + share.optimizer
        return replace(share, weights=model.buffers_bytes, gradients=full, optimizer=0, host=host)

    def assumptions(self) -> list[str]:
        """Implement `Sharding.assumptions`."""
        backward = "and again for its backward pass" if self.reshard else "and kept until its backward pass"
        return [
            f"a block is gathered for its forward pass {backward}; several devices prefetch the next one; "
            "weights outside of blocks stay gathered",
            "tensors are sharded by rows: one with fewer rows than devices is sharded less",
        ]
