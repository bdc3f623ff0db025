"""What FSDP2's strategies do to a model and to checkpoints: shard blocks, write and read shards, count bytes.

A folder of shards (checkpoint/sharded.py) is saved and loaded by all ranks in steps that all complete or all
fail (`Ranks.all_or_none`). No tensor is gathered: each rank writes its rows from where they are, one tensor
after another. For loading, each rank verifies a share of the files, and reads only its rows of each tensor.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import Strategy
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

from lightning_eff.checkpoint import sharded, sharded_write
from lightning_eff.checkpoint.atomic_io import AtomicFiles
from lightning_eff.checkpoint.atomic_write import save_error
from lightning_eff.checkpoint.full_state import COUNTS
from lightning_eff.checkpoint.lazy_tensor import LazyShardedTensor, RowShard, split_shards
from lightning_eff.core.errors import TO_ZERO, CheckpointError
from lightning_eff.core.model_surgery import BlockSelector, select_blocks
from lightning_eff.core.shards import full_tensor, local_rows
from lightning_eff.report.model_weights import ModelWeights, Weight
from lightning_eff.report.sharding import DeviceShare, Sharding
from lightning_eff.strategy._shared import checks
from lightning_eff.strategy._shared.collectives import Ranks, broadcast_from_rank0

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


class DTensorState:
    """Full tensors of a model whose parameters are DTensors; implements `full_state.ShardedState`.

    Args:
        optimizer: Built on these parameters; None where nothing is trained.
        gathers: False for checkpoint folders: tensors stay sharded, since each rank saves its own rows.
    """

    def __init__(self, optimizer: Optimizer | None = None, *, gathers: bool = True) -> None:
        self._optimizer = optimizer
        self._gathers = gathers
        self.options = optimizer.param_groups if optimizer is not None else []
        self.groups = [group["params"] for group in self.options]

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor unsharded: an all-gather of all ranks."""
        return full_tensor(tensor) if self._gathers else tensor

    def load_tensor(self, tensor: Tensor, value: Tensor) -> None:
        """Set this rank's shard of a tensor from its full value."""
        tensor.data.copy_(_shard_like(value, tensor) if isinstance(tensor, DTensor) else value)

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, unsharded: an all-gather of all ranks per tensor."""
        state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        return {
            key: self.full_tensor(value) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    def load_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Replace this rank's shard of the optimizer's state of a parameter."""
        if self._optimizer is None:
            return
        self._optimizer.state.pop(parameter, None)
        if not state:
            return  # as before the first step: the optimizer initializes it
        own = self._optimizer.state[parameter]
        for key, value in state.items():
            is_like = isinstance(value, Tensor) and key not in COUNTS and value.shape == parameter.shape
            if is_like and isinstance(parameter, DTensor):
                own[key] = _shard_like(value, parameter)
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value


