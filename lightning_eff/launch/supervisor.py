"""Supervise a run of several ranks: all finish, all stop, or all fail with one line that names the cause."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

import lightning.pytorch as pl

from lightning_eff.core.errors import RankError, exit_code, root_cause_line
from lightning_eff.launch.job import Launch
from lightning_eff.launch.stop import CoordinatedStop
from lightning_eff.launch.watch import (
    CLEANUP_TIMEOUT_S,
    EXIT_TIMEOUT_S,
    PARENT,
    POLL_S,
    STOPPED,
    RankProcesses,
    exit_now,
    rank_message,
    traceback_file,
    write_torchrun_error,
)

LOST = "connection"
"""In messages of gloo and NCCL about a rank that is gone: closed by peer, reset by peer, the watchdog's."""


class RankSupervisor:
    """A context around `fit` that ends all ranks together; with one rank it does nothing."""

    def __init__(self, trainer: pl.Trainer, folder: Path, launch: Launch) -> None:
        self._trainer = trainer
        self._folder = folder
        self._launch = launch
        self._is_distributed = trainer.world_size > 1
        self._stop = CoordinatedStop(self._fail_alone)
        # Only the process in which Lightning starts the ranks has a launcher with processes.
        self._ranks = RankProcesses(lambda: getattr(trainer.strategy.launcher, "procs", []), folder)
        self._watcher = threading.Thread(target=self._ranks.watch, name="watch-ranks", daemon=True)
        self._traceback: Path | None = None
        self._parent = os.environ.get(PARENT)

    def __enter__(self) -> None:
        if not self._is_distributed:
            return
        callbacks: list[pl.Callback] = self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks.insert(0, self._stop)
        os.environ[PARENT] = str(os.getpid())
        self._watcher.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_distributed:
            return
        self._ranks.is_over.set()
        self._watcher.join()
        os.environ.pop(PARENT)
        if self._parent is not None:
            os.environ[PARENT] = self._parent
        if error is not None and exit_code(error) not in STOPPED:
            self._raise_failure(error)
            return
        if error is not None and self._launch.rank:
            error.__dict__["is_reported"] = True  # by rank 0
        # Wait for the other ranks, so that the whole run is over when the command returns.
        late = self._ranks.end(within_s=EXIT_TIMEOUT_S if error is None else CLEANUP_TIMEOUT_S)
        problem = (late, 1) if late else self._ranks.first_failure()
        if problem is not None and error is None:
            raise RankError(*problem)

    def _fail_alone(self, error: BaseException) -> None:
        """Write the cause for the other ranks, then give this rank's callbacks a limited time."""
        with contextlib.suppress(OSError):  # a full disk does not hide the cause
            self._folder.mkdir(parents=True, exist_ok=True)
            path = traceback_file(self._folder, self._launch.rank)
            path.write_text("".join(traceback.format_exception(error)))
            self._traceback = path
        write_torchrun_error(self._launch, error)
        line = rank_message(self._launch.rank, root_cause_line(error), self._traceback)

        def give_up() -> None:
            self._ranks.end()
            exit_now(line, exit_code(error))

        timer = threading.Timer(CLEANUP_TIMEOUT_S, give_up)
        timer.daemon = True
        timer.start()

    def _raise_failure(self, error: BaseException) -> None:
        """Raise an error that names the rank that failed first; rank 0 raises it for the ranks it started."""
        if self._parent is not None:  # a lost connection may mean that it is gone, which `watch` then reports
            time.sleep(5 * POLL_S)
        is_refusal = hasattr(error, "exit_code")  # a complete message of this package, with remedies
        is_lost = LOST in str(error).lower()
        other = None if is_refusal else self._ranks.first_failure(even_running=True, even_finished=is_lost)
        self._ranks.end()
        if other is not None:
            raise RankError(*other) from error
        if self._launch.rank and self._traceback is not None and self._launch.by in ("lightning", "torchrun"):
            error.__dict__["is_reported"] = True  # by rank 0, or by torchrun
        elif not is_refusal:
            line = rank_message(self._launch.rank, root_cause_line(error), self._traceback)
            raise RankError(line, exit_code(error)) from error
