"""A loader whose batches are fetched, and moved to the device, before they are asked for.

What is asked of it otherwise, its loader answers. A stateful loader's state is the one after the last batch
that was handed out, not after the last that was fetched. Whoever iterates it beside the training (to look
at some images) gets an iterator of the loader itself, and takes nothing from the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import override

from lightning_eff.callbacks._data_preload.lookahead import Fetched, Lookahead, Seen, Settings


class Ahead:
    """A loader with batches ready.

    Args:
        loader: Any iterable.
        settings: How far to go.
        tuned: The same loader with other workers, which the training iterates in its place; None for none.
    """

    _OWN = ("loader", "settings", "seen", "_tuned", "_current", "_taken_state", "_over")

    def __init__(self, loader: Any, settings: Settings, tuned: Any = None) -> None:
        self.loader = loader
        self.settings = settings
        self.seen = Seen()
        self._tuned = loader if tuned is None else tuned
        self._current: Lookahead | None = None
        self._taken_state: Any = None
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        if self._over or (self._current is not None and not self._current.ended):
            return iter(self.loader)
        self._taken_state = None
        stateful = isinstance(self, StatefulAhead)
        self._current = Lookahead(self._make_source(), self, stateful=stateful)
        return self._current

    def _make_source(self) -> Callable[[], Iterator[Any]]:
        """Return what begins the pass, so that the random state is drawn from as without it.

        A loader without workers draws a seed when its iterator is made and the sampler's when the first
        batch is asked for; one with workers draws both at once, and one whose workers stay draws none.
        """
        tuned, loader = self._tuned, self.loader
        if tuned is loader or loader.num_workers > 0:
            if tuned is not loader and tuned._iterator is not None and not loader.persistent_workers:  # noqa: SLF001
                _seed(loader)
            source = iter(tuned)
            return lambda: source
        seed = _seed(loader)

        def begin() -> Iterator[Any]:
            object.__setattr__(tuned, "generator", torch.Generator().manual_seed(seed))
            return iter(tuned)

        return begin

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return True

    def take(self, fetched: Fetched, wait_s: float) -> None:
        """Count a batch that is handed out."""
        self.seen.count(wait_s)
        self._taken_state = fetched.state

    def pause(self, *, paused: bool = True) -> None:
        """Fetch nothing while others use the data; what is being fetched is waited for."""
        if self._current is not None:
            self._current.pause(paused=paused)

    def close(self) -> None:
        """Stop fetching and forget what is ready; the loader may be iterated again."""
        self._stop(for_good=False)

    def end(self) -> None:
        """Close for good, and end the workers that stay; who iterates it afterwards iterates the loader."""
        self._stop(for_good=True)
        self._over = True
        if self._tuned is not self.loader:
            if self._tuned._iterator is not None:  # noqa: SLF001
                self._tuned._iterator._shutdown_workers()  # noqa: SLF001
                self._tuned._iterator = None  # noqa: SLF001
            self._tuned = self.loader

    def _stop(self, *, for_good: bool) -> None:
        if self._current is None:
            return
        source = self._current.source
        self._current.close()
        self._current = None
        ours = self._tuned is not self.loader
        if ours and (for_good or not self._tuned.persistent_workers):
            # Now, and not when the last traceback is forgotten that refers to it.
            end_workers = getattr(source, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()

    @property
    def _iterator(self) -> Any:
        """What Lightning looks for when it stops a loader's workers: nobody may be waiting for them then."""
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


def _seed(loader: Any) -> int:
    """Draw what a loader draws when it makes an iterator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))


def wrap(loader: Any, settings: Settings, tuned: Any = None) -> Ahead:
    """Return a loader that fetches ahead."""
    return (StatefulAhead if is_stateful(loader) else Ahead)(loader, settings, tuned)


def is_stateful(loader: Any) -> bool:
    """Say whether a loader can be saved and go on where it was."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
