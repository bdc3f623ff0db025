"""End what a test has started, and run programs in processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that none escapes `children`."""
    set_child_subreaper = 36
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


SHARED = ("resource_tracker", "forkserver", "compile_worker")
"""Processes that multiprocessing and torch start once and keep for later tests."""


def children() -> set[int]:
    """Return the processes that this one started, or that came to it."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(word) for path in lists for word in path.read_text().split()}


def command_of(process: int) -> str:
    """Return what a process was started with; nothing of one that has ended, and of one that is shared."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
    return "" if any(name in command for name in SHARED) else command


def end_children(before: set[int]) -> list[str]:
    """Return the new processes that do not end by themselves, and end them."""
    left: dict[int, str] = {}
    for attempt in range(500):
        left = {process: command for process in children() - before if (command := command_of(process))}
        if not left:
            return []
        if attempt == 0:
            gc.collect()  # workers end with their loader
        time.sleep(0.02)
    found = list(left.values())
    while left:  # what they had started comes to this process
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        left = {process: command for process in children() - before if (command := command_of(process))}
    return found


def in_interpreter(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where Triton's interpreter runs the kernels: it is chosen when they are imported."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words], cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
