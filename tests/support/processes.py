"""End the processes that a test has started, run programs in other processes, and kill a save at any step."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, so that `children` finds all of them."""
    set_child_subreaper = 36
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


SHARED = ("resource_tracker", "forkserver", "compile_worker")
"""Processes that multiprocessing and torch start once and keep for later tests."""


def children() -> set[int]:
    """Return the processes that this process has started or adopted."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found |= set(map(int, path.read_text().split()))
    return found


def command_of(process: int) -> str:
    """Return the command line of a process; empty if it has ended, or is one of `SHARED`."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
    return "" if any(name in command for name in SHARED) else command


def end_children(before: set[int]) -> list[str]:
    """Kill the new processes that do not end within 10 s; return their command lines."""
    left: dict[int, str] = {}
    for attempt in range(500):
        left = {process: command for process in children() - before if (command := command_of(process))}
        if not left:
            return []
        if attempt == 0:
            gc.collect()  # workers end with their loader
        time.sleep(0.02)
    found = list(left.values())
    while left:  # this process adopts the children of those that it kills
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        left = {process: command for process in children() - before if (command := command_of(process))}
    return found


def processes_with(mark: str, name: str = "") -> dict[int, str]:
    """Return the command lines, with `name` in them, of processes with `mark` in their environment."""
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_text().replace("\0", " ")
            # A process that has ended, but was not waited for, has no command line.
            if words and name in words and mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = words
    return found


STEPS = ("open", "write", "fchmod", "fsync", "close", "replace", "umask", "mkdir", "unlink", "rmdir")
"""The functions of `os` that a save calls, in addition to `fcntl.flock`."""


def before_each_step(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` before each system call of a save."""

    def preceded(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*words: Any, **keywords: Any) -> Any:
            act()
            return call(*words, **keywords)

        return step

    for owner, name in [*((os, name) for name in STEPS), (fcntl, "flock")]:
        patch.setattr(owner, name, preceded(getattr(owner, name)))


def killed_at(number: int, do: Callable[[], object]) -> int:
    """Run `do` in a fork that is killed before its n-th system call; return its exit code, or -9."""
    process = os.fork()
    if process == 0:
        code, count = 1, itertools.count(1)
        try:
            before_each_step(
                pytest.MonkeyPatch(), lambda: next(count) == number and os.kill(os.getpid(), signal.SIGKILL)
            )
            do()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code


def in_interpreter(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process with Triton's interpreter, which must be chosen before the imports."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words], cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
