"""Which number formats a device computes natively, and which it only emulates."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DtypeSupport:
    """Whether a device computes a dtype natively, and how that is known."""

    native: bool
    why: str


def dtype_support(device_type: str, dtype: torch.dtype) -> DtypeSupport:
    """Say whether matrix products in `dtype` run natively on the current device of `device_type`.

    Example:
        >>> support("cpu", torch.float32).native
        True
    """
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        return DtypeSupport(native=True, why="every device computes float32")
    if device_type == "cpu":
        return _cpu_support(name)
    native = True
    if dtype == torch.bfloat16 and device_type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif dtype == torch.bfloat16 and device_type == "xpu":
        native = torch.xpu.is_bf16_supported()
    elif dtype == torch.bfloat16 and device_type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
    return DtypeSupport(native=native, why=f"{device_type} {'computes' if native else 'has no units for'} {name}")


def _cpu_support(name: str) -> DtypeSupport:
    """Ask for the instructions, not for what runs: oneDNN emulates bf16 on plain AVX-512, slowly."""
    read = getattr(torch.cpu, "get_capabilities", None)
    if read is None:
        return DtypeSupport(
            native=False, why=f"torch {torch.__version__} cannot tell whether this CPU computes {name}"
        )
    capabilities = read()
    short = {"bfloat16": "bf16", "float16": "fp16"}[name]
    units = [unit for unit in (f"amx_{short}", f"avx512_{short}", f"arm_{short}") if capabilities.get(unit)]
    if units:
        return DtypeSupport(native=True, why=f"this CPU computes {name} ({units[0]})")
    return DtypeSupport(native=False, why=f"this CPU has no {name} instructions and emulates them")


def auto_precision(device_type: str) -> tuple[str, str]:
    """Return the format that `auto` means on a device, and the reason."""
    answer = dtype_support(device_type, torch.bfloat16)
    return ("bf16-mixed" if answer.native else "32-true"), answer.why


_COMPUTED_IN = {
    "bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64, "transformer": torch.float8_e4m3fn,
}  # fmt: skip
"""By the first word of Lightning's name of a precision; float32 for any other."""


def matmul_dtype(precision: str, device_type: str) -> torch.dtype:
    """Return the format in which a precision, `auto` too, computes matrix products on a device.

    Example:
        >>> [dtype_of(precision, "cuda") for precision in ("bf16-mixed", "16-true", "32-true")]
        [torch.bfloat16, torch.float16, torch.float32]
    """
    settled = auto_precision(device_type)[0] if precision == "auto" else precision
    return _COMPUTED_IN.get(str(settled).partition("-")[0], torch.float32)


def layer_matmul_dtype(weight: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """Return the format of a layer's products: that of the run, or the weight's where a run casts nothing."""
    return weight if computed == torch.float32 else computed
