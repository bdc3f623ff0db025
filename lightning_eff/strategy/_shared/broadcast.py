"""All ranks begin with the first rank's values, as they do under DDP.

A seed may differ from rank to rank, or a weight be drawn from the clock: then each rank would keep its own
part of another model. `fully_shard` divides what each rank has; DeepSpeed sends parameters, and no buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.core.shards import is_sharded


@torch.no_grad()
def spread(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give every rank the first rank's values, in place; a collective of all ranks.

    Args:
        tensors: Whole ones, the same on every rank but for their values; those without values stay so.
        device: Where the ranks can talk about them.
    """
    for tensor in tensors:
        for plain in _plain(tensor):
            if plain.is_meta or is_sharded(plain) or not plain.numel():
                continue
            sent = plain.detach().to(device, copy=True).contiguous()
            dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)  # whatever its format is
            if dist.get_rank():
                plain.data.copy_(sent)


def _plain(tensor: Any) -> list[Tensor]:
    """Return the tensors that one is made of: of a quantized one its numbers and their scales."""
    if is_sharded(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(tensor, name))]
