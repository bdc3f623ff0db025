"""A loader whose batches are prefetched, and moved to the device, for the training loop.

All other attributes are the wrapped loader's. A stateful loader's state is the one after the last batch that
was handed out, not after the last that was fetched. A second iteration during a pass (to look at some images)
gets an iterator of the loader itself, and takes nothing from the training.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from lightning_eff.callbacks._data_preload.prefetch_iterator import (
    LoaderStats,
    PrefetchIterator,
    PrefetchSettings,
)


class PrefetchLoader:
    """Any iterable with batches ready; `tuned` is the same loader with other workers, for the training."""

    _OWN = ("loader", "settings", "stats", "_tuned", "_current", "_taken_state", "_is_over")

    def __init__(self, loader: Any, settings: PrefetchSettings, tuned: Any = None) -> None:
        self.loader = loader
        self.settings = settings
        self.stats = LoaderStats()
        self._tuned = loader if tuned is None else tuned
        self._current: PrefetchIterator | None = None
        self._taken_state: Any = None
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_over or (self._current is not None and not self._current.ended):
            return iter(self.loader)
        # The pass's iterator makes the same draws from the random state as the loader's. torch 2.13: a loader
        # without workers draws a seed when its iterator is made, and the sampler's with the first batch; one
        # with workers draws both at once; persistent workers draw none in later passes.
        tuned, loader, seed = self._tuned, self.loader, 0
        is_at_once = tuned is loader or loader.num_workers > 0
        # Persistent workers of ours draw no seed, and new ones of the loader would.
        is_kept = is_at_once and tuned is not loader and tuned._iterator is not None  # noqa: SLF001
        if not is_at_once or (is_kept and not loader.persistent_workers):
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        get_state = loader.state_dict if isinstance(self, StatefulPrefetchLoader) else None
        current = PrefetchIterator(functools.partial(iter, tuned), self.settings, self.stats, get_state)
        if is_at_once:
            current.source = iter(tuned)
        else:
            object.__setattr__(tuned, "generator", torch.Generator().manual_seed(seed))
        self._current = current
        return current

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # without asking for a length

    def pause(self, *, paused: bool = True) -> None:
        """Stop or resume prefetching, while other code uses the dataset; waits for a batch in flight."""
        if self._current is not None:
            self._current.pause(paused=paused)

    def close(self) -> None:
        """End the pass, drop what is ready, and end workers that are not persistent."""
        current, self._current = self._current, None
        if current is None:
            return
        current.close()
        self._taken_state = current.taken_state
        if self._tuned is not self.loader and not self._tuned.persistent_workers:
            # Now, and not when the last traceback that refers to them is gone.
            end_workers = getattr(current.source, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()

    def end(self) -> None:
        """Close for good, persistent workers too; later iterations are the loader's own."""
        self.close()
        self._is_over = True
        if self._tuned is not self.loader:
            if self._tuned._iterator is not None:  # noqa: SLF001
                self._tuned._iterator._shutdown_workers()  # noqa: SLF001
                self._tuned._iterator = None  # noqa: SLF001
            self._tuned = self.loader

    @property
    def _iterator(self) -> Any:
        """Close the pass and return the inner iterator: Lightning 2.6 shuts down its workers through this."""
        self.close()
        return self._tuned._iterator  # noqa: SLF001

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
            return
        if self._tuned is not self.loader:
            setattr(self._tuned, name, value)
        setattr(self.loader, name, value)


class StatefulPrefetchLoader(PrefetchLoader):
    """The same for a loader with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that was handed out."""
        taken = self._taken_state if self._current is None else self._current.taken_state
        return self.loader.state_dict() if taken is None else taken

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state in the next iteration."""
        self.close()
        self._taken_state = None
        self.loader.load_state_dict(state_dict)


def is_stateful(loader: Any) -> bool:
    """Return whether a loader's position can be saved and restored."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
