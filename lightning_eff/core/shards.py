"""Tensors of which a rank has a part: FSDP2's, and those of ZeRO's stage 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: object) -> bool:
    """Say whether other ranks have the rest of a tensor.

    Example:
        >>> is_part(torch.ones(1))
        False
    """
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def full_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the whole tensor that a rank may have a part of."""
    return getattr(tensor, "ds_shape", tensor.shape)


def local_rows(tensor: DTensor) -> tuple[int, int] | None:
    """Return which rows of a tensor this rank has, first and end; None where it is divided otherwise."""
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or tensor.placements != (Shard(0),):
        return None
    num_rows = tensor.shape[0]
    share = -(-num_rows // mesh.size())  # as torch.chunk: the last ranks have fewer, or none
    first = min(mesh.get_local_rank() * share, num_rows)
    return first, min(first + share, num_rows)


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor put together, itself where nothing is missing; a collective of all ranks."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not hasattr(tensor, "ds_id"):
        return tensor
    with unsharded(tensor):
        return tensor.detach().clone()


def unsharded(parameter: Tensor, modifier_rank: int | None = None) -> Any:
    """Return a context in which a parameter of stage 3 is whole, and one rank may change it for all."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters([parameter], modifier_rank=modifier_rank)
