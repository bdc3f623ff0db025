"""Jobs in one thread, one after another, whose errors are raised or logged."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Run jobs in order in one thread, which starts with the first job.

    Example:
        >>> jobs, done = BackgroundWriter(), []
        >>> _ = jobs.add(lambda: done.append(1)), jobs.add(lambda: done.append(2))
        >>> jobs.wait()
        >>> done
        [1, 2]
        >>> jobs.close()
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def add(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_writer")
            atexit.register(self._log_errors)
        self._pending.append(self._pool.submit(job))

    def add_on_success(self, job: Callable[[], None]) -> None:
        """Run `job` after the pending jobs unless one of them failed; at once if none is pending."""
        before = list(self._pending)
        if before:
            self.add(lambda: None if any(future.exception() for future in before) else job())
        else:
            job()

    def wait(self) -> None:
        """Wait for all jobs and raise the first error, once."""
        pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for all jobs, end the thread, and raise the first error."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
                atexit.unregister(self._log_errors)

    def _log_errors(self) -> None:
        """Log errors when a program ends without `wait` or `close`."""
        for future in self._pending:
            if error := future.exception():
                log.error("%s", error)
