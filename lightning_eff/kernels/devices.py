"""Describe devices for the cost model: the vendors' peaks for dense products, and sizes of memory and caches.

The sizes of a GPU of this machine come from the driver. Peaks are known only for the GPUs in the table. Peaks
of all other GPUs are estimates, which are used to rank configs and are never shown.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

KIB = 2**10
AMPERE = 80
"""Compute capability of the first GPUs with bfloat16."""
_predicted: ContextVar[Device | None] = ContextVar("_predicted", default=None)
"""The GPU for which memory is being predicted; the fake tensors of a prediction are on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or this machine's CPU.

    Args:
        name: The vendor's name.
        capability: Compute capability of an NVIDIA GPU, times ten (90 for Hopper); 0 for all other devices.
        num_sms: Number of streaming multiprocessors, or of CPU cores.
        peak_tflops: Peak speed by dtype, in 1e12 operations per second.
        memory_gbs: Memory bandwidth, in 1e9 bytes per second.
        l2_gbs: Bandwidth of the last-level cache, in 1e9 bytes per second.
        l2_bytes: Size of the last-level cache.
        shared_bytes: Shared memory available to one block; on a CPU, the private cache of one core.
        memory_bytes: Memory that the driver reports to a process.
        is_cpu: Whether the device is this machine's CPU.
        is_estimate: Whether peaks and bandwidths are estimates, which are used only to rank configs.
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
    is_cpu: bool = False
    is_estimate: bool = False

    def peak(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Return the peak operations per second in a dtype, or in float32 if the device lacks that dtype."""
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
    "b200": Device(
        name="B200", capability=100, num_sms=148,
        peak_tflops={"bfloat16": 2250, "float16": 2250, "tf32": 1125, "float32": 75, "float8": 4500},
        memory_gbs=8000, l2_gbs=12000, l2_bytes=126 * KIB**2, shared_bytes=227 * KIB,
        memory_bytes=int(178.3 * KIB**3),
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
    "rtx5090": Device(
        name="RTX 5090", capability=120, num_sms=170,
        peak_tflops={"bfloat16": 209.5, "float16": 209.5, "tf32": 104.8, "float32": 104.8, "float8": 419},
        memory_gbs=1792, l2_gbs=8000, l2_bytes=96 * KIB**2, shared_bytes=99 * KIB,
        memory_bytes=int(31.0 * KIB**3),
    ),
    "rtx3090": Device(
        name="RTX 3090", capability=86, num_sms=82,
        peak_tflops={"bfloat16": 71.0, "float16": 71.0, "tf32": 35.6, "float32": 35.6},
        memory_gbs=936, l2_gbs=3000, l2_bytes=6 * KIB**2, shared_bytes=99 * KIB,
        memory_bytes=int(23.2 * KIB**3),
    ),
    "l40s": Device(
        name="L40S", capability=89, num_sms=142,
        peak_tflops={"bfloat16": 362.0, "float16": 362.0, "tf32": 183.0, "float32": 91.6, "float8": 733.0},
        memory_gbs=864, l2_gbs=5000, l2_bytes=96 * KIB**2, shared_bytes=99 * KIB,
        memory_bytes=int(43.6 * KIB**3),
    ),
    "l4": Device(
        name="L4", capability=89, num_sms=58,
        peak_tflops={"bfloat16": 121.0, "float16": 121.0, "tf32": 60.0, "float32": 30.3, "float8": 242.5},
        memory_gbs=300, l2_gbs=2000, l2_bytes=48 * KIB**2, shared_bytes=99 * KIB,
        memory_bytes=int(21.8 * KIB**3),
    ),
    "a10": Device(
        name="A10", capability=86, num_sms=72,
        peak_tflops={"bfloat16": 125.0, "float16": 125.0, "tf32": 62.5, "float32": 31.2},
        memory_gbs=600, l2_gbs=2500, l2_bytes=6 * KIB**2, shared_bytes=99 * KIB,
        memory_bytes=int(21.8 * KIB**3),
    ),
    "t4": Device(
        name="T4", capability=75, num_sms=40, peak_tflops={"float16": 65.0, "float32": 8.1},
        memory_gbs=320, l2_gbs=1200, l2_bytes=4 * KIB**2, shared_bytes=64 * KIB,
        memory_bytes=int(14.5 * KIB**3),
    ),
    "v100": Device(
        name="V100", capability=70, num_sms=80, peak_tflops={"float16": 125.0, "float32": 15.7},
        memory_gbs=900, l2_gbs=2500, l2_bytes=6 * KIB**2, shared_bytes=96 * KIB,
        memory_bytes=int(31.0 * KIB**3),
    ),
    "mi300x": Device(
        name="MI300X", capability=0, num_sms=304,
        peak_tflops={"bfloat16": 1307, "float16": 1307, "tf32": 654, "float32": 163, "float8": 2615},
        memory_gbs=5300, l2_gbs=17000, l2_bytes=256 * KIB**2, shared_bytes=64 * KIB,
        memory_bytes=int(186.2 * KIB**3),
    ),
}  # fmt: skip
"""Devices by the names that the command line accepts: A100 and H100 with 80 GB, V100 with 32 GB.

Peaks are for dense products with float32 sums, from the vendors' data sheets and white papers. The memory
sizes of the first five entries are from the driver. The other memory sizes are from data sheets, less 3 % for
the driver, and less 1/16 if GDDR memory corrects errors. L2 bandwidths are estimates, since vendors do not
publish L2 bandwidths."""


def named(name: str) -> Device:
    """Return a device by its name, `cpu` included.

    Raises:
        ValueError: The name is unknown.

    Example:
        >>> named("h200").num_sms
        132
    """
    if name == "cpu":
        return this_cpu()
    if name not in DEVICES:
        raise ValueError(f"device={name}: expected one of {', '.join([*DEVICES, 'cpu'])}")
    return DEVICES[name]


def unknown_gpu(memory_bytes: int) -> Device:
    """Return a GPU of which only the memory is known; all other values are estimates."""
    return replace(DEVICES["a100"], name="a GPU", capability=0, memory_bytes=memory_bytes, is_estimate=True)


def of(device: torch.device) -> Device:
    """Describe a device of this machine; the rates of an unknown GPU are scaled from the most similar GPU."""
    if device.type != "cuda":
        return this_cpu()
    properties = torch.cuda.get_device_properties(device)
    # AMD's capabilities have another meaning: 9.4 is not later than NVIDIA's 9.0.
    capability = 0 if torch.version.hip else properties.major * 10 + properties.minor
    shared_bytes = properties.shared_memory_per_block  # ROCm reports no opt-in size
    return _gpu(
        properties.name, capability, properties.multi_processor_count, l2_bytes=properties.L2_cache_size,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", shared_bytes),
        memory_bytes=properties.total_memory,
    )  # fmt: skip


@functools.cache
def _gpu(name: str, capability: int, num_sms: int, **sizes: int) -> Device:
    """Return the table's entry for a GPU, or an estimate for an unknown GPU; `sizes` come from the driver."""
    # The driver's name contains the table's name as a word. NVL boards have the same number of SMs, but lower
    # clocks.
    known = (info for info in DEVICES.values() if re.search(rf"\b{info.name}\b", name) and "NVL" not in name)
    device = next((info for info in known if info.num_sms == num_sms), None)
    if device is not None:
        return replace(device, **sizes)
    # The nearest capability first, then the nearest number of SMs.
    like = min(
        DEVICES.values(), key=lambda info: (abs(info.capability - capability), abs(info.num_sms - num_sms))
    )
    # Rates scale with the number of SMs; sizes come from the driver.
    ratio = num_sms / like.num_sms
    return replace(
        like, name=name, capability=capability, num_sms=num_sms, is_estimate=True,
        peak_tflops={key: value * ratio for key, value in like.peak_tflops.items()},
        memory_gbs=like.memory_gbs * ratio, l2_gbs=like.l2_gbs * ratio, **sizes,
    )  # fmt: skip


@contextmanager
def predicted(gpu: Device | None) -> Generator[None]:
    """Treat fake tensors as tensors of a GPU that this machine may lack; if `gpu` is None, as CPU tensors."""
    token = _predicted.set(gpu)
    try:
        yield
    finally:
        _predicted.reset(token)


def gpu_of(tensor: Tensor) -> Device | None:
    """Return the GPU of a tensor, or None; a fake tensor has the GPU that `predicted` has set.

    Example:
        >>> gpu_of(torch.ones(2)) is None
        True
    """
    if tensor.is_cuda:
        return of(tensor.device)
    return _predicted.get() if is_fake(tensor) else None


def why_no_kernels(device: torch.device) -> str:
    """Return the reason why our kernels cannot run on a device of this machine; empty if they can run.

    Example:
        >>> why_no_kernels(torch.device("cpu"))
        "expected a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1 in the environment)"
    """
    from lightning_eff.kernels import gemm_kernels  # imports Triton, not needed to describe a device

    if gemm_kernels.INTERPRETED:
        return ""
    if device.type != "cuda":
        return "expected a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1 in the environment)"
    if torch.version.hip:
        return "the kernels are for NVIDIA GPUs, and this is torch for ROCm"
    if gemm_kernels.triton is None:
        return "Triton is not installed: pip install triton"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"compute capability {major}.{minor}: expected 8.0 (Ampere) or later"


def float32_precision() -> Literal["tf32", "ieee"]:
    """Return how CUDA multiplies float32 matrices, no matter which of PyTorch's switches was set.

    PyTorch's own products follow `fp32_precision`, which reflects all switches and inherited settings.
    Reading the older switches (`allow_tf32`, `get_float32_matmul_precision`) raises an error if the newer
    switches disagree.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# Equivalent to torch.compiler.assume_constant_result, without importing the compiler. The compiler cannot
# trace the switch, but compiles again after the switch has changed.
float32_precision.__dict__["_dynamo_marked_constant"] = True


def this_cpu() -> Device:
    """Describe this machine's CPU; its speed and caches are estimates, which are used only to rank sizes."""
    cores = torch.get_num_threads()
    return Device(
        name="CPU", capability=0, num_sms=cores, is_cpu=True, is_estimate=True,
        peak_tflops={"float32": 0.1 * cores, "float64": 0.05 * cores},
        memory_gbs=20.0, l2_gbs=100.0, l2_bytes=32 * KIB**2, shared_bytes=KIB**2,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )  # fmt: skip
