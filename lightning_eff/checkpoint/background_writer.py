"""Jobs in a thread, one after another, whose errors are not lost."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger(__name__)


class InOrder:
    """A thread that does one job after another; it begins with the first job.

    Example:
        >>> jobs, done = InOrder(), []
        >>> _ = jobs.add(lambda: done.append(1)), jobs.add(lambda: done.append(2))
        >>> jobs.settle()
        >>> done
        [1, 2]
        >>> jobs.close()
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def add(self, job: Callable[[], None]) -> None:
        """Do `job` after those before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="in_order")
            atexit.register(self._say_unheard)
        self._pending.append(self._pool.submit(job))

    def add_if_all_went_well(self, job: Callable[[], None]) -> None:
        """Do `job` unless one before it failed that nobody has asked about yet; at once if there is none."""
        before = list(self._pending)
        if before:
            self.add(lambda: None if any(each.exception() for each in before) else job())
        else:
            job()

    def settle(self) -> None:
        """Wait for all jobs and raise the first error, once."""
        pending, self._pending = self._pending, []
        errors = [error for each in pending if (error := each.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for all jobs, let the thread go, and raise the first error."""
        try:
            self.settle()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
                atexit.unregister(self._say_unheard)

    def _say_unheard(self) -> None:
        """Tell of errors at the end of a program that did not ask for them."""
        for each in self._pending:
            if error := each.exception():
                log.error("%s", error)
