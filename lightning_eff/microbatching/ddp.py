"""Gradients of several ranks averaged once, after all of them have computed theirs.

DDP averages while the backward pass runs. A rank that runs out of memory in there leaves the others waiting,
and its own reducer in pieces. So where a rank may have to compute its batch once more, every micro-batch
runs without synchronization and the gradients are averaged at the end, in buckets as DDP's are. The result
is DDP's: a parameter that no rank has used keeps no gradient, and buffers are the first rank's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = 25 * 2**20
"""As in DDP; a larger gradient is a bucket of its own, and is averaged where it is."""


def take_buffers(model: DistributedDataParallel) -> None:
    """Take over the first rank's buffers where DDP would, at the beginning of a step."""
    if not (model.broadcast_buffers and model.training):
        return
    for buffer in model.module.buffers():
        dist.broadcast(buffer, 0, group=model.process_group)


@contextmanager
def alone(model: DistributedDataParallel) -> Generator[None]:
    """Run forward and backward passes that no other rank takes part in."""
    with model.no_sync():
        model.require_forward_param_sync = False  # else the forward pass would broadcast the buffers
        yield


def average_gradients(model: DistributedDataParallel, *, also: float = 0.0) -> float:
    """Replace each gradient by its mean over the ranks; every rank must call it.

    Args:
        model: As DDP wraps it.
        also: A number that is summed over the ranks on the way, and returned.
    """
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    num_ranks = dist.get_world_size(model.process_group)
    present = [float(parameter.grad is not None) for parameter in parameters]
    counts = torch.tensor([also, *present], dtype=torch.float64).to(_device(model, parameters))
    dist.all_reduce(counts, group=model.process_group)
    total, *present = counts.tolist()
    used = [parameter for parameter, count in zip(parameters, present, strict=True) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in used if parameter.grad is not None]):
        flat = bucket[0] if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat = flat if flat.is_contiguous() else flat.contiguous()
        dist.all_reduce(flat.div_(num_ranks), group=model.process_group)
        pieces = flat.split([gradient.numel() for gradient in bucket]) if len(bucket) > 1 else [flat]
        for gradient, piece in zip(bucket, pieces, strict=True):
            if gradient is not piece:
                gradient.copy_(piece.view_as(gradient))
    return total


def extremes(value: float, model: DistributedDataParallel) -> tuple[float, float]:
    """Return the smallest and the largest of a number on all ranks."""
    numbers = torch.tensor([-value, value], dtype=torch.float64).to(_device(model, model.parameters()))
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=model.process_group)
    return -float(numbers[0]), float(numbers[1])


def _device(model: DistributedDataParallel, parameters: Iterable[Tensor]) -> torch.device:
    return next((parameter.device for parameter in parameters), torch.device(model.device_type))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one format and device together, up to the size of a bucket."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        num_bytes = sum(each.nbytes for each in bucket) + gradient.nbytes
        same = not bucket or (bucket[0].dtype, bucket[0].device) == (gradient.dtype, gradient.device)
        if bucket and not (same and num_bytes <= BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
