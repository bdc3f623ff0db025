"""The memory that this process may use of its host: what is installed, or less where a limit says so.

A container has the limit of its cgroup or of one above it (v2: `memory.max`, v1: `memory.limit_in_bytes`); a
process that exceeds it is killed. `ulimit -v` limits the address space and `ulimit -d` the data segment; an
allocation that exceeds them fails. All of it is read from files, on Linux; elsewhere installed memory is all
that is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
INSTALLED = ""
CGROUPS = (("", "sys/fs/cgroup", "memory.max"), ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes"))
"""Of v2 and v1: controller as /proc/self/cgroup names it, where its groups are mounted, the limit's file."""
ULIMITS = {"Max address space": ("ulimit -v", "VmSize"), "Max data size": ("ulimit -d", "VmData")}
"""Lines of /proc/self/limits: how the limit is set, and what of /proc/self/status counts against it."""


@dataclass(frozen=True)
class HostMemoryLimit:
    """One limit of this process's memory.

    Args:
        name: What sets it; empty for the memory that is installed.
        num_bytes: The limit.
        taken_bytes: What this process takes of it now.
    """

    name: str
    num_bytes: int
    taken_bytes: int

    @property
    def free_bytes(self) -> int:
        """What this process may still allocate."""
        return self.num_bytes - self.taken_bytes


def host_memory_limit(root: Path = ROOT) -> HostMemoryLimit:
    """Return the limit that leaves this process least.

    Args:
        root: Folder that has `proc` and `sys`.

    Example:
        >>> memory().num_bytes <= installed_bytes()
        True
    """
    taken = process_memory(root)
    resident = taken.get("VmRSS", 0)
    limits = [HostMemoryLimit(INSTALLED, installed_bytes(), resident)]
    limits += [HostMemoryLimit(f"cgroup {path}", size, resident) for path, size in _of_cgroups(root)]
    limits += [HostMemoryLimit(name, size, taken.get(counted, 0)) for name, counted, size in _of_ulimits(root)]
    return min(limits, key=lambda each: each.free_bytes)


def installed_bytes() -> int:
    """Return the memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def process_memory(root: Path) -> dict[str, int]:
    """Return what this process takes, by the names of /proc/self/status."""
    found = re.findall(r"^(Vm\w+):\s+(\d+) kB", _text(root / "proc/self/status"), re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


def _of_cgroups(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the limits of this process's groups and of all above them."""
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    own = {name: path.strip("/") for _, names, path in lines for name in names.split(",")}
    for controller, mounted, file in CGROUPS:
        top = root / mounted
        # A container may see its group by the host's path, which it does not have: then the top is its own.
        for folder in (top / own.get(controller, ""), *(top / own.get(controller, "")).parents):
            limit = _text(folder / file).strip() if folder.is_relative_to(top) else ""
            if limit.isdecimal():
                yield f"/{folder.relative_to(top)}".removesuffix("."), int(limit)


def _of_ulimits(root: Path) -> Iterator[tuple[str, str, int]]:
    text = _text(root / "proc/self/limits")
    for line, (name, counted) in ULIMITS.items():
        found = re.search(rf"^{line}\s+(\d+)\s", text, re.MULTILINE)  # the soft limit is the first
        if found:
            yield name, counted, int(found[1])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
