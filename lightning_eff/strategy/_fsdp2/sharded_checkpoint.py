"""Save a model that ranks have divided into a folder, each its own rows, and load it on any number of them.

All ranks call these functions together and go through their steps together (agreed.py). None gathers a
tensor: a rank writes what it has from where it is, one tensor after the other. On the way back each verifies
its share of the files, and is given tensors of which it reads its rows alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_eff.checkpoint import saving, sharded
from lightning_eff.checkpoint.collective import Ranks
from lightning_eff.checkpoint.lazy_tensor import Piece, divide
from lightning_eff.checkpoint.refusals import not_saved
from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.shards import local_rows, full_tensor


@dataclass(frozen=True)
class Saved:
    """What was saved: the folder that all ranks wrote to, the bytes of all of them, and how long it took."""

    path: Path
    num_bytes: int
    duration_s: float


@torch.no_grad()
def save(checkpoint: Mapping[str, Any], path: Path, ranks: Ranks) -> Saved:
    """Save a checkpoint, or leave the one before as it was.

    Args:
        checkpoint: Of this rank, with DTensors in it; what is not divided is taken from the first.
        path: The folder; the first rank's is taken.
        ranks: All of them.

    Raises:
        CheckpointError: It cannot be written, on whichever rank.
    """
    start = time.perf_counter()
    with ranks.agree() as step, _told(path, checkpoint):
        if ranks.rank == 0:
            saving.prepare(path)
            step.mine = {"path": str(path), "token": saving.new_token()}
    path, token = Path(step.of_all[0]["path"]), step.of_all[0]["token"]
    rest, rows = divide(checkpoint, _rows_of)
    names = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    with ExitStack() as held:
        with ranks.agree() as step, _told(path, rows):
            part = held.enter_context(saving.part(path, token, ranks.rank, ranks.size, rows))
            step.mine = {"digest": part.digest, "bytes": part.num_bytes, "names": names}
        parts = step.of_all
        with ranks.agree() as step, _told(path, rest):
            if len({each["names"] for each in parts}) > 1:
                text = f"checkpoint {path} was not saved: ranks have parts of different tensors"
                raise CheckpointError(text)
            if ranks.rank == 0:
                index = saving.write_index(path, token, [each["digest"] for each in parts], rest, rows)
                step.mine["bytes"] = index.num_bytes
        if ranks.rank == 0:
            saving.tidy(path, just_saved=True)
    num_bytes = step.of_all[0]["bytes"] + sum(each["bytes"] for each in parts)
    return Saved(path, num_bytes, time.perf_counter() - start)


def load(path: Path, ranks: Ranks) -> dict[str, Any]:
    """Verify a checkpoint, each rank a share of its parts, and return it.

    Args:
        path: The folder.
        ranks: All of them; any number.

    Returns:
        The checkpoint; of its divided tensors rows are read when they are asked for (in_rows.py).

    Raises:
        CheckpointError: A file is missing, damaged, or of another save, whichever rank has found it.
    """
    with ranks.agree():
        index = sharded.read_index(path)
        sharded.verify_parts(index, range(ranks.rank, len(index.digests), ranks.size))
    return sharded.joined(index)


def _rows_of(tensor: Tensor) -> Piece | Tensor:
    """Return this rank's rows; of what is divided in another way, the whole, from all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    here = local_rows(tensor)
    if here is None:
        return full_tensor(tensor).to("cpu")
    rows = tensor.to_local()
    shared = rows.untyped_storage().nbytes() != rows.nbytes  # torch.save would write all of it
    return here[0], rows.clone() if shared else rows


@contextmanager
def _told(path: Path, content: Any) -> Generator[None]:
    """Tell what a disk's refusal means."""
    try:
        yield
    except OSError as error:
        text = not_saved(path, error, lambda file: torch.save(content, file))
        raise CheckpointError(text) from error
