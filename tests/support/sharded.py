"""Write a sharded checkpoint as several ranks would, one after the other in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_eff.checkpoint import sharded


def rows_of(rank: int, num_ranks: int) -> Callable[[Tensor], Tensor | None]:
    def rows(tensor: Tensor) -> Tensor | None:
        share = -(-len(tensor) // num_ranks) if tensor.ndim else 0
        return tensor[rank * share : (rank + 1) * share].clone() if tensor.ndim else None

    return rows


def save_sharded(path: Path, content: dict[str, Any], num_ranks: int) -> str:
    """Save as ranks would, one after the other; return the token."""
    digests: list[str] = []
    with sharded.new_save(path) as token:
        for rank in range(num_ranks):
            rest, rows = sharded.split_shards(content, rows_of(rank, num_ranks))
            digests.append(sharded.write_shard(path, token, rank, num_ranks, rows).digest)
        sharded.write_index(path, token, digests, rest)
    return token
