"""The indices of one loader, from a later position or in another order on request."""

from __future__ import annotations

import contextlib
import itertools
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from lightning_eff.core.random_states import RandomStates, differing, has_global

LATE_DRAWS = "the sampler draws random numbers while it is read: samples may be seen again"


NUM_HASHED = 16
"""Batches at the start of a pass whose indices are hashed, to prove its order."""


class IndexStream:
    """A loader's batch sampler; a pass may begin after its first batches without loading them.

    A loader asks for the pass before it draws the seed of its workers, and for the first indices after it:
    the random states at both moments are needed to draw the same order again.

    Args:
        source: The loader's batch sampler, or its sampler where it does not batch. Not `sampler`, under
            which Lightning looks for the sampler inside, to set its epoch.
        capture: Returns the random states.
        restore: Sets them.
        inexact: Takes what cannot be repeated.
    """

    is_resumed = False
    """Whether the next pass begins with the states in `first_states`."""
    num_skipped = 0
    """Batches of indices that a resumed pass leaves out."""
    is_asked = False
    """Whether the loader has asked for the indices of its current pass."""
    remaining: list[Any] | None = None
    """All batches of indices of the next pass, in place of the sampler's."""
    first_states: RandomStates | None = None
    """The random states when the current pass was asked for its first indices."""

    def __init__(
        self,
        source: Any,
        capture: Callable[[], RandomStates],
        restore: Callable[[RandomStates], None],
        inexact: list[str],
    ) -> None:
        self.source: Any
        vars(self).update(source=source, capture=capture, restore=restore, inexact=inexact, hashes=[])

    def __iter__(self) -> Iterator[Any]:
        remaining, self.remaining, self.is_asked = self.remaining, None, True
        return self._pass(self.hashed(iter(self.source))) if remaining is None else iter(remaining)

    def hashed(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield the sampler's indices, and keep hashes of the first batches in `hashes`."""
        self.hashes.clear()
        for batch in indices:
            if len(self.hashes) < NUM_HASHED:
                with contextlib.suppress(TypeError, AttributeError):  # of objects, which are not hashed
                    text = json.dumps(batch, default=lambda array: array.tolist())
                    self.hashes.append(zlib.crc32(text.encode()))
            yield batch

    def _pass(self, indices: Iterator[Any]) -> Iterator[Any]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        is_resumed, self.is_resumed = self.is_resumed, False
        current = self.capture()
        if is_resumed:
            self.first_states = self.first_states or current
            self.restore(self.first_states)
            # A sampler draws its order with its first index: if none is skipped, with the one that is used.
            taken = list(itertools.islice(indices, 1))
            first = self.capture()
            deque(itertools.islice(indices, max(0, num_skipped - 1)), maxlen=0)
            if has_global(differing(self.capture(), first)):
                self.inexact.append(LATE_DRAWS)
            # Workers are asked for more at once: then a sampler's own generator is where it is to be.
            self.restore({k: v for k, v in current.items() if num_skipped or "." not in k})
            yield from () if num_skipped else taken
        else:
            self.first_states = current
        yield from indices

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if "source" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.source, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value) if hasattr(IndexStream, name) else setattr(self.source, name, value)

    # Users ask `isinstance(loader.batch_sampler, ...)`.
    __class__ = property(lambda self: type(self.source))  # pyright: ignore[reportIncompatibleMethodOverride]

    @override
    def __reduce__(self) -> Any:  # a spawned worker has no use for the states
        return (_same, (self.source,))


def _same(source: Any) -> Any:
    return source
