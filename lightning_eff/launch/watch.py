"""The processes of a run end together, and the last line on the screen says which was first, and why.

Lightning looks after its processes every five seconds, from the first one alone, and says nothing: a first
process that dies leaves the others behind, and one that fails waits for them. Here each process looks after
the one that started it, the first one after those that it started. The rank that fails writes its traceback
into the run's folder; who ends because of it reads the cause there.

Costs: a thread that looks five times a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_eff.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED

PARENT = "LIGHTNING_EFF_PARENT"
"""Variable with the process that the processes it starts shall not outlive."""
POLL_S = 0.2
GRACE_S = 1.0
"""How long the first rank may take to say itself what has ended another one: a refusal with its remedies."""
CLEANUP_TIMEOUT_S = 10.0
"""How long a rank that has failed may take for its callbacks: one of them may wait for the other ranks."""
EXIT_TIMEOUT_S = 60.0
"""How long the first rank waits at the end for the others, which have nothing left to do."""

STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)

Processes = Callable[[], list["subprocess.Popen[bytes]"]]


def end_with_parent(*, torchrun: bool) -> None:
    """Let this process end when the one that started it is gone, however that ended.

    Args:
        torchrun: Whether torchrun started it; else it is who says so in `PARENT`.
    """
    parent = os.getppid() if torchrun else int(os.environ.get(PARENT, "0"))
    if not parent or (parent != os.getppid() and _is_alive(parent)):
        return
    name = "torchrun" if torchrun else "rank 0" if "LOCAL_RANK" in os.environ else "the sweep"

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        exit_now(f"{name} (process {parent}) is gone, killed perhaps; rank {rank} ends too", EXIT_FAILED)

    threading.Thread(target=look, name="end-with-parent", daemon=True).start()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def exit_now(text: str, code: int) -> None:
    """Say why and end this process, whatever its other threads wait for."""
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def traceback_file(folder: Path, rank: int) -> Path:
    """Return where a rank's traceback goes.

    Example:
        >>> note_file(Path("run"), 0).name, note_file(Path("run"), 1).name
        ('error.log', 'error_rank1.log')
    """
    return folder / ("error.log" if rank == 0 else f"error_rank{rank}.log")


def write_traceback(folder: Path, rank: int, error: BaseException) -> Path | None:
    """Write a rank's traceback for the others and for whoever reads it; None where that cannot be written."""
    path = traceback_file(folder, rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return None
    return path


def root_cause(path: Path) -> str:
    """Return what a traceback says at its end.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> print(cause(write_note(folder, 1, RuntimeError("no more"))))
        RuntimeError: no more
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not line.startswith(" ")), "no reason given")


def rank_message(rank: int, cause: str, path: Path | None) -> str:
    """Return what a failed rank says on the screen, its last line."""
    where = f" (traceback: {path})" if path is not None else ""
    return f"rank {rank}: {cause}{where}"


def describe_exit(code: int) -> str:
    """Say how a process ended.

    Example:
        >>> killed_by(-9)
        'was killed by SIGKILL: from outside, or by the kernel because memory ran out'
        >>> killed_by(3)
        'ended with code 3; its message stands above'
    """
    if code >= 0:
        return f"ended with code {code}; its message stands above"
    why = ": from outside, or by the kernel because memory ran out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{why}"


class RankProcesses:
    """The other ranks of this machine, where this process is the one that started them.

    Args:
        processes: Returns Lightning's list of them, in the order of their ranks from 1.
        folder: The run's folder, where their tracebacks are.
    """

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._listed = processes
        self._taken: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch-ranks", daemon=True)
        self._began_s = time.time()

    def _processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """Take them off Lightning's list, whose observer would else kill this process before it can speak."""
        listed = self._listed()
        while listed:
            self._taken.append(listed.pop(0))
        return self._taken

    def watch(self) -> None:
        """Begin to end this process when one of them fails."""
        self._thread.start()

    def unwatch(self) -> None:
        """Leave that to whoever calls the other methods from now on."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(POLL_S):
            failed = self.failed()
            if failed is not None and not self._over.wait(GRACE_S):
                self.kill()
                exit_now(*failed)

    def failed(self, *, even_running: bool = False) -> tuple[str, int] | None:
        """Return what the first of them that failed died of, and its exit code; None when none has.

        Args:
            even_running: Ask those too that have written a traceback and are not gone yet.
        """
        for rank, process in enumerate(self._processes(), start=1):
            code, path = process.poll(), traceback_file(self._folder, rank)
            noted = path.exists() and path.stat().st_mtime >= self._began_s
            if noted and (code or even_running):
                return rank_message(rank, root_cause(path), path), max(code or 0, EXIT_FAILED)
            if code and code not in STOPPED:
                return f"rank {rank} {describe_exit(code)}", max(code, EXIT_FAILED)
        return None

    def left(self) -> tuple[str, int] | None:
        """Return which of them has left as if all were over, for a rank that lost its connection to it."""
        for rank, process in enumerate(self._processes(), start=1):
            if process.poll() == 0:
                return f"rank {rank} left with code 0 while the others were at work", EXIT_FAILED
        return None

    def wait(self, seconds: float) -> str:
        """Wait for all of them to end; return which did not, empty when all did."""
        until_s = time.monotonic() + seconds
        for rank, process in enumerate(self._processes(), start=1):
            try:
                process.wait(max(until_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                return f"rank {rank} did not end within {seconds:.0f} s of rank 0"
        return ""

    def kill(self) -> None:
        """End them at once: a process that waits for others hears no milder signal."""
        for process in self._processes():
            process.kill()
        for process in self._processes():
            process.wait()
