"""The memory limit of a process: installed memory, cgroups, ulimits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_eff.core import allocator, host_memory
from lightning_eff.core.host_memory import HostMemoryLimit
from lightning_eff.kernels import devices
from lightning_eff.planner.forecast import DeviceMemory

MIB = 2**20
STATUS = "Name:\tpython\nVmSize:\t 2048 kB\nVmRSS:\t  512 kB\nVmData:\t 1024 kB\n"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/status": STATUS, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_the_installed_memory_counts(tmp_path: Path) -> None:
    group = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "max\n"}
    unlimited = {"proc/self/limits": f"{LIMITS}Max address space  unlimited  unlimited  bytes\n"}
    for number, files in enumerate([group, unlimited, {}]):
        found = host_memory.host_memory_limit(machine(tmp_path / str(number), files))
        assert found == HostMemoryLimit("", host_memory.installed_bytes(), 512 * 1024)
    assert host_memory.host_memory_limit(tmp_path / "nothing").name == ""


def test_the_smallest_limit_of_a_cgroup_and_its_parents_counts(tmp_path: Path) -> None:
    sizes = {"": 900, "/pod": 300, "/pod/box": 400, "/other": 1}
    files = {f"sys/fs/cgroup{path}/memory.max": f"{size * MIB}\n" for path, size in sizes.items()}
    # A container that sees the path of its host has the limit at the top.
    for group, name, size in (("pod/box", "cgroup /pod", 300), ("docker/abc", "cgroup /", 900)):
        files["proc/self/cgroup"] = f"3:freezer:/elsewhere\n0::/{group}\n"
        expected = HostMemoryLimit(name, size * MIB, 512 * 1024)
        assert host_memory.host_memory_limit(machine(tmp_path, files)) == expected


def test_the_ulimit_that_leaves_least_memory_counts(tmp_path: Path) -> None:
    """2 MiB of address space and 1 MiB of data are taken."""
    lines = f"Max data size   {5 * MIB}  unlimited  bytes\nMax address space  {5 * MIB}  unlimited  bytes\n"
    found = host_memory.host_memory_limit(machine(tmp_path, {"proc/self/limits": LIMITS + lines}))
    assert found == HostMemoryLimit("ulimit -v", 5 * MIB, 2 * MIB)


def test_planner_and_allocator_read_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        host_memory, "host_memory_limit", lambda: HostMemoryLimit("ulimit -d", 700 * MIB, 200 * MIB)
    )
    cpu = torch.device("cpu")
    room = DeviceMemory.of(devices.of(cpu))
    assert (room.name, room.memory_bytes, room.free_bytes) == ("CPU (ulimit -d)", 700 * MIB, 500 * MIB)
    assert allocator.total_bytes(cpu) == 700 * MIB
