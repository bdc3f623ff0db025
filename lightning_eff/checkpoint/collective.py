"""Steps that all ranks take, or none: an error on one is an error on all, in the same step.

Ranks tell each other JSON, as bytes in a tensor; nothing of it is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_eff.core.errors import CheckpointError


@dataclass
class Step:
    """One step of all ranks.

    Args:
        mine: What this rank tells the others at its end.
        of_all: What each has told, once it is over.
    """

    mine: dict[str, Any] = field(default_factory=dict[str, Any])
    of_all: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Ranks:
    """The ranks of the default process group; one, where there is none.

    Args:
        device: Where tensors must be that are sent.

    Example:
        >>> with Ranks(torch.device("cpu")).agree() as step:
        ...     step.mine["done"] = 1
        >>> step.of_all
        [{'done': 1}]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1

    @contextmanager
    def agree(self) -> Generator[Step]:
        """Take a step, and wait until all have.

        Raises:
            CheckpointError: Another rank's step failed; the first of them is named, with its reason.
        """
        step = Step()
        try:
            yield step
        except BaseException as error:
            self._tell({"failed": str(error) or repr(error)})
            raise
        step.of_all = self._tell(step.mine)
        for rank, told in enumerate(step.of_all):
            if "failed" in told:
                text = f"rank {rank}: {told['failed']}"
                raise CheckpointError(text)

    def _tell(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        if self.size == 1:
            return [what]
        text = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8).to(self._device)
        sizes = [text.new_zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = [text.new_zeros(longest) for _ in range(self.size)]
        dist.all_gather(padded, torch.cat([text, text.new_zeros(longest - len(text))]))
        return [
            json.loads(bytes(each[: int(size)].tolist())) for each, size in zip(padded, sizes, strict=True)
        ]
