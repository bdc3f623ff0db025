"""The order of rows: set by seed and epoch alone, and gone on with in the middle of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override


class EpochOrder(Sampler[int]):
    """Every row once, in an order that depends on the seed and the epoch and on nothing that ran before.

    Args:
        rows: What is ordered.
        seed: Of the order.

    Example:
        >>> order = EpochOrder(range(5), seed=0)
        >>> list(order) == list(order), sorted(order)
        (True, [0, 1, 2, 3, 4])
    """

    def __init__(self, rows: Sized, *, seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch; Lightning calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __iter__(self) -> Iterator[int]:
        # Seeds side by side give unrelated orders: the generator mixes them.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from torch.randperm(len(self.rows), generator=generator).tolist()


class ResumableLoader(DataLoader[Any]):
    """A loader that goes on after the batch that was handed out last, when its state is loaded.

    The batches before are made once more and thrown away, which is cheap where rows lie in memory.
    """

    _num_given = 0
    _num_left_out = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        start, self._num_left_out = self._num_left_out, 0
        self._num_given = start
        for batch in itertools.islice(super().__iter__(), start, None):
            self._num_given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return how many batches of the epoch were handed out."""
        return {"num_given": self._num_given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Begin the next iteration behind them; a whole epoch is begun anew."""
        given = int(state_dict["num_given"])
        self._num_given = self._num_left_out = given if given < len(self) else 0
