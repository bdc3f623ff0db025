"""A loader whose order is set by seed and epoch alone, and that resumes in the middle of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override


@dataclass(eq=False)
class EpochSampler(Sampler[int]):
    """All rows in random order, which depends on seed and epoch but not on the global random state.

    Args:
        rows: The dataset.
        seed: Seed of the order.

    Example:
        >>> sampler = EpochSampler(range(5), seed=0)
        >>> list(sampler) == list(sampler), sorted(sampler)
        (True, [0, 1, 2, 3, 4])
    """

    rows: Sized
    _: KW_ONLY
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Lightning calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __iter__(self) -> Iterator[int]:
        # Neighbouring seeds give unrelated orders: the generator mixes their bits.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from torch.randperm(len(self.rows), generator=generator).tolist()


class ResumableLoader(DataLoader[Any]):
    """A loader whose state is the number of batches of the epoch so far.

    After a restore, these batches are loaded again and dropped, which is cheap for rows in memory.
    """

    _num_yielded = 0
    _num_skipped = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._num_yielded, self._num_skipped = self._num_skipped, 0
        for batch in itertools.islice(super().__iter__(), self._num_yielded, None):
            self._num_yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return how many batches of the epoch were yielded."""
        return {"num_given": self._num_yielded}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Start the next iteration after these batches; after a full epoch, at its beginning."""
        num_batches = int(state_dict["num_given"])
        self._num_yielded = self._num_skipped = num_batches if num_batches < len(self) else 0
