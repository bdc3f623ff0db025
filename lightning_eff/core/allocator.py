"""Memory of a device by its allocator: reserved from the driver, allocated to tensors, cached.

CUDA and XPU are read through `torch.accelerator`, MPS through `torch.mps`. On the CPU, PyTorch allocates with
the C library: glibc keeps freed blocks, counts them (`mallinfo2`) and returns them on `malloc_trim`; other C
libraries have neither call, so there is no cache to empty.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from lightning_eff.core import host_memory


@dataclass(frozen=True)
class AllocatorState:
    """A device's memory at one moment.

    Args:
        reserved_bytes: Taken from the driver or the operating system.
        allocated_bytes: In use by live tensors (on the CPU: by every live block of the process).
        num_alloc_retries: How often the allocator had to flush its cache to serve a request, since the start.
    """

    reserved_bytes: int
    allocated_bytes: int
    num_alloc_retries: int = 0

    @property
    def cached_bytes(self) -> int:
        """Bytes that are reserved but not allocated."""
        return max(0, self.reserved_bytes - self.allocated_bytes)


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h, since 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is a glibc that can count and trim its heap."""
    if os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _MallInfo2
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def has_cache(device: torch.device) -> bool:
    """Return whether the device's allocator caches freed memory that `empty_cache` can return."""
    return _glibc() is not None if device.type == "cpu" else device.type in {"cuda", "xpu", "mps"}


def allocator_state(device: torch.device) -> AllocatorState:
    """Return the allocator's state of a device that `has_cache`.

    Raises:
        ValueError: The device has no cache that can be read.
    """
    if device.type == "mps":
        return AllocatorState(torch.mps.driver_allocated_memory(), torch.mps.current_allocated_memory())
    if device.type in {"cuda", "xpu"}:
        stats = torch.accelerator.memory_stats(device)
        keys = ("reserved_bytes.all.current", "allocated_bytes.all.current", "num_alloc_retries")
        return AllocatorState(*(stats.get(key, 0) for key in keys))
    library = _glibc()
    if device.type != "cpu" or library is None:
        msg = f"the allocator of {device} has no cache that can be read"
        raise ValueError(msg)
    info = library.mallinfo2()
    # hblkhd: blocks mapped one by one (mmap), which lie outside of the arena and are never cached.
    return AllocatorState(info.arena + info.hblkhd, info.uordblks + info.hblkhd)


def held_bytes(device: torch.device) -> int:
    """Return the bytes that other processes cannot use: resident pages on the CPU, else reserved memory."""
    if device.type != "cpu":
        return allocator_state(device).reserved_bytes
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


def uses_expandable_segments() -> bool:
    """Return whether the CUDA allocator is set to expandable segments, which fragment far less."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")
