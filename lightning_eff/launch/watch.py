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
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, RankError

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

Processes = Callable[[], list["subprocess.Popen[bytes]"]]


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


class RankProcesses:
    """The other ranks of this machine, in the process that started them.

    Args:
        processes: Returns Lightning's list of them, in the order of their ranks from 1.
        folder: The run's folder, with their tracebacks.
    """

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._listed = processes
        self._taken: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        self._is_over = threading.Event()
        self._began_s = time.time()

    def _processes(self) -> Sequence[subprocess.Popen[bytes]]:
        # Taken off Lightning 2.6's list, whose observer would kill this process before it can report.
        listed = self._listed()
        while listed:
            self._taken.append(listed.pop(0))
        return self._taken

    def watch(self) -> None:
        """Start to end this process when another rank fails."""

        def poll() -> None:
            while not self._is_over.wait(POLL_S):
                failed = self.first_failure()
                if failed is not None and not self._is_over.wait(GRACE_S):
                    self.kill()
                    exit_now(*failed)

        self._thread = threading.Thread(target=poll, name="watch-ranks", daemon=True)
        self._thread.start()

    def unwatch(self) -> None:
        """Stop that; the caller uses the other methods from now on."""
        self._is_over.set()
        self._thread.join()

    def first_failure(self, *, even_running: bool = False) -> tuple[str, int] | None:
        """Return message and exit code of the first rank that failed; None if none has.

        With `even_running` also of one that has written a traceback and still runs.
        """
        for rank, process in enumerate(self._processes(), start=1):
            code, path = process.poll(), traceback_file(self._folder, rank)
            has_traceback = path.exists() and path.stat().st_mtime >= self._began_s
            if has_traceback and (code or even_running):
                # The last line that is not indented: the exception's class and message.
                lines = [line for line in path.read_text().splitlines() if line.strip()]
                unindented = (line for line in reversed(lines) if not line.startswith(" "))
                cause = next(unindented, "no reason found")
                return rank_message(rank, cause, path), max(code or 0, EXIT_FAILED)
            if code and code not in STOPPED:
                return f"rank {rank} {describe_exit(code)}", max(code, EXIT_FAILED)
        return None

    def early_exit(self) -> tuple[str, int] | None:
        """Return message and exit code for a rank that exited with code 0 while another one lost it."""
        for rank, process in enumerate(self._processes(), start=1):
            if process.poll() == 0:
                return f"rank {rank} exited with code 0 while the others were at work", EXIT_FAILED
        return None

    def wait(self, seconds: float) -> str:
        """Wait for all of them to end; return a message on the first that does not, empty if all do."""
        until_s = time.monotonic() + seconds
        for rank, process in enumerate(self._processes(), start=1):
            try:
                process.wait(max(until_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                return f"rank {rank} did not end within {seconds:.0f} s of rank 0"
        return ""

    def kill(self) -> None:
        """End them at once with SIGKILL: a process inside a collective does not handle SIGTERM."""
        for process in self._processes():
            process.kill()
        for process in self._processes():
            process.wait()
