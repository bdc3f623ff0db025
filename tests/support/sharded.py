"""Write a sharded checkpoint as several ranks would, one after the other in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_eff.checkpoint import sharded_write
from lightning_eff.checkpoint.lazy_tensor import split_shards


def rows_of(rank: int, num_ranks: int) -> Callable[[Tensor], Any]:
    def rows(tensor: Tensor) -> Any:
        share = -(-len(tensor) // num_ranks) if tensor.ndim else 0
        first = min(rank * share, len(tensor)) if tensor.ndim else 0
        return (first, tensor[first : first + share].clone()) if tensor.ndim else tensor

    return rows


def save_sharded(path: Path, content: dict[str, Any], num_ranks: int) -> str:
    """Save as ranks would, one after the other; return the token."""
    digests: list[str] = []
    with sharded_write.new_save(path) as token:
        for rank in range(num_ranks):
            rest, rows = split_shards(content, rows_of(rank, num_ranks))
            digests.append(sharded_write.write_shard(path, token, rank, num_ranks, rows).digest)
        sharded_write.write_index(path, token, digests, rest, rows)
    return token
