"""Start the ranks of a run on this machine; if a rank fails, end all ranks and name the failed rank.

The verbs that train or evaluate call `run_ranks`. As with torchrun, one process is the parent of all ranks.
The parent sets torchrun's environment variables, and each rank writes an error file as under torchrun.

Why not torch's own agent (`torch.distributed.launcher`): after a failure, the agent waits 30 s for ranks that
hang in a collective. Why not Lightning's launcher: rank 0 is the parent of the other ranks, and no process
watches rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_eff.core.catalog import read_ledger
from lightning_eff.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SIGUSR1,
    EXIT_TERMINATED,
    PRE_RUN_ERRORS,
    RankError,
    exit_code,
)
from lightning_eff.launch.job import RUN_DIR, Launch, check_devices, check_machines, num_devices, num_ranks

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PARENT = "LIGHTNING_EFF_PARENT"
"""Environment variable with the id of the process that started the ranks.

A rank cannot rely on `os.getppid()`: if its parent has already ended, the rank has another parent.
"""
STOPPED = (EXIT_INTERRUPTED, EXIT_SIGUSR1, EXIT_TERMINATED)
"""Exit codes of ranks that a signal has stopped."""
POLL_S = 0.2


def run_ranks(
    words: Iterable[str],
    folder: Path,
    trainer: Mapping[str, Any],
    *,
    verb: str = "train",
    as_json: bool = False,
) -> dict[str, Any]:
    """Run a verb in one process per device of this machine; NODE_RANK is the machine's index.

    With several machines, the ranks connect to the address in MASTER_ADDR and MASTER_PORT. With `as_json`,
    the ranks' stdout goes to stderr, because the caller prints JSON on stdout.

    Returns:
        The efficiency report in `folder`; empty if the run has no EfficiencyReport.

    Raises:
        RankError: A rank failed; the text names the rank and the cause.
        KeyboardInterrupt, SystemExit: All ranks have stopped after a signal to a rank or to this process.
    """
    check_machines(trainer)
    check_devices(trainer)
    command = [sys.executable, "-m", "lightning_eff", verb, *words]
    num_local, node = num_devices(trainer), os.environ.get("NODE_RANK", "0")
    first = num_local * int(node)
    common = _of_all_ranks(num_local, num_ranks(trainer), node) | {RUN_DIR: str(folder)}
    common[PARENT] = str(os.getpid())
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as errors, _forwarded_signals(ranks) as received:
        files = [Path(errors, str(local)) for local in range(num_local)]
        try:
            for local, file in enumerate(files):
                own = {"RANK": str(first + local), "LOCAL_RANK": str(local), ERROR_FILE: str(file)}
                environment = os.environ | common | own
                # A new session makes the rank a group leader: SIGKILL to its group also ends its children.
                stdout = 2 if as_json else None
                rank = subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True)  # noqa: S603
                ranks.append(rank)
            codes = _wait(ranks)
        finally:
            _kill(ranks)
        if received:  # the signal may have killed a rank before the rank had a handler
            codes = [128 + received[0] if code == -received[0] else code for code in codes]
        failure = first_failure(codes, files, folder, first_rank=first)
    if failure is not None:
        raise failure
    if any(codes):
        # Rank 0 reports the stop itself.
        raise _stopped(codes, is_reported=codes[0] in STOPPED and not first)
    return read_ledger(folder)


def _of_all_ranks(num_local: int, num_ranks: int, node: str) -> dict[str, str]:
    """Return the torchrun environment variables that all ranks of this machine share."""
    from lightning.fabric.plugins.environments.lightning import find_free_network_port

    # Without a limit, each rank would start one thread per core of the machine.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // num_local, 1))
    return {
        "TORCHELASTIC_RUN_ID": "lightning_eff",
        "GROUP_RANK": node,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(find_free_network_port()),
        "OMP_NUM_THREADS": threads,
    }


def _stopped(codes: Sequence[int | None], *, is_reported: bool) -> BaseException:
    """Return the exception that ends the command with the exit code of its ranks."""
    code = next(code for code in STOPPED if code in codes)
    stopped = KeyboardInterrupt() if code == EXIT_INTERRUPTED else SystemExit(code)
    stopped.__dict__["is_reported"] = is_reported
    return stopped


@contextmanager
def _forwarded_signals(ranks: Sequence[subprocess.Popen[bytes]]) -> Generator[list[int]]:
    """Forward the signals that stop a run to the ranks, and yield the list of received signals.

    A second SIGINT raises KeyboardInterrupt.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in received:
            signal.default_int_handler(number, frame)
        received.append(number)
        # Each rank has a separate session, so a terminal's signals reach only this process.
        for rank in ranks:
            rank.send_signal(number)

    with handled(["SIGHUP", "SIGINT", "SIGUSR1", "SIGTERM"], forward):
        yield received


