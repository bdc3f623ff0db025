"""The host memory that this process may use: installed memory, or less if a limit applies.

`plan`, `doctor` and OOM messages use this limit. A container's cgroup and all parent cgroups may have limits;
a process that exceeds such a limit is killed. `ulimit -v` limits the address space and `ulimit -d` the data
segment; allocations beyond these limits fail. Limits are read only on Linux, with cgroups version 2. On other
systems the installed memory counts as the limit.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class HostMemoryLimit:
    """A memory limit of this process; the name is empty if the installed memory is the limit."""

    name: str
    num_bytes: int
    taken_bytes: int


def host_memory_limit(root: Path = ROOT) -> HostMemoryLimit:
    """Return the limit that leaves the least free memory; the folder `root` contains `proc` and `sys`.

    Example:
        >>> host_memory_limit().num_bytes <= installed_bytes()
        True
    """
    fields = re.findall(r"^(Vm\w+):\s+(\d+) kB", _read(root / "proc/self/status"), re.MULTILINE)
    used = {name: int(size) * 1024 for name, size in fields}
    resident = used.get("VmRSS", 0)
    limits = [HostMemoryLimit("", installed_bytes(), resident)]
    own = re.search(r"^0::/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    top = root / "sys/fs/cgroup"
    group = top / (own[1] if own is not None else "")
    # In a container, /proc may show a path on the host, which does not exist here; then only `top` is read.
    for folder in (group, *group.parents):
        limit = _read(folder / "memory.max").strip() if folder.is_relative_to(top) else ""
        if limit.isdecimal():
            name = f"cgroup /{folder.relative_to(top)}".removesuffix(".")
            limits.append(HostMemoryLimit(name, int(limit), resident))
    ulimits = _read(root / "proc/self/limits")
    for line, name, counted in (
        ("Max address space", "ulimit -v", "VmSize"),
        ("Max data size", "ulimit -d", "VmData"),
    ):
        # The soft limit is the first number of the line; "unlimited" does not match.
        found = re.search(rf"^{line}\s+(\d+)\s", ulimits, re.MULTILINE)
        if found:
            limits.append(HostMemoryLimit(name, int(found[1]), used.get(counted, 0)))
    # The limits count different kinds of memory as taken, so compare the bytes that they leave free.
    return min(limits, key=lambda limit: limit.num_bytes - limit.taken_bytes)


def installed_bytes() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
