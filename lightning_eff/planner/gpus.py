"""GPUs that `plan` knows beside those of the kernels' cost model (kernels/devices.py), by their data sheets.

Memory is what the data sheet says, less what drivers keep: a GeForce of 24 GB has 23.5 to 23.7 GiB, a data
centre card whose GDDR checks errors (ECC) 1/16 less. Speeds are dense matrix products with float32 sums. What
a data sheet does not say, or says only with sparsity or 16-bit sums, is unknown: nothing is scaled.

Source: NVIDIA's data sheets of each product, and the tables of its white papers on V100, Turing, A100, GA102,
Ada, Hopper and RTX Blackwell; AMD's data sheets of MI250X, MI300X and MI325X.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_eff.core.errors import ConfigError, suggest_name
from lightning_eff.core.text import UNITS, parse_bytes
from lightning_eff.kernels import devices

GIB = 2**30
USABLE = 0.97
"""Fraction of the data sheet's memory that a process is expected to see."""
ECC = 15 / 16
"""Fraction of GDDR memory that is left with error correction."""
AMPERE = 80
ANY_OTHER = "device.memory=40GiB"
"""How the memory of a GPU that is in no table is given."""


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A GPU to plan for.

    Args:
        name: The vendor's name.
        memory_bytes: What a process is expected to see.
        capability: Compute capability of an NVIDIA GPU, times ten; 0 where there is none, or it is unknown.
        tflops: 1e12 dense operations per second, by dtype; a dtype that is absent is unknown.
        assumed: Assumptions, for the reader of a plan.
    """

    name: str
    memory_bytes: int
    capability: int = 0
    tflops: Mapping[str, float] = field(default_factory=dict[str, float])
    assumed: tuple[str, ...] = ()

    @property
    def attention_capability(self) -> int:
        """Capability by whose rules attention is chosen: Ampere's for a GPU that has none."""
        return self.capability or AMPERE


def _gpu(
    name: str,
    gb: float,
    capability: int,
    half: float | None = None,
    *,
    tf32: float | None = None,
    float32: float | None = None,
    float8: float | None = None,
    ecc: bool = False,
) -> GPU:
    """Make a GPU; `half` is float16's rate, and bfloat16's from Ampere on."""
    rates = {"float16": half, "tf32": tf32, "float32": float32, "float8": float8}
    rates |= {"bfloat16": half} if not 0 < capability < AMPERE else {}
    tflops = {dtype: rate for dtype, rate in rates.items() if rate is not None}
    memory = int(gb * (ECC if ecc else 1) * USABLE * GIB)
    kept = "by its data sheet less 3 % for the driver" + (" and 1/16 for error correction" if ecc else "")
    return GPU(name=name, memory_bytes=memory, capability=capability, tflops=tflops,
               assumed=(f"memory of the {name}: {gb:g} GB {kept}",))  # fmt: skip