@contextmanager
def handled(names: Sequence[str], handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Handle signals inside the context, except signals that the process ignores (SIGHUP under `nohup`)."""
    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    numbers = [signal.Signals[name] for name in names if is_main and hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait until all ranks have ended or one has failed; return exit codes, with None for a running rank."""
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(code not in (None, 0, *STOPPED) for code in codes):
            break
        time.sleep(POLL_S)
    # Poll again: the rank that failed first may have ended after its poll, but before another rank's poll.
    return [rank.poll() for rank in ranks]


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):  # all processes of the rank's group have ended
            os.killpg(rank.pid, signal.SIGKILL)  # a rank in a collective does not handle SIGTERM
    for rank in ranks:
        rank.wait()


def first_failure(
    codes: Sequence[int | None], files: Sequence[Path], folder: Path, *, first_rank: int = 0
) -> RankError | None:
    """Return the error of the rank that failed first; None if no rank failed.

    Args:
        codes: Exit codes by rank; None for a rank that was still running and had to be killed.
        files: Error files by rank. If a rank failed without an error file, this rank is the cause: the other
            ranks failed because they lost their connection to this rank.
        folder: The run's folder, with the tracebacks.
        first_rank: Rank of the first entry in `codes` and `files`.
    """
    found: list[tuple[float, int, str, int]] = []  # time, rank, text, exit code
    for rank, (code, file) in enumerate(zip(codes, files, strict=True), start=first_rank):
        if text := _message(file):
            log = error_log(folder, rank)
            where = f" (traceback: {log})" if log.exists() else ""
            if "\n  try: " in text:  # if the error has remedies, remove only the class name
                text = text.partition(": ")[2]
            else:
                text = f"rank {rank}: {text.splitlines()[0]}{where}"
            found.append((file.stat().st_mtime, rank, text, max(code or 0, EXIT_FAILED)))
        elif code and code not in STOPPED:
            cause = f"ended with code {code}; its message is above"
            if code < 0:
                cause = f"was killed by {signal.Signals(-code).name}"
                cause += ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
            found.append((0.0, rank, f"rank {rank} {cause}", max(code, EXIT_FAILED)))
    if not found:
        return None
    # The earliest failure; a rank without an error file has time 0, so it comes first.
    _, _, text, exit_code = min(found)
    return RankError(text, exit_code)


def _message(file: Path) -> str:
    """Return the message in an error file; empty if the file is missing or incomplete."""
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())["message"]["message"]
    return ""


def error_log(folder: Path, rank: int) -> Path:
    """Return the path of the file for a rank's traceback.

    Example:
        >>> error_log(Path("run"), 0).name, error_log(Path("run"), 1).name
        ('error.log', 'error_rank1.log')
    """
    return folder / (f"error_rank{rank}.log" if rank else "error.log")


def end_with_parent() -> None:
    """Start a thread that ends this rank once its parent process is gone."""
    parent = int(os.environ.get(PARENT, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        exit_now(f"process {parent}, which started rank {os.environ.get('RANK')}, is gone", EXIT_FAILED)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def exit_now(text: str, code: int) -> None:
    """Print the reason and end this process, even if its other threads are blocked."""
    try:
        sys.stderr.write(f"error: {text}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    finally:  # exit even if the streams are closed
        os._exit(code)


@contextmanager
def reported_to_parent(launch: Launch) -> Generator[None]:
    """Report this rank's failure to its parent process, if any, and end this rank when the parent ends."""
    if launch.by == "torchrun":
        end_with_parent()
    try:
        yield
    except BaseException as error:
        if exit_code(error) not in (EXIT_OK, *STOPPED) and report_error(error):
            # torchrun prints a summary only after the last attempt. With restarts, each rank therefore also
            # reports its error. A wrong setting is the same on all ranks, so only rank 0 reports it.
            is_last = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"
            error.__dict__["is_reported"] = is_last or (launch.rank > 0 and isinstance(error, PRE_RUN_ERRORS))
        raise


def report_error(error: BaseException) -> bool:
    """Write an error to the parent's error file; return whether the parent has requested such a file."""
    file = os.environ.get(ERROR_FILE)
    if file and not Path(file).exists():  # a later error may be a consequence of the first
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    return bool(file)
