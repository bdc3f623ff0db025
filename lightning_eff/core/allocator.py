"""Memory of a device by its allocator: what it holds, what it caches, its peak.

CUDA and XPU are read through `torch.accelerator`, MPS through `torch.mps`. On the CPU, PyTorch allocates with
the C library: glibc keeps freed blocks and returns them on `malloc_trim`; other C libraries have no such
call, so there is no cache to empty.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import torch

from lightning_eff.core import host_memory


@lru_cache(maxsize=1)
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is a glibc that can trim its heap."""
    if os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return None
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def has_cache(device: torch.device) -> bool:
    """Return whether the device's allocator caches freed memory that `empty_cache` can return."""
    return _glibc() is not None if device.type == "cpu" else device.type in {"cuda", "xpu", "mps"}


def held_bytes(device: torch.device) -> int:
    """Return the bytes that other processes cannot use: resident pages on the CPU, else reserved memory."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type in {"cuda", "xpu"}:
        return torch.accelerator.memory_reserved(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def empty_cache(device: torch.device) -> None:
    """Return cached memory of a device that `has_cache` to its driver or operating system."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type in {"cuda", "xpu"}:
        torch.accelerator.empty_cache()
    elif (library := _glibc()) is not None:
        library.malloc_trim(0)


def total_bytes(device: torch.device) -> int:
    """Return the memory of a device in bytes; on a CPU what this process may use of it."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type in {"cuda", "xpu"}:
        return torch.accelerator.get_memory_info(device)[1]
    return host_memory.host_memory_limit().num_bytes


def reset_peak(device: torch.device) -> None:
    """Reset the peak of a device whose allocator records one."""
    if device.type in {"cuda", "xpu"}:
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest `allocated_bytes` since `reset_peak`; None on a device that records no peak."""
    return torch.accelerator.max_memory_allocated(device) if device.type in {"cuda", "xpu"} else None