GPUS: Mapping[str, GPU] = {
    # NVIDIA, data centre and workstation
    "a100_40gb": _gpu("A100 40GB", 40, 80, 312, tf32=156, float32=19.5),
    "a10": _gpu("A10", 24, 86, 125, tf32=62.5, float32=31.2, ecc=True),
    "a30": _gpu("A30", 24, 80, 165, tf32=82, float32=10.3),
    "a40": _gpu("A40", 48, 86, 149.7, tf32=74.8, float32=37.4, ecc=True),
    "a6000": _gpu("RTX A6000", 48, 86, 154.8, tf32=77.4, float32=38.7, ecc=True),
    "l4": _gpu("L4", 24, 89, 121, tf32=60, float32=30.3, float8=242.5, ecc=True),
    "l40": _gpu("L40", 48, 89, 181.05, tf32=90.5, float32=90.5, float8=362, ecc=True),
    "l40s": _gpu("L40S", 48, 89, 362.05, tf32=183, float32=91.6, float8=733, ecc=True),
    "rtx6000ada": _gpu("RTX 6000 Ada", 48, 89, float32=91.1, ecc=True),
    "rtxpro6000": _gpu("RTX PRO 6000 Blackwell", 96, 120, float32=125, ecc=True),
    "t4": _gpu("T4", 16, 75, 65, float32=8.1, ecc=True),
    "v100": _gpu("V100 SXM2 32GB", 32, 70, 125, float32=15.7),
    "v100_16gb": _gpu("V100 SXM2 16GB", 16, 70, 125, float32=15.7),
    "h100_pcie": _gpu("H100 PCIe", 80, 90, 756, tf32=378, float32=51, float8=1513),
    "h100_nvl": _gpu("H100 NVL", 94, 90, 835, tf32=417.5, float32=60, float8=1670.5),
    "gh200": _gpu("GH200 96GB", 96, 90, 990, tf32=494, float32=67, float8=1979),
    "gh200_144gb": _gpu("GH200 144GB", 144, 90, 990, tf32=494, float32=67, float8=1979),
    # NVIDIA, GeForce
    "rtx3060": _gpu("RTX 3060", 12, 86),
    "rtx3060ti": _gpu("RTX 3060 Ti", 8, 86),
    "rtx3070": _gpu("RTX 3070", 8, 86, 40.6, tf32=20.3, float32=20.3),
    "rtx3070ti": _gpu("RTX 3070 Ti", 8, 86),
    "rtx3080": _gpu("RTX 3080", 10, 86, 59.5, tf32=29.8, float32=29.8),
    "rtx3080ti": _gpu("RTX 3080 Ti", 12, 86),
    "rtx3090": _gpu("RTX 3090", 24, 86, 71, tf32=35.6, float32=35.6),
    "rtx3090ti": _gpu("RTX 3090 Ti", 24, 86),
    "rtx4060": _gpu("RTX 4060", 8, 89),
    "rtx4060ti": _gpu("RTX 4060 Ti", 8, 89),
    "rtx4060ti_16gb": _gpu("RTX 4060 Ti 16GB", 16, 89),
    "rtx4070": _gpu("RTX 4070", 12, 89),
    "rtx4070super": _gpu("RTX 4070 SUPER", 12, 89),
    "rtx4070ti": _gpu("RTX 4070 Ti", 12, 89, 80.2, tf32=40.1, float32=40.1),
    "rtx4070tisuper": _gpu("RTX 4070 Ti SUPER", 16, 89),
    "rtx4080": _gpu("RTX 4080", 16, 89, 97.5, tf32=48.7, float32=48.7, float8=194.9),
    "rtx4080super": _gpu("RTX 4080 SUPER", 16, 89),
    "rtx5060ti": _gpu("RTX 5060 Ti", 8, 120),
    "rtx5060ti_16gb": _gpu("RTX 5060 Ti 16GB", 16, 120),
    "rtx5070": _gpu("RTX 5070", 12, 120, 61.7, tf32=30.9, float32=30.9),
    "rtx5070ti": _gpu("RTX 5070 Ti", 16, 120, 87.9, tf32=43.9, float32=43.9),
    "rtx5080": _gpu("RTX 5080", 16, 120, 112.6, tf32=56.3, float32=56.3),
    "rtx5090": _gpu("RTX 5090", 32, 120, 209.5, tf32=104.8, float32=104.8),
    # AMD; each of the two dies of an MI250X is a device of its own, whose share the data sheet does not say
    "mi250x": _gpu("MI250X (one die)", 64, 0),
    "mi300x": _gpu("MI300X", 192, 0, 1307.4, tf32=653.7, float32=163.4, float8=2614.9),
    "mi325x": _gpu("MI325X", 256, 0, 1307.4, tf32=653.7, float32=163.4, float8=2614.9),
}
"""By the names that `device=` accepts; A100 with 80 GB, H100 SXM, H200, B200 and RTX 4090 are in
`devices.DEVICES`."""


def names() -> list[str]:
    """Return all names that `device=` accepts."""
    return [*devices.DEVICES, *GPUS, "cpu"]


def named(name: str) -> GPU | devices.Device:
    """Return a device by its name, `cpu` included.

    Raises:
        ConfigError: There is none of that name.

    Example:
        >>> named("l4").capability, named("h200").num_sms
        (89, 132)
    """
    if name not in names():
        close = suggest_name(name, names())
        allowed = f"one of {', '.join(names())}" + (f"; {close}" if close.startswith("did") else "")
        raise ConfigError(
            key="device", value=name, allowed=allowed, remedies=[f"{ANY_OTHER} for any other GPU"]
        )
    return GPUS[name] if name in GPUS else devices.named(name)


def any_gpu(memory_bytes: int) -> GPU:
    """Return a GPU of which only the memory is known."""
    return GPU(
        name="a GPU",
        memory_bytes=memory_bytes,
        assumed=("the GPU's speed and formats are unknown: device=NAME knows them",),
    )


def memory_of(text: str) -> int:
    """Return the bytes of a size with a unit.

    Raises:
        ConfigError: It is no such size, or none is left of it.

    Example:
        >>> memory_of("40GiB"), memory_of("1.5 GB")
        (42949672960, 1500000000)
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        allowed = f"a size above 0 with its unit, one of {', '.join(UNITS)}"
        raise ConfigError(key="device.memory", value=text, allowed=allowed, remedies=[ANY_OTHER]) from error


def peak(device: GPU | devices.Device, dtype: torch.dtype) -> float | None:
    """Return operations per second in a dtype; None where no data sheet that is known here says so.

    Example:
        >>> peak(GPUS["l4"], torch.bfloat16), peak(GPUS["rtx3060"], torch.bfloat16)
        (121000000000000.0, None)
    """
    if isinstance(device, devices.Device):
        return None if device.is_estimate else device.peak(dtype)
    name = str(dtype).removeprefix("torch.")
    rate = device.tflops.get("float8" if name.startswith("float8") else name)
    return None if rate is None else rate * 1e12


def facts(device: GPU | devices.Device) -> dict[str, str]:
    """Return what a GPU has, or lacks, that rules may mention; description by name."""
    from lightning_eff.core.machine import gpu_facts

    known = gpu_facts(device.capability)
    if 0 < device.capability < AMPERE:
        known["machine/emulated_bfloat16"] = f"bfloat16 that is emulated on the {device.name}"
    return known
