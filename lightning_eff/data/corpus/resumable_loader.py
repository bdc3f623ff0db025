"""A loader that resumes in the middle of an epoch.

Why not torchdata's StatefulDataLoader: it draws the order of a resumed epoch when its iterator is made, which
Lightning does before it sets the sampler's epoch, so that from the second epoch on the rest of an epoch would
be in the first one's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override


class ResumableLoader(DataLoader[Any]):
    """A loader whose state is the number of batches of the epoch so far.

    After a restore, these batches are loaded again and dropped, which is cheap for rows in memory.
    """

    num_ahead = 0
    """Batches that were taken and not yet trained on."""
    _num_yielded = 0
    _num_skipped = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._num_yielded, self._num_skipped = self._num_skipped, 0
        for batch in itertools.islice(super().__iter__(), self._num_yielded, None):
            self._num_yielded += 1
            yield batch
        self._num_yielded = 0

    def state_dict(self) -> dict[str, int]:
        """Return how many batches of the epoch were trained on; 0 after its last one."""
        return {"num_given": max(0, self._num_yielded - self.num_ahead)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Start the next iteration after these batches; after a full epoch, at its beginning."""
        num_batches = int(state_dict["num_given"])
        is_over = self._dataset_kind == 0 and num_batches >= len(self)
        self._num_yielded = self._num_skipped = 0 if is_over else num_batches
