"""Begin and end a run of several ranks: all finish, all stop, or all fail with one line that says why."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning.pytorch as pl

from lightning_eff.core.errors import EXIT_OK, RankError, exit_code, root_cause_line
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
    write_traceback,
)

LOST = "connection"
"""What gloo and NCCL complain of when a rank is gone: closed by peer, reset by peer, a watchdog's."""


class RankSupervisor:
    """Around `fit`: nothing on one rank, and on several what makes them end together.

    Args:
        trainer: That fits.
        folder: The run's folder.
        launch: Of this process.
    """

    def __init__(self, trainer: pl.Trainer, folder: Path, launch: Launch) -> None:
        self._trainer = trainer
        self._folder = folder
        self._launch = launch
        self._several = trainer.world_size > 1
        self._stop = CoordinatedStop(self._fail_alone)
        self._children = RankProcesses(lambda: getattr(trainer.strategy.launcher, "procs", []), folder)
        self._noted: Path | None = None
        self._parent = os.environ.get(PARENT)

    def __enter__(self) -> None:
        if not self._several:
            return
        callbacks: list[pl.Callback] = self._trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks.insert(0, self._stop)
        os.environ[PARENT] = str(os.getpid())
        self._children.watch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._several:
            return
        self._children.unwatch()
        os.environ.pop(PARENT)
        if self._parent is not None:
            os.environ[PARENT] = self._parent
        if error is None or exit_code(error) in STOPPED:
            if error is not None and self._launch.rank:
                error.__dict__["told"] = True  # rank 0 says it for all
            self._finish(failed=error is not None)
        else:
            self._fail(error)

    def _finish(self, *, failed: bool) -> None:
        """Leave when the others have, so that the command is over when it returns."""
        late = self._children.wait(CLEANUP_TIMEOUT_S if failed else EXIT_TIMEOUT_S)
        self._children.kill()
        problem = (late, 1) if late else self._children.failed()
        if problem is not None and not failed:
            raise RankError(*problem)

    def _fail_alone(self, error: BaseException) -> None:
        """Leave the cause where the others find it; then callbacks have their turn, for a while."""
        self._noted = write_traceback(self._folder, self._launch.rank, error)
        write_torchrun_error(self._launch, error)
        line = rank_message(self._launch.rank, root_cause_line(error).removeprefix("error: "), self._noted)

        def give_up() -> None:
            self._children.kill()
            exit_now(line, exit_code(error))

        timer = threading.Timer(CLEANUP_TIMEOUT_S, give_up)
        timer.daemon = True
        timer.start()

    def _fail(self, error: BaseException) -> None:
        """Name the rank that failed first; rank 0 speaks for those that it started."""
        if self._parent is not None:  # a lost connection may mean that it is gone: `end_with_parent` says so
            time.sleep(5 * POLL_S)
        refusal = hasattr(error, "exit_code")
        other = None if refusal else self._children.failed(even_running=True)
        if other is None and not refusal and LOST in str(error).lower():
            other = self._children.left()
        self._children.kill()
        if other is not None:
            raise RankError(*other) from error
        if self._launch.rank and self._noted is not None and self._launch.by in ("lightning", "torchrun"):
            error.__dict__["told"] = True
        elif not refusal:
            cause = root_cause_line(error).removeprefix("error: ")
            raise RankError(rank_message(self._launch.rank, cause, self._noted), exit_code(error)) from error


class TorchrunErrorFile:
    """Around everything that a process does for a run: torchrun is told what ended it, and says so itself.

    Args:
        launch: Of this process.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error is not None and exit_code(error) not in (EXIT_OK, *STOPPED)
        if error is not None and failed and write_torchrun_error(self._launch, error) and self._launch.rank:
            error.__dict__["told"] = True


def write_torchrun_error(launch: Launch, error: BaseException) -> bool:
    """Write what torchrun shows as the cause, which is else a hint to wrap the program; return whether."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or launch.by != "torchrun":
        return False
    if Path(path).exists() and Path(path).stat().st_size:
        return True
    line = root_cause_line(error).removeprefix("error: ")
    words = line if isinstance(error, RankError) else f"rank {launch.rank}: {line}"
    extra: dict[str, Any] = {"py_callstack": words, "timestamp": str(int(time.time()))}
    Path(path).write_text(json.dumps({"message": {"message": words, "extraInfo": extra}}))
    return True
