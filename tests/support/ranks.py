"""Run a test module's `main` on two ranks, and compare results."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.processes import ROOT

ALONE = """
import os, sys
sys.path.insert(0, {root!r})
from {module} import main
"""
TWO = """
os.environ |= {environment!r}
rank = os.environ["LOCAL_RANK"] = "1" if (other := os.fork()) == 0 else "0"
if (found := main({folder!r})) is not None:
    import torch
    torch.save(found, {folder!r} + "/rank" + rank + ".pt")
if not other:  # no teardown of imported modules in the fork, which lacks their threads
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""
"""Forks after the imports, which take longer than most tests."""


def run_alone(module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `main(folder)` of a module in its own process."""
    return _run(ALONE.format(root=str(ROOT), module=module) + f"main({str(folder)!r})\n", folder)


def run_two_ranks(module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `main(folder)` of a module in two processes, with the variables of a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
        }
    two = TWO.format(environment=environment, folder=str(folder))
    return _run(ALONE.format(root=str(ROOT), module=module) + two, folder)


def results_of_two_ranks(module: str, folder: Path) -> list[Any]:
    """Return the results of a module's `main(folder)` on two ranks."""
    done = run_two_ranks(module, folder)
    files = [folder / f"rank{rank}.pt" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-4000:]
    return [torch.load(file, weights_only=False) for file in files]


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "ranks.py"
    script.write_text(program)
    command = [sys.executable, "-W", "ignore", str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(is_equal(a, b) for a, b in zip(one, other, strict=True))
    return one == other
