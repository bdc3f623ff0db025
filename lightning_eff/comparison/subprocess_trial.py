"""Run one trial in its own process with a time limit; every outcome becomes a result.

rounds.py calls `run`. A trial that hangs is killed with all processes that it started. The result of a failed
trial contains the cause. The end of a process frees its memory, so every trial starts from the same state.
Without a GPU, processes are forked from a server that has already done the common imports, because imports
take most of a short trial's time. With a GPU, each process is spawned, because CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from lightning_eff.comparison.result_table import FAILED, MEASURED, NOT_RUN, TrialResult
from lightning_eff.core.errors import (
    EXIT_CONFIG,
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    EXIT_REJECTED,
    exit_code,
    root_cause_line,
)

REPORT_FILE, LOG_FILE = "report.json", "log.txt"
REASON_LENGTH = 200
TRAINING_FRACTION = 1 / 3
"""Fraction of the time limit in which batches may start, counted from the end of the first batch."""
END_FRACTION = 5 / 6
"""Fraction of the time limit, counted from the start, after which no batch starts."""
PRELOADED = ["lightning_eff.run", "lightning_eff.commands.train"]
"""Modules that the fork server imports in advance."""
TrainTrial = Callable[[Path], int]
"""Function that trains in a folder, writes the report to `REPORT_FILE` there, and returns an exit code."""


def run(train: TrainTrial, *, folder: Path, limit_s: float) -> TrialResult:
    """Call `train(folder)` in a process that is killed after `limit_s` seconds or on Ctrl-C."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    # A report of an interrupted earlier run must not become this trial's result.
    (folder / REPORT_FILE).unlink(missing_ok=True)
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(PRELOADED)  # no effect on a spawned process
    process = context.Process(target=_child, args=(train, folder))
    with _stderr_to(folder / LOG_FILE):  # the server's imports print warnings
        process.start()
    try:
        process.join(limit_s)
        is_late = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # `killpg` misses a process that has not created its session yet
        process.join()
    if is_late:
        return TrialResult(FAILED, f"no end after {limit_s:g} s (--limit-s); it was killed")
    return result_of(process.exitcode, folder, limit_s)


@contextlib.contextmanager
def _stderr_to(file: Path) -> Generator[None]:
    """Redirect file descriptor 2 to a file; processes that are started meanwhile inherit the redirection."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with file.open("wb") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _child(train: TrainTrial, folder: Path) -> None:
    """Run `train` in a new session, so that all its processes can be killed; write its output to a file."""

    def end_with_owner() -> None:
        multiprocessing.parent_process().join()  # pyright: ignore[reportOptionalMemberAccess]
        os.killpg(0, signal.SIGKILL)  # the parent process has ended or was killed

    os.setsid()
    threading.Thread(target=end_with_owner, daemon=True).start()
    with (folder / LOG_FILE).open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    try:
        code = train(folder)
    except BaseException as error:  # noqa: BLE001 - any error becomes the row's reason
        sys.stderr.write(f"error: {root_cause_line(error)}\n")
        code = exit_code(error) or EXIT_FAILED
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # the usual cleanup at exit takes seconds


def result_of(code: int, folder: Path, limit_s: float) -> TrialResult:
    """Return the result of a trial that ended in time; read the report from the trial's folder."""
    if code != EXIT_OK:
        printed = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        reason = (errors or lines or [""])[-1].removeprefix("error: ")[:REASON_LENGTH] or f"exit code {code}"
        if code == EXIT_OUT_OF_MEMORY:
            reason = f"out of memory: {reason}"
        elif code == -signal.SIGKILL:
            reason = "killed by another process, for example by the system when memory runs out"
        elif code < 0:
            reason = f"killed by signal {-code}: {reason}"
        is_rejected = code in (EXIT_REJECTED, EXIT_ENVIRONMENT, EXIT_CONFIG)
        return TrialResult(NOT_RUN if is_rejected else FAILED, reason)
    try:
        report: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return TrialResult(FAILED, "ended without a speed report: no monitors/efficiency_report")
    if report.get("measured", {}).get("num_batches"):
        return TrialResult(MEASURED, report=report)
    steps, training_s = report.get("num_steps", 0), limit_s * TRAINING_FRACTION
    reason = f"too few batches to time: {steps} step{'s' * (steps != 1)}"
    return TrialResult(FAILED, f"{reason}, with {training_s:.0f} s for training, a third of --limit-s")
