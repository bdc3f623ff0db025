"""Average the gradients of several ranks once, after all of them have computed theirs.

DDP averages during the backward pass. A rank that runs out of memory there leaves the others waiting, and its
own reducer in an undefined state. So with `micro_batch_size=auto`, every micro-batch runs without
synchronization and the gradients are averaged at the end of the step, in buckets like DDP's. The result is
DDP's: a parameter that no rank has used keeps no gradient, and buffers are the first rank's.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_eff.core.torch_private import torch_private

AUTO = "micro_batch_size=auto on several ranks"
BUCKET_BYTES = 25 * 2**20
"""As in DDP; a larger gradient is a bucket of its own, and is averaged in place."""


def take_buffers(model: DistributedDataParallel) -> None:
    """Broadcast the first rank's buffers at the start of a step, when DDP would; every rank must call it."""
    if not (model.broadcast_buffers and model.training):
        return
    for buffer in model.module.buffers():
        dist.broadcast(buffer, 0, group=model.process_group)


@contextmanager
def without_collectives(model: DistributedDataParallel) -> Generator[None]:
    """Run forward and backward passes that no other rank takes part in."""
    with model.no_sync():
        # Private to DDP, as of torch 2.13: else the forward pass would broadcast the buffers.
        before, model.require_forward_param_sync = model.require_forward_param_sync, False
        yield
        model.require_forward_param_sync = before


def average_gradients(model: DistributedDataParallel, *, also: float = 0.0) -> float:
    """Replace gradients by their mean over the ranks; every rank must call it.

    Args:
        model: As DDP wraps it.
        also: A number that is summed over the ranks in the same collective.

    Returns:
        The sum of `also`.
    """
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    num_ranks = dist.get_world_size(model.process_group)
    has_gradient = [float(parameter.grad is not None) for parameter in parameters]
    counts = torch.tensor([also, *has_gradient], dtype=torch.float64).to(next(model.parameters()).device)
    dist.all_reduce(counts, group=model.process_group)
    total, *counts_by_parameter = counts.tolist()
    used = [parameter for parameter, count in zip(parameters, counts_by_parameter, strict=True) if count]
    for parameter in used:
        if parameter.grad is None:  # another rank has one, and all take part in its all-reduce
            parameter.grad = torch.zeros_like(parameter)
    take = torch_private("torch._utils:_take_tensors", AUTO)
    flatten = torch_private("torch._utils:_flatten_dense_tensors", AUTO)
    unflatten = torch_private("torch._utils:_unflatten_dense_tensors", AUTO)
    for bucket in take([parameter.grad for parameter in used], BUCKET_BYTES):
        flat = flatten(bucket)
        # gradient = sum over ranks of gradient / num_ranks, divided first as DDP does
        dist.all_reduce(flat.div_(num_ranks), group=model.process_group)
        for gradient, values in zip(bucket, unflatten(flat, bucket), strict=True):
            gradient.copy_(values)
    return total


def extremes(value: float, model: DistributedDataParallel) -> tuple[float, float]:
    """Return the smallest and the largest of a number on all ranks; every rank must call it."""
    numbers = torch.tensor([-value, value], dtype=torch.float64).to(next(model.parameters()).device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=model.process_group)
    return -float(numbers[0]), float(numbers[1])
