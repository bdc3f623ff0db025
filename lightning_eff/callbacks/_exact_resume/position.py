"""Where a rank is in its data, and that as one tensor of bytes: ranks exchange tensors, not objects."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_eff.core.errors import CheckpointError, Remedy
from lightning_eff.core.random_states import RandomStates, differing


@dataclass
class Position:
    """The position of one loader in its pass.

    Args:
        num_batches: Trained on in this pass.
        start: Random states when the pass began.
        first: Random states when its sampler was asked for the first indices; None for those after the start.
        order: What decides the order: `sequential`, `random`, `distributed`, `distributed in order`, or the
            sampler's class.
        seed: Of a distributed sampler.
        epoch: Of a sampler that has one.
        num_samples: Length of the dataset; -1 where it has none.
        batch_size: Samples in a batch; -1 where the loader has none.
        length: Batches in a pass; -1 where it is not known.
        num_workers: Of the loader.
        hashes: Of the indices of the first batches that were trained on.
    """

    num_batches: int
    start: RandomStates
    first: RandomStates | None
    order: str
    seed: int
    epoch: int
    num_samples: int
    batch_size: int
    length: int
    num_workers: int
    hashes: list[int]


@dataclass
class RankPosition:
    """The positions of a rank's loaders, and its random states.

    Args:
        now: Random states at the save.
        num_ahead: Batches that Lightning had fetched beyond the last one trained on: one, where it does not
            know the loader's length.
        is_over: Whether the epoch had ended: the loaders begin a new pass.
        loaders: In Lightning's order.
        notes: What of the save a resumed run cannot repeat.
    """

    now: RandomStates
    num_ahead: int
    is_over: bool
    loaders: list[Position]
    notes: list[str]


def pack(position: RankPosition) -> Tensor:
    """Return a position as bytes: a length, JSON, and the random states that it refers to.

    Returns:
        uint8, about 16 kB for one loader: states that equal those at the save are left out.
    """
    content = asdict(position)
    for loader in content["loaders"]:
        loader["start"] = differing(loader["start"], position.now)
        loader["first"] = loader["first"] and differing(loader["first"], position.now)
    tensors: list[Tensor] = []

    def refer(tensor: Tensor) -> int:
        tensors.append(tensor)
        return tensor.numel()

    header = json.dumps(content, default=refer).encode()
    size = torch.tensor([len(header)]).view(torch.uint8)
    return torch.cat([size, torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors])


def of_all_ranks(own: Tensor) -> Tensor:
    """Return the bytes of each rank, a row each, padded."""
    if num_ranks() == 1:
        return own[None]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return pad_sequence(gather_all_tensors(own.to(device)), batch_first=True).cpu()


def num_ranks() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def unpack(packed: Tensor) -> RankPosition:
    """Return the position that `pack` was given; bytes after it are ignored.

    Raises:
        CheckpointError: The bytes are no position.
    """
    try:
        return _unpack(packed)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        off = Remedy("~callbacks.exact_resume", "remove ExactResume")
        raise CheckpointError(f"the checkpoint's position in the data is damaged\n  try: {off}") from error


def _unpack(packed: Tensor) -> RankPosition:
    header_end = 8 + int(packed[:8].clone().view(torch.int64))
    content: dict[str, Any] = json.loads(packed[8:header_end].numpy().tobytes())
    offset = header_end

    def states(sizes: dict[str, int]) -> RandomStates:
        nonlocal offset
        result: RandomStates = {}
        for name, size in sizes.items():
            result[name] = packed[offset : offset + size].clone()
            offset += size
        return result

    now = states(content["now"])
    loaders: list[Position] = []
    for loader in content["loaders"]:
        start = now | states(loader["start"])
        first = None if loader["first"] is None else now | states(loader["first"])
        loaders.append(Position(**loader | {"start": start, "first": first}))
    values: Any = content | {"now": now, "loaders": loaders}
    return RankPosition(**values)
