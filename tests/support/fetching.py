"""An epoch loop that does nothing but wait for its next batch, as Lightning 2.6 does."""

from __future__ import annotations

from collections.abc import Callable


class Fetching:
    """Stands for Lightning's epoch loop."""

    def fetch(self, wait: Callable[[], None]) -> None:
        """Wait for a batch."""
        self._on_before_fetch()
        wait()
        self._on_after_fetch()

    def _on_before_fetch(self) -> None: ...

    def _on_after_fetch(self) -> None: ...
