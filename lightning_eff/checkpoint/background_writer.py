"""Jobs in one thread, one after another, whose errors are raised or logged."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Run jobs in order in one thread, which starts with the first job."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def add(self, job: Callable[[], None]) -> None:
        """Run a job after those before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_writer")
            atexit.register(self._log_errors)
        self._pending.append(self._pool.submit(job))

    def add_if_successful(self, job: Callable[[], None]) -> None:
        """Run a job if none of the pending ones fails; at once if none is pending."""
        before = list(self._pending)
        if before:
            self.add(lambda: None if any(future.exception() for future in before) else job())
        else:
            job()

    def wait(self, *, end: bool = False) -> None:
        """Wait for all jobs, then raise the first error, once; with `end` the thread ends too."""
        pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if end and self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            atexit.unregister(self._log_errors)
        if errors:
            raise errors[0]

    def _log_errors(self) -> None:
        """Log errors when a program ends without `wait`."""
        for future in self._pending:
            if error := future.exception():
                log.error("%s", error)
