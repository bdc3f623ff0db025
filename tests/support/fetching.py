"""Stands for Lightning's epoch loop (2.6): it only waits for its next batch."""

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
