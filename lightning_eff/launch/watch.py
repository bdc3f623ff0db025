"""End all processes of a run together, with a last line on the screen that names the first one that failed.

Lightning 2.6 checks its processes every five seconds, only from rank 0, and reports nothing: if rank 0 dies
the others stay behind, and if rank 0 fails it waits for them. Here each process watches its parent, and rank
0 also watches the ranks that it started. A rank that fails writes its traceback into the run's folder; a rank
that ends because of it reads the cause there.

Costs: one thread per process, which wakes up five times a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    RankError,
    root_cause_line,
)
from lightning_eff.launch.job import Launch

PARENT = "LIGHTNING_EFF_PARENT"
"""Environment variable with the process id that the processes started by it must not outlive."""
POLL_S = 0.2
GRACE_S = 1.0
"""Time that rank 0 has to report another rank's end itself, for example a rejected setting with remedies."""
CLEANUP_TIMEOUT_S = 10.0
"""Time that a failed rank has for its callbacks, one of which may wait for the other ranks."""
EXIT_TIMEOUT_S = 60.0
"""Time that rank 0 waits, after the run, for the other ranks to exit."""
STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)


def end_with_parent(*, torchrun: bool) -> None:
    """End this process as soon as its parent is gone: torchrun, or the process in `PARENT`, if it is set."""
    parent = os.getppid() if torchrun else int(os.environ.get(PARENT, "0"))
    if not parent:
        return
    if parent != os.getppid():  # inherited through another process
        try:
            os.kill(parent, 0)  # sends nothing: checks that the process exists
            return
        except ProcessLookupError:
            pass
    name = "torchrun" if torchrun else "rank 0" if "LOCAL_RANK" in os.environ else "the sweep"

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        exit_now(f"{name} (process {parent}) is gone, perhaps killed; rank {rank} ends too", EXIT_FAILED)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def exit_now(text: str, code: int) -> None:
    """Print the reason and end this process, whatever its other threads wait for."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def train_in_subprocess(
    recipe: str, overrides: Iterable[str], options: Iterable[str], folder: Path
) -> dict[str, Any]:
    """Train a recipe as a command of its own, with which Lightning then starts the other ranks.

    Returns:
        The efficiency report in `folder`; empty without that monitor.

    Raises:
        RankError: The run failed, and has printed why.
    """
    words = [sys.executable, "-m", "lightning_eff", "train", recipe, *overrides, *options]
    with subprocess.Popen(words, env=os.environ | {PARENT: str(os.getpid())}) as process:  # noqa: S603
        code = process.wait()
    if code:
        text = f"the run in {folder} {describe_exit(code)}"
        raise RankError(text, max(code, EXIT_FAILED))
    report = folder / "efficiency.json"
    return json.loads(report.read_text()) if report.is_file() else {}


def traceback_file(folder: Path, rank: int) -> Path:
    """Return where a rank's traceback goes.

    Example:
        >>> traceback_file(Path("run"), 0).name, traceback_file(Path("run"), 1).name
        ('error.log', 'error_rank1.log')
    """
    return folder / ("error.log" if rank == 0 else f"error_rank{rank}.log")


def rank_message(rank: int, cause: str, path: Path | None) -> str:
    """Return the line that a failed rank prints last."""
    where = f" (traceback: {path})" if path is not None else ""
    return f"rank {rank}: {cause}{where}"


def write_torchrun_error(launch: Launch, error: BaseException) -> bool:
    """Write the cause that torchrun shows at the end; return whether torchrun is going to show it."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if launch.by != "torchrun" or not path.name:
        return False
    if path.exists() and path.stat().st_size:  # the first cause stays
        return True
    message = root_cause_line(error)
    if not isinstance(error, RankError):
        message = f"rank {launch.rank}: {message}"
    extra: dict[str, Any] = {"py_callstack": message, "timestamp": str(int(time.time()))}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return True


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code.

    Example:
        >>> describe_exit(-9)
        'was killed by SIGKILL: from outside, or by the kernel because memory ran out'
        >>> describe_exit(3)
        'ended with code 3; its message is above'
    """
    if code >= 0:
        return f"ended with code {code}; its message is above"
    why = ": from outside, or by the kernel because memory ran out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{why}"


@dataclass(eq=False)
class RankProcesses:
    """The other ranks of this machine, in the process that started them.

    Args:
        processes: Returns Lightning's list of them, in the order of their ranks from 1.
        folder: The run's folder, with their tracebacks.
    """

    processes: Callable[[], list[subprocess.Popen[bytes]]]
    folder: Path
    is_over: threading.Event = field(default_factory=threading.Event, init=False)
    """Set by the caller to end `watch`."""
    _taken: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    _began_s: float = field(default_factory=time.time, init=False)

    def _processes(self) -> Sequence[subprocess.Popen[bytes]]:
        # Taken off Lightning 2.6's list, whose observer would kill this process before it can report.
        listed = self.processes()
        while listed:
            self._taken.append(listed.pop(0))
        return self._taken

    def watch(self) -> None:
        """End this process when another rank fails; runs in a thread of its own until `is_over`."""
        while not self.is_over.wait(POLL_S):
            failed = self.first_failure()
            if failed is not None and not self.is_over.wait(GRACE_S):
                self.end()
                exit_now(*failed)

    def first_failure(
        self, *, even_running: bool = False, even_finished: bool = False
    ) -> tuple[str, int] | None:
        """Return message and exit code of the first rank that failed; None if none has.

        Args:
            even_running: Also of one that has written a traceback and still runs.
            even_finished: Otherwise of one that exited with code 0, while another rank lost it.
        """
        finished: tuple[str, int] | None = None
        for rank, process in enumerate(self._processes(), start=1):
            code, path = process.poll(), traceback_file(self.folder, rank)
            has_traceback = path.exists() and path.stat().st_mtime >= self._began_s
            if has_traceback and (code or even_running):
                # The last line that is not indented: the exception's class and message.
                lines = [line for line in path.read_text().splitlines() if line.strip()]
                unindented = (line for line in reversed(lines) if not line.startswith(" "))
                cause = next(unindented, "no reason found")
                return rank_message(rank, cause, path), max(code or 0, EXIT_FAILED)
            if code and code not in STOPPED:
                return f"rank {rank} {describe_exit(code)}", max(code, EXIT_FAILED)
            if even_finished and code == 0 and finished is None:
                finished = f"rank {rank} exited with code 0 while the others were at work", EXIT_FAILED
        return finished

    def end(self, *, within_s: float = 0.0) -> str:
        """Wait for them to end and kill those that do not; return a message on the first of these, or ""."""
        until_s = time.monotonic() + within_s
        late = ""
        for rank, process in enumerate(self._processes(), start=1):
            try:
                process.wait(max(until_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                late = f"rank {rank} did not end within {within_s:.0f} s of rank 0"
                break
        # With SIGKILL: a process inside a collective does not handle SIGTERM.
        for process in self._processes():
            process.kill()
        for process in self._processes():
            process.wait()
        return late
