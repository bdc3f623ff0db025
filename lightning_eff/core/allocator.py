"""Memory statistics of a device's allocator: held bytes, cached bytes and the peak.

The statistics of CUDA come from `torch.accelerator`, and the statistics of MPS from `torch.mps`. On the CPU,
PyTorch allocates with the C library. glibc keeps freed blocks until `malloc_trim` releases them. Other C
libraries have no such call. With such a library, the CPU counts as a device without a cache.

A snapshot of CUDA's allocator lists every block. If the history was recorded, the snapshot also contains the
stack trace of each allocation, and all earlier frees.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import torch

from lightning_eff.core import host_memory

HISTORY = 100_000
"""Number of allocator events to record. The records need about 50 MB of host memory."""


@lru_cache(maxsize=1)
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc with `malloc_trim`, else None."""
    if os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return None
    # ctypes would pass an int as a C int, but the parameter is a size_t.
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def has_cache(device: torch.device) -> bool:
    """Return whether the device's allocator caches freed memory that `empty_cache` can release."""
    return _glibc() is not None if device.type == "cpu" else device.type in {"cuda", "mps"}


def held_bytes(device: torch.device) -> int:
    """Return the bytes that other processes cannot use: resident pages on a CPU, reserved memory on a GPU."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type == "cuda":
        return torch.accelerator.memory_reserved(device)
    statm = Path("/proc/self/statm")
    # The second number in /proc/self/statm counts resident pages.
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def empty_cache(device: torch.device) -> None:
    """Release a device's cached memory to the driver or operating system; the device must have a cache."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type == "cuda":
        torch.accelerator.empty_cache()
    elif (library := _glibc()) is not None:
        library.malloc_trim(0)  # 0: keep no spare memory at the top of the heap


def total_bytes(device: torch.device) -> int:
    """Return the memory of a device in bytes; on a CPU, the memory that this process may use."""
    # With MPS, GPU and CPU share memory. Metal sets no fixed limit, but recommends a maximum.
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type == "cuda":
        return torch.accelerator.get_memory_info(device)[1]
    return host_memory.host_memory_limit().num_bytes


def reset_peak(device: torch.device) -> None:
    """Reset the peak statistic, if the device's allocator records a peak."""
    if device.type == "cuda":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest `allocated_bytes` since `reset_peak`; None on a device that records no peak."""
    return torch.accelerator.max_memory_allocated(device) if device.type == "cuda" else None


def record_history(device: torch.device, *, is_on: bool) -> None:
    """Start or stop recording the stack traces of the last `HISTORY` CUDA allocations."""
    if device.type == "cuda":
        record = torch.cuda.memory._record_memory_history  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        record("all" if is_on else None, max_entries=HISTORY)


def write_snapshot(device: torch.device, path: Path) -> bool:
    """Write a snapshot of CUDA's allocator for PyTorch's memory_viz; return False on other devices."""
    if device.type != "cuda":
        return False
    torch.cuda.memory._dump_snapshot(str(path))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return True
