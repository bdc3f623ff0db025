"""What a worker of Ray runs: the same `train` as any other rank, with its output and its errors in files.

Ray calls it in a thread and serves the driver in the main one, so signals do not arrive here: the driver
writes them to a file (launch/stop.py). What is printed goes to a file that the driver copies, each line once
and as it is; Ray would send each line twice, with the worker's name in front.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import PRE_RUN_ERRORS, exit_code, root_cause_line
from lightning_eff.launch._ray.processes import context
from lightning_eff.launch.job import RAY, RUN_DIR
from lightning_eff.launch.ranks import ERROR_FILE, STOPPED, error_log, tell_parent
from lightning_eff.launch.stop import STOP_FILE

FOLDER = "ray"
"""Folder in the run's folder for what driver and workers exchange; removed at the end."""


def output_file(folder: Path, rank: int, stream: str) -> Path:
    """Return the file of what a rank prints; `stream` is `stdout` or `stderr`."""
    return folder / FOLDER / f"rank{rank}.{stream}"


def error_file(folder: Path, rank: int) -> Path:
    """Return the file of why a rank failed."""
    return folder / FOLDER / f"rank{rank}.error"


def code_file(folder: Path) -> Path:
    """Return the file with the exit code of rank 0, once it has ended."""
    return folder / FOLDER / "code"


def stop_file(folder: Path) -> Path:
    """Return the file with the signal that the driver has received; empty before."""
    return folder / FOLDER / "stop"


def work(config: dict[str, Any]) -> None:
    """Train in this worker.

    Args:
        config: `train` (the function), its `words`, the run's `folder` and the driver's current folder `cwd`.

    Raises:
        RuntimeError: The run failed. A signal or a setting ends it without an error, so Ray restarts nothing.
    """
    folder, rank = Path(config["folder"]), int(context().get_world_rank())
    _forget_last_attempt(folder, rank, int(context().get_world_size()))
    os.environ |= {
        RAY: "1",
        RUN_DIR: str(folder),
        STOP_FILE: str(stop_file(folder)),
        ERROR_FILE: str(error_file(folder, rank)),
    }
    os.chdir(config["cwd"])
    sys.path.insert(0, config["cwd"])  # for the user's own classes
    with ExitStack() as stack:
        for stream, redirect in {"stdout": redirect_stdout, "stderr": redirect_stderr}.items():
            file = output_file(folder, rank, stream).open("a", buffering=1, encoding="utf-8")
            stack.enter_context(redirect(stack.enter_context(file)))
        # The command sets a handler of the root. Lightning, imported before, found none and has its own.
        for name in ("", "lightning", "lightning.fabric", "lightning.pytorch"):
            logging.getLogger(name).handlers.clear()
            logging.getLogger(name).propagate = True
        code = _run(config["train"], config["words"], folder, rank)
    if not rank:
        code_file(folder).write_text(str(code))


def _forget_last_attempt(folder: Path, rank: int, world_size: int) -> None:
    """Remove the errors of workers that have been started again.

    Raises:
        RuntimeError: This machine does not see the run's folder.
    """
    if not stop_file(folder).is_file():
        text = f"the machine of rank {rank} does not see {folder}: output_root must be shared by all machines"
        raise RuntimeError(text)
    error_file(folder, rank).unlink(missing_ok=True)
    error_log(folder, rank).unlink(missing_ok=True)
    if not rank:
        for file in (folder / FOLDER).glob("rank*.error"):
            if int(file.stem.removeprefix("rank")) >= world_size:
                file.unlink(missing_ok=True)


def _run(train: Callable[[Sequence[str]], None], words: Sequence[str], folder: Path, rank: int) -> int:
    """Return the exit code of a run that ended, or that no restart would help.

    Raises:
        RuntimeError: It failed; an error of another class may not survive that Ray pickles it.
    """
    try:
        train(words)
    except BaseException as error:  # noqa: BLE001 - also Ctrl-C and SystemExit end in an exit code
        code = exit_code(error)
        if code in STOPPED:
            return code
        tell_parent(error)
        file = error_file(folder, rank)
        failed_s = file.stat().st_mtime  # by which the driver finds the rank that was the first
        file.write_text(json.dumps(json.loads(file.read_text()) | {"exit_code": code}))
        os.utime(file, (failed_s, failed_s))
        if isinstance(error, PRE_RUN_ERRORS):
            return code  # all ranks alike: none of them has trained
        raise RuntimeError(root_cause_line(error)) from None
    return 0
