"""FSDP2's DTensors in checkpoints: as full tensors, or as shards in a folder.

A folder (checkpoint/sharded.py) is saved and loaded by all ranks in steps that all complete or all fail
(`Ranks.all_or_none`). No tensor is gathered: each rank writes its rows from where they are, one tensor after
another. For loading, each rank verifies a share of the files, and reads only its rows of each tensor.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_eff.checkpoint import sharded, sharded_write
from lightning_eff.checkpoint.atomic_io import AtomicFiles
from lightning_eff.checkpoint.atomic_write import save_error
from lightning_eff.checkpoint.full_state import COUNTS
from lightning_eff.checkpoint.lazy_tensor import LazyShardedTensor, RowShard, split_shards
from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.shards import full_tensor, local_rows
from lightning_eff.strategy._shared.collectives import Ranks


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
                text = f"checkpoint {path} was not saved: ranks have shards of different tensors"
                raise CheckpointError(text)
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
