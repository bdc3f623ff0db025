"""Run one trial in a process of its own, with a time limit, and return a result whatever happens to it.

A trial that hangs is killed with everything it started, one that dies leaves its reason, and its memory is
freed: every trial starts from the same state. Without a GPU the processes are forked from a server that has
imported what all of them need, which is most of a short trial's time. With a GPU each one is spawned and
imports for itself, because CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
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
"""Imports of the server that processes are forked from."""


def run(work: Callable[[Path], int], *, folder: Path, limit_s: float) -> TrialResult:
    """Run `work` in a process of its own; it leaves an efficiency report as JSON in `REPORT_FILE`.

    Args:
        work: Called with `folder`, returns an exit code; must be picklable.
        folder: Created if needed; what the process prints goes to a file there.
        limit_s: Seconds after which the process is killed.

    Raises:
        KeyboardInterrupt: The user has stopped the comparison; the process is killed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (REPORT_FILE, LOG_FILE):
        (folder / name).write_bytes(b"")
    import torch

    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else method)
    context.set_forkserver_preload(PRELOADED)  # no effect on a spawned process
    process = context.Process(target=_child, args=(work, folder, os.getpid()))
    # Into the log as well: the imports of the server that the process is forked from print warnings.
    sys.stderr.flush()
    stderr, log = os.dup(2), os.open(folder / LOG_FILE, os.O_WRONLY | os.O_APPEND)
    try:
        os.dup2(log, 2)
        process.start()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(log)
    try:
        process.join(limit_s)
        is_late = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the whole session is gone
            os.killpg(process.pid, signal.SIGKILL)
        if process.is_alive():
            process.kill()  # it had not created its session yet
        process.join()
    if is_late:
        return TrialResult(FAILED, f"no end after {limit_s:g} s; it was killed")
    printed = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    report = (folder / REPORT_FILE).read_text(encoding="utf-8", errors="replace")
    return result_of(process.exitcode or 0, report, printed)


def _child(work: Callable[[Path], int], folder: Path, owner: int) -> None:
    """Run `work` with all output in a file, in a session of its own, so that all of it can be killed."""

    def end_with_owner() -> None:
        """Kill this session when the comparing process is gone, for example because it was killed itself."""
        while True:
            time.sleep(POLL_S)
            try:
                os.kill(owner, 0)  # sends nothing: checks that the process exists
            except ProcessLookupError:
                os.killpg(0, signal.SIGKILL)
            except PermissionError:  # it exists, and belongs to another user
                pass

    os.setsid()
    threading.Thread(target=end_with_owner, daemon=True).start()
    os.environ[PARENT] = str(os.getppid())
    log = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        code = work(folder)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it becomes the row's reason
        sys.stderr.write(f"error: {root_cause_line(error)}\n")
        code = exit_code(error) or EXIT_FAILED
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # the usual cleanup at exit takes seconds


def result_of(code: int, report: str, printed: str) -> TrialResult:
    """Return the result of a process that ended.

    Args:
        code: Its exit code.
        report: Content of `REPORT_FILE`.
        printed: Content of `LOG_FILE`; its last error is the reason.
    """
    if code != EXIT_OK:
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        reason = (errors or lines or [""])[-1].removeprefix("error: ")[:REASON_LENGTH] or f"exit code {code}"
        if code == EXIT_OUT_OF_MEMORY:
            reason = f"out of memory: {reason}"
        elif code == -signal.SIGKILL:
            reason = "killed from outside, as by a system that runs out of memory"
        elif code < 0:
            reason = f"killed by signal {-code}: {reason}"
        is_refused = code in (EXIT_REFUSED, EXIT_ENVIRONMENT, EXIT_CONFIG)
        return TrialResult(NOT_RUN if is_refused else FAILED, reason)
    try:
        found: Any = json.loads(report)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        return TrialResult(FAILED, "ended without a report of its speed: no monitors/efficiency_report")
    content: dict[str, Any] = found
    if content.get("measured", {}).get("num_batches"):
        return TrialResult(MEASURED, report=content)
    steps = content.get("num_steps", 0)
    return TrialResult(FAILED, f"too slow to be timed: {steps} step{'s' * (steps != 1)} within its time")
