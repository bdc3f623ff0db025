"""Start two ranks, and compare what they have saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.processes import ROOT


def run_two_ranks(module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `main(folder)` of a module in a process of its own; the Trainer in it starts the other rank."""
    script = folder / "ranks.py"
    path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(f"{path}from {module} import main\nmain({str(folder)!r})\n")
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
