"""Describe devices for the cost model, as data: peaks of dense products as vendors state them, and sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

KIB = 2**10


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or this machine's CPU.

    Args:
        name: The vendor's name.
        capability: Compute capability of a GPU, times ten: 90 for Hopper; 0 for a CPU.
        num_sms: Streaming multiprocessors, or cores.
        peak_tflops: 1e12 operations per second, by dtype.
        memory_gbs: Memory bandwidth, 1e9 bytes per second.
        l2_gbs: The same of the last-level cache.
        l2_bytes: Size of that cache.
        shared_bytes: Shared memory that one block may have; of a CPU a core's own cache.
        memory_bytes: Memory, as the driver reports it to a process.
    """

    name: str
    capability: int
    num_sms: int
    peak_tflops: Mapping[str, float] = field(default_factory=dict[str, float])
    memory_gbs: float
    l2_gbs: float
    l2_bytes: int
    shared_bytes: int
    memory_bytes: int

    def peak(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Return operations per second in a dtype; float32's where the device has no units for it."""
        name = "tf32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        return self.peak_tflops.get(name, self.peak_tflops["float32"]) * 1e12


_HOPPER = {"bfloat16": 989.0, "float16": 989.0, "tf32": 495.0, "float32": 67.0, "float8": 1979.0}
DEVICES: Mapping[str, Device] = {
    "h100": Device(
        name="H100", capability=90, num_sms=132, peak_tflops=_HOPPER,
        memory_gbs=3350, l2_gbs=10000, l2_bytes=50 * KIB**2, shared_bytes=227 * KIB,
        memory_bytes=int(79.1 * KIB**3),
    ),
    "h200": Device(
        name="H200", capability=90, num_sms=132, peak_tflops=_HOPPER,
        memory_gbs=4800, l2_gbs=10000, l2_bytes=50 * KIB**2, shared_bytes=227 * KIB,
        memory_bytes=int(139.8 * KIB**3),
    ),
    "a100": Device(
        name="A100", capability=80, num_sms=108,
        peak_tflops={"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5},
        memory_gbs=2039, l2_gbs=6500, l2_bytes=40 * KIB**2, shared_bytes=163 * KIB,
        memory_bytes=int(79.15 * KIB**3),
    ),
    "rtx4090": Device(
        name="RTX 4090", capability=89, num_sms=128,
        peak_tflops={"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6, "float8": 330.3},
        memory_gbs=1008, l2_gbs=5000, l2_bytes=72 * KIB**2, shared_bytes=99 * KIB,
        memory_bytes=int(23.5 * KIB**3),
    ),
    "b200": Device(
        name="B200", capability=100, num_sms=148,
        peak_tflops={"bfloat16": 2250, "float16": 2250, "tf32": 1125, "float32": 75, "float8": 4500},
        memory_gbs=8000, l2_gbs=12000, l2_bytes=126 * KIB**2, shared_bytes=227 * KIB,
        memory_bytes=int(178.3 * KIB**3),
    ),
}  # fmt: skip
"""By the names that the command line accepts. L2 bandwidths are estimates, since vendors do not state them;
A100 and H100 are those with 80 GB."""


def named(name: str) -> Device:
    """Return a device by its name, `cpu` included.

    Raises:
        ValueError: An unknown name.

    Example:
        >>> named("h200").num_sms
        132
    """
    if name == "cpu":
        return this_cpu()
    if name not in DEVICES:
        text = f"device={name}: expected one of {', '.join([*DEVICES, 'cpu'])}"
        raise ValueError(text)
    return DEVICES[name]


def of(device: torch.device) -> Device:
    """Describe a device of this machine: from the table, else scaled from the most similar one by its SMs."""
    if device.type != "cuda":
        return this_cpu()
    properties = torch.cuda.get_device_properties(device)
    model = properties.name.lower().replace(" ", "")
    for key, device_info in DEVICES.items():
        same_sms = device_info.num_sms == properties.multi_processor_count
        if key in model and same_sms and "nvl" not in model:  # NVL boards have as many SMs, at lower clocks
            return device_info
    capability = properties.major * 10 + properties.minor
    like = min(DEVICES.values(), key=lambda info: (abs(info.capability - capability), info.num_sms))
    ratio = properties.multi_processor_count / like.num_sms
    return replace(
        like, name=properties.name, capability=capability, num_sms=properties.multi_processor_count,
        peak_tflops={key: value * ratio for key, value in like.peak_tflops.items()},
        memory_gbs=like.memory_gbs * ratio, l2_gbs=like.l2_gbs * ratio, l2_bytes=properties.L2_cache_size,
        shared_bytes=properties.shared_memory_per_block_optin, memory_bytes=properties.total_memory,
    )  # fmt: skip


def this_cpu() -> Device:
    """Describe this machine's CPU; its speed and its caches are a guess, which only ranks sizes."""
    cores = torch.get_num_threads()
    return Device(
        name="CPU", capability=0, num_sms=cores,
        peak_tflops={"float32": 0.1 * cores, "float64": 0.05 * cores},
        memory_gbs=20.0, l2_gbs=100.0, l2_bytes=32 * KIB**2, shared_bytes=KIB**2,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )  # fmt: skip
