"""One trial in a process of its own, with a time limit; whatever becomes of it, there is a result.

A run that hangs is killed with all that it has started, one that dies leaves its reason, and nothing of it
stays in memory: the next trial begins where this one began. Where there is no GPU the processes are forked
from one that has imported what all of them need, which is most of a short trial's time. With a GPU each one
imports for itself: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning_eff.comparison.result_table import FAILED, MEASURED, NOT_RUN, TrialResult
from lightning_eff.core.errors import (
    EXIT_CONFIG,
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    EXIT_REFUSED,
    exit_code,
    root_cause_line,
)
from lightning_eff.launch.watch import PARENT

REPORT_FILE, LOG_FILE = "report.json", "log.txt"
REASON_LENGTH = 200
POLL_S = 1.0
PRELOADED = ["lightning_eff.run", "lightning_eff.commands.train"]
"""What the process has imported that others are forked from."""


def run(work: Callable[[Path], int], *, folder: Path, limit_s: float) -> TrialResult:
    """Do some work in a process of its own, that leaves an efficiency report as JSON in `REPORT_FILE`.

    Args:
        work: Called with `folder`, returns an exit code; can be pickled.
        folder: Made if need be; what is said on the way goes to a file there.
        limit_s: Seconds after which it is killed.

    Raises:
        KeyboardInterrupt: The user has had enough; the work is killed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (REPORT_FILE, LOG_FILE):
        (folder / name).write_bytes(b"")
    process: Any = _context().Process(target=_child, args=(work, folder, os.getpid()))
    with _stderr_to(folder / LOG_FILE):
        process.start()
    late = _is_late(process, limit_s)
    if late:
        return TrialResult(FAILED, f"no end after {limit_s:g} s; it was killed")
    said = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    report = (folder / REPORT_FILE).read_text(encoding="utf-8", errors="replace")
    return result_of(process.exitcode or 0, report, said)


@functools.cache
def _context() -> Any:
    """Return how processes are started here."""
    import torch

    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _child(work: Callable[[Path], int], folder: Path, owner: int) -> None:
    """Lead a session of its own, so that all of it can be killed, and say everything to a file."""
    os.setsid()
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    os.environ[PARENT] = str(os.getppid())
    log = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        code = work(folder)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the row says it
        sys.stderr.write(f"error: {root_cause_line(error).removeprefix('error: ')}\n")
        code = exit_code(error) or EXIT_FAILED
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # what others would do at the end of a process takes seconds


def _end_with(owner: int) -> None:
    """End this process and all that it has started when the one that compares is gone, killed perhaps."""
    while True:
        time.sleep(POLL_S)
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            os.killpg(0, signal.SIGKILL)
        except PermissionError:  # it is there, and somebody else's
            pass


@contextlib.contextmanager
def _stderr_to(path: Path) -> Generator[None]:
    """Let what starts inside speak to a file: libraries that are imported have much to say."""
    sys.stderr.flush()
    before = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(log)


def _is_late(process: BaseProcess, limit_s: float) -> bool:
    """Wait for a process, kill what is left of it, and say whether it was still at work."""
    try:
        process.join(limit_s)
        return process.is_alive()
    finally:
        _kill_group(process.pid)
        if process.is_alive():
            process.kill()  # it had not yet made its session
        process.join()


def _kill_group(pid: int | None) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(pid, signal.SIGKILL)


def _good(printed: str) -> TrialResult:
    """Read the report of a trial that ended well."""
    try:
        report: Any = json.loads(printed)
    except json.JSONDecodeError:
        report = None
    if not isinstance(report, dict):
        return TrialResult(FAILED, "it ended without a report of its speed: no monitors/efficiency_report")
    if report.get("measured", {}).get("num_batches"):
        return TrialResult(MEASURED, report=report)
    return TrialResult(FAILED, f"too slow to be timed: {report.get('num_steps', 0)} steps in its time")


def result_of(code: int, printed: str, said: str) -> TrialResult:
    if code == EXIT_OK:
        return _good(printed)
    reason = _reason(said) or f"exit code {code}"
    if code == EXIT_OUT_OF_MEMORY:
        return TrialResult(FAILED, f"out of memory: {reason}")
    if code == -signal.SIGKILL:
        return TrialResult(FAILED, "killed from outside, as a system does that runs out of memory")
    if code < 0:
        return TrialResult(FAILED, f"killed by signal {-code}: {reason}")
    refused = code in (EXIT_REFUSED, EXIT_ENVIRONMENT, EXIT_CONFIG)
    return TrialResult(NOT_RUN if refused else FAILED, reason)


def _reason(said: str) -> str:
    """Return the last line that says what went wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    line = (errors or lines or [""])[-1]
    return line.removeprefix("error: ")[:REASON_LENGTH]
