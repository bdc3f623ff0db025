"""One trial in a process of its own, with a time limit; whatever becomes of it, there is a result.

A run that hangs is killed with all that it has started, one that dies leaves its reason, and nothing of it
stays in memory: the next trial begins where this one began.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning_eff.comparison.rows import FAILED, MEASURED, NOT_RUN, Result
from lightning_eff.errors import (
    EXIT_CONFIG,
    EXIT_ENVIRONMENT,
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    EXIT_REFUSED,
)
from lightning_eff.processes.watch import PARENT

LOG_FILE = "log.txt"
REASON_LENGTH = 200


def run(words: Sequence[str], *, folder: Path, limit_s: float) -> Result:
    """Run a command that prints an efficiency report as JSON on its standard output.

    Args:
        words: The command.
        folder: Made if need be; what the command says goes to a file there.
        limit_s: Seconds after which it is killed.

    Raises:
        KeyboardInterrupt: The user has had enough; the command is killed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            list(words), stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Result(FAILED, f"no end after {limit_s:g} s; it was killed")
        finally:
            _kill_all(process)
    said = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    return _result(process.returncode, printed.decode("utf-8", "replace"), said)


def ended(process: BaseProcess, folder: Path, limit_s: float, *, printed: Path) -> Result:
    """Wait for a Python process that leads a session of its own, and kill what is left of it.

    Args:
        process: Started.
        folder: Where it wrote what it had to say.
        limit_s: Seconds after which it is killed.
        printed: Where it leaves its efficiency report.
    """
    try:
        process.join(limit_s)
        late = process.is_alive()
    finally:
        _kill_group(process.pid)
        if process.is_alive():
            process.kill()  # it had not yet made its session
        process.join()
    if late:
        return Result(FAILED, f"no end after {limit_s:g} s; it was killed")
    log = folder / LOG_FILE
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    report = printed.read_text(encoding="utf-8") if printed.is_file() else ""
    return _result(process.exitcode or 0, report, said)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group; ranks and workers may be left where it died itself."""
    _kill_group(process.pid)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _kill_group(pid: int | None) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(pid, signal.SIGKILL)


def _result(code: int, printed: str, said: str) -> Result:
    if code == EXIT_OK:
        try:
            report: Any = json.loads(printed)
        except json.JSONDecodeError:
            report = None
        if isinstance(report, dict) and report.get("measured", {}).get("num_batches"):
            return Result(MEASURED, report=report)
        return Result(
            FAILED, "it ended without a report of its speed: too few steps, or no efficiency_report"
        )
    reason = _reason(said) or f"exit code {code}"
    if code == EXIT_OUT_OF_MEMORY:
        return Result(FAILED, f"out of memory: {reason}")
    if code == -signal.SIGKILL:
        return Result(FAILED, "killed from outside, as a system does that runs out of memory")
    if code < 0:
        return Result(FAILED, f"killed by signal {-code}: {reason}")
    refused = code in (EXIT_REFUSED, EXIT_ENVIRONMENT, EXIT_CONFIG)
    return Result(NOT_RUN if refused else FAILED, reason)


def _reason(said: str) -> str:
    """Return the last line that says what went wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    line = (errors or lines or [""])[-1]
    return line.removeprefix("error: ")[:REASON_LENGTH]
