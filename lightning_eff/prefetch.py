"""A loader whose batches are fetched, and moved to the device, before they are asked for.

What is asked of it otherwise, its loader answers. A stateful loader's state is the one after the last batch
that was handed out, not after the last that was fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff.lookahead import Fetched, Lookahead, Seen, Settings


class Ahead:
    """A loader with batches ready; what is asked of it otherwise, its loader answers.

    Args:
        loader: Any iterable.
        settings: How far to go.
    """

    _OWN = ("loader", "settings", "seen", "_current", "_taken_state")

    def __init__(self, loader: Any, settings: Settings) -> None:
        self.loader = loader
        self.settings = settings
        self.seen = Seen()
        self._current: Lookahead | None = None
        self._taken_state: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.close()
        _draw_as_a_new_iterator_would(self.loader)
        self._taken_state = None
        self._current = Lookahead(iter(self.loader), self, stateful=isinstance(self, StatefulAhead))
        return self._current

    def __len__(self) -> int:
        return len(self.loader)

    def take(self, fetched: Fetched, wait_s: float) -> None:
        """Count a batch that is handed out."""
        self.seen.count(wait_s)
        self._taken_state = fetched.state

    def close(self) -> None:
        """Stop fetching and forget what is ready; the loader may be iterated again."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def end(self) -> None:
        """Close, and end the workers, also those that stay and those that a traceback still refers to."""
        source = self._current.source if self._current is not None else None
        self.close()
        end_workers = getattr(source, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()

    @property
    def _iterator(self) -> Any:
        """What Lightning looks for when it stops a loader's workers: nobody may be waiting for them then."""
        self.close()
        return self.loader._iterator  # noqa: SLF001

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)


class StatefulAhead(Ahead):
    """The same for a loader with a state, which does not run ahead."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that was handed out."""
        return self.loader.state_dict() if self._taken_state is None else self._taken_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state in the next iteration."""
        self.close()
        self._taken_state = None
        self.loader.load_state_dict(state_dict)


def wrap(loader: Any, settings: Settings) -> Ahead:
    """Return a loader that fetches ahead."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulAhead if stateful else Ahead)(loader, settings)


def _draw_as_a_new_iterator_would(loader: Any) -> None:
    """Workers that stay take no seed from the random state; without them each epoch takes one."""
    stays = isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0
    if stays and loader._iterator is not None:  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
