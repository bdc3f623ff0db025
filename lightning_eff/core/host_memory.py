"""The host memory that this process may use: installed memory, or less where a limit applies.

A container has the limit of its cgroup or of one above it (v2: `memory.max`, v1: `memory.limit_in_bytes`); a
process that exceeds it is killed. `ulimit -v` limits the address space and `ulimit -d` the data segment; an
allocation that exceeds them fails. All limits are read from files, on Linux; elsewhere only installed memory
is known.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
INSTALLED = ""
CGROUPS = (("", "sys/fs/cgroup", "memory.max"), ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes"))
"""Of v2 and v1: controller in /proc/self/cgroup, mount point of its groups, file of the limit."""
ULIMITS = {"Max address space": ("ulimit -v", "VmSize"), "Max data size": ("ulimit -d", "VmData")}
"""Lines of /proc/self/limits: the command that sets the limit, and the usage in /proc/self/status."""


@dataclass(frozen=True)
class HostMemoryLimit:
    """One limit of this process's memory.

    Args:
        name: What sets it; empty for installed memory.
        num_bytes: The limit.
        taken_bytes: What this process uses of it now.
    """

    name: str
    num_bytes: int
    taken_bytes: int


def host_memory_limit(root: Path = ROOT) -> HostMemoryLimit:
    """Return the limit with the least free memory; `root` has `proc` and `sys`.

    Example:
        >>> host_memory_limit().num_bytes <= installed_bytes()
        True
    """
    fields = re.findall(r"^(Vm\w+):\s+(\d+) kB", _read(root / "proc/self/status"), re.MULTILINE)
    used = {name: int(size) * 1024 for name, size in fields}
    resident = used.get("VmRSS", 0)
    limits = [HostMemoryLimit(INSTALLED, installed_bytes(), resident)]
    cgroups = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    own = {name: path.strip("/") for _, names, path in cgroups for name in names.split(",")}
    for controller, mount_point, file in CGROUPS:
        top = root / mount_point
        group = top / own.get(controller, "")
        # A container may be shown its group's path on the host, which it does not have: then the top counts.
        for folder in (group, *group.parents):
            limit = _read(folder / file).strip() if folder.is_relative_to(top) else ""
            if limit.isdecimal():
                name = f"cgroup /{folder.relative_to(top)}".removesuffix(".")
                limits.append(HostMemoryLimit(name, int(limit), resident))
    ulimits = _read(root / "proc/self/limits")
    for line, (name, counted) in ULIMITS.items():
        # The soft limit is the first number of the line; "unlimited" is none.
        found = re.search(rf"^{line}\s+(\d+)\s", ulimits, re.MULTILINE)
        if found:
            limits.append(HostMemoryLimit(name, int(found[1]), used.get(counted, 0)))
    return min(limits, key=lambda limit: limit.num_bytes - limit.taken_bytes)


def installed_bytes() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