def _shard_like(value: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of a full value, laid out like `like`; every rank has it, so none sends."""
    local = local_rows(like)
    if isinstance(value, LazyShardedTensor) and local is not None:
        rows = value.rows(*local).to(like.device, copy=True)  # the other rows are not read
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(
            rows, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    moved = value.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def replace_parameters(optimizer: Optimizer, names: Mapping[Tensor, str], module: nn.Module) -> None:
    """Give an optimizer the sharded parameters in place of those that it was built with, and their state."""
    sharded = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[p]] if p in names else p for p in group["params"]]
    state = DTensorState(optimizer)
    for parameter, name in names.items():
        if parameter in optimizer.state and sharded[name] is not parameter:
            state.load_state(sharded[name], optimizer.state.pop(parameter))


@torch.no_grad()
def save_folder(checkpoint: dict[str, Any], path: Path, ranks: Ranks, io: CheckpointIO) -> None:
    """Save a checkpoint to a folder, or leave the previous one unchanged; a collective of all ranks.

    Args:
        checkpoint: Of this rank, with DTensors in it; rank 0's is taken for what is not sharded.
        path: The folder; rank 0's is taken.
        ranks: Of the process group.
        io: Of the run; it is notified of the folder.

    Raises:
        CheckpointError: A rank cannot write its files, or has weights that are not finite.
    """
    start = time.perf_counter()
    with ExitStack() as save:  # ends with rank 0's clean-up
        # 1. Rank 0 makes the folder, locks it against clean-up and names the save.
        with ranks.all_or_none() as step, _disk_errors(path, checkpoint):
            if isinstance(io, AtomicFiles):
                io.check_weights(checkpoint, path)
            if ranks.rank == 0:
                step.local = {"path": str(path), "token": save.enter_context(sharded_write.new_save(path))}
        path, token = Path(step.gathered[0]["path"]), step.gathered[0]["token"]
        # Tensors that are not sharded by rows are gathered here, by all ranks in the same order.
        rest, rows = split_shards(checkpoint, _local_shard)
        names = hashlib.sha256("\n".join(rows).encode()).hexdigest()
        # 2. Each rank writes its shard.
        with ranks.all_or_none() as step, _disk_errors(path, rows):
            shard = sharded_write.write_shard(path, token, ranks.rank, ranks.size, rows)
            step.local = {"digest": shard.digest, "bytes": shard.num_bytes, "names": names}
        shards = step.gathered
        # 3. Rank 0 replaces the index. Only now the folder is the new checkpoint.
        with ranks.all_or_none() as step, _disk_errors(path, rest):
            if len({shard["names"] for shard in shards}) > 1:
                raise CheckpointError(
                    f"checkpoint {path} was not saved: ranks have shards of different tensors"
                )
            if ranks.rank == 0:
                digests = [shard["digest"] for shard in shards]
                index = sharded_write.write_index(path, token, digests, rest, rows)
                step.local["bytes"] = index.num_bytes
    if isinstance(io, AtomicFiles):
        num_bytes = step.gathered[0]["bytes"] + sum(shard["bytes"] for shard in shards)
        io.folder_saved(path, num_bytes, time.perf_counter() - start)


def load_folder(path: Path, ranks: Ranks, io: CheckpointIO) -> dict[str, Any]:
    """Verify a folder and return its checkpoint, whose sharded tensors are read on first use.

    A collective of all ranks: each verifies a share of the files. They may be more or fewer than have saved.

    Raises:
        CheckpointError: A file is damaged or missing; all ranks raise it.
    """
    with ranks.all_or_none():
        index = sharded.verified_index(path, ranks.rank, ranks.size)
    checkpoint = sharded.lazy_checkpoint(index)
    if isinstance(io, AtomicFiles):
        io.folder_loaded(path)
    return checkpoint


def _local_shard(tensor: Tensor) -> RowShard | Tensor:
    """Return this rank's rows; a tensor that is not sharded by rows in full, which all ranks gather."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = local_rows(tensor)
    if local is None:
        return full_tensor(tensor).to("cpu")
    rows = tensor.to_local()
    is_view = rows.untyped_storage().nbytes() != rows.nbytes  # torch.save would write the whole storage
    return local[0], rows.clone() if is_view else rows


@contextmanager
def _disk_errors(path: Path, content: Any) -> Generator[None]:
    """Turn a disk's error into a CheckpointError with its remedy."""
    try:
        yield
    except OSError as error:
        raise save_error(path, error, lambda file: torch.save(content, file)) from error


@dataclass(frozen=True, kw_only=True)
class FSDP2Memory(Sharding):
    """FSDP2: every tensor is sharded by rows; a block is all-gathered while it is computed.

    Args:
        compute_itemsize: Bytes of an element that is gathered and computed with; None for the weight's own.
        reduce_itemsize: Bytes of a gradient's element as it is sent; None for `compute_itemsize`.
        on_host: Whether shards, gradients and state are in host memory.
        reshard: Whether a block is freed after its forward pass (`reshard_after_forward`).
        reduce_each: Whether gradients are reduced after every micro-batch.
    """

    stage: int = 3
    compute_itemsize: int | None = None
    reduce_itemsize: int | None = None
    on_host: bool = False
    reshard: bool = True
    reduce_each: bool = False

    def shards(self, model: ModelWeights, devices: int) -> list[tuple[Weight, float]]:
        """Cut tensors by rows: the first device has no fewer than any other."""
        return [(w, -(-w.rows // devices) * (w.numel // max(w.rows, 1))) for w in model.weights]

    def share(self, model: ModelWeights, devices: int, *, accumulates: bool = False) -> DeviceShare:
        """Implement `Sharding`."""
        share = self.kept(model, devices)
        # Full bytes of weights and of gradients by block, -1 for those outside of blocks.
        block_weights, block_gradients = Counter[int](), Counter[int]()
        for weight in model.weights:
            size = weight.numel * (self.compute_itemsize or weight.itemsize)
            block_weights[weight.block] += size
            block_gradients[weight.block] += size if weight.trained else 0
        outside, outside_gradients = block_weights.pop(-1, 0), block_gradients.pop(-1, 0)
        # Gathered at once: weights outside of blocks, a block and the prefetched next one.
        sizes = [size for _, size in sorted(block_weights.items())]
        largest_pair = max((size + next_size for size, next_size in pairwise(sizes)), default=sum(sizes))
        # Without a reduce-scatter per micro-batch, full gradients accumulate until the last one.
        waits = accumulates and not self.reduce_each
        itemsize = self.reduce_itemsize or self.compute_itemsize
        full = sum(w.numel * (itemsize or w.itemsize) for w in model.trained) if waits else 0
        share = replace(
            share,
            gathered=outside + (largest_pair if self.reshard else sum(sizes)),
            # Full gradients of one block, and outside of blocks, exist before their reduce-scatter.
            buffers=0 if waits else outside_gradients + max(block_gradients.values(), default=0),
        )
        if not self.on_host:
            # Full gradients are freed by the reduce-scatter that makes the shards: never both at once.
            return replace(share, gradients=max(full, share.gradients))
        host = share.weights - model.buffers_bytes + share.gradients + share.optimizer
        return replace(share, weights=model.buffers_bytes, gradients=full, optimizer=0, host=host)

    def assumptions(self) -> list[str]:
        """Implement `Sharding`."""
        again = "and again for its backward pass" if self.reshard else "and kept until its backward pass"
        return [
            f"a block is gathered for its forward pass {again}; several devices prefetch the next one; "
            "weights outside of blocks stay gathered",
            "tensors are sharded by rows: one with fewer rows than devices is sharded less",
        ]
