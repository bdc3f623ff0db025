"""Find the dtypes that a device computes natively, and cast modules except their complex tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn


@dataclass(frozen=True)
class DtypeSupport:
    """Whether a device computes a dtype natively, and the evidence in one sentence."""

    native: bool
    why: str


def dtype_support(device_type: str, dtype: torch.dtype) -> DtypeSupport:
    """Return whether matrix products in `dtype` run natively on the current device of `device_type`.

    Example:
        >>> dtype_support("cpu", torch.float32).native
        True
    """
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        return DtypeSupport(native=True, why="every device computes float32")
    if device_type == "cpu":
        # Check the instructions: oneDNN runs bf16 on plain AVX-512 too, but emulates it slowly.
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # absent from older releases
        short = {"bfloat16": "bf16", "float16": "fp16"}[name]
        units = [f"amx_{short}", f"avx512_{short}", f"arm_{short}"]
        unit = next((unit for unit in units if capabilities.get(unit)), None)
        if unit is None:
            return DtypeSupport(
                native=False, why=f"torch finds no {name} instructions on this CPU, which emulates them"
            )
        return DtypeSupport(native=True, why=f"this CPU computes {name} ({unit})")
    native = True
    if dtype == torch.bfloat16 and device_type == "cuda":
        # By default, torch 2.13 also returns True for GPUs that emulate bfloat16.
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif dtype == torch.bfloat16 and device_type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
    why = f"{device_type} {'computes' if native else 'has no units for'} {name}"
    return DtypeSupport(native=native, why=why)


def auto_precision(device_type: str) -> tuple[str, str]:
    """Return the precision that `auto` selects on a device, and the reason."""
    bfloat16 = dtype_support(device_type, torch.bfloat16)
    return ("bf16-mixed" if bfloat16.native else "32-true"), bfloat16.why


_MATMUL_DTYPES = {
    "bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64, "transformer": torch.float8_e4m3fn,
}  # fmt: skip
"""Dtypes by the first part of Lightning's precision name; all other names stand for float32."""


def matmul_dtype(precision: str, device_type: str) -> torch.dtype:
    """Return the dtype of matrix products for a precision (or `auto`) on a device.

    Example:
        >>> [matmul_dtype(precision, "cuda") for precision in ("bf16-mixed", "16-true", "32-true")]
        [torch.bfloat16, torch.float16, torch.float32]
    """
    resolved = auto_precision(device_type)[0] if precision == "auto" else precision
    return _MATMUL_DTYPES.get(str(resolved).partition("-")[0], torch.float32)


def cast_floats(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module's real floating-point tensors in place.

    `module.to(dtype)` would also cast complex tensors (rotary embeddings) and drop their imaginary part.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> module.register_buffer("phase", torch.tensor([1 + 2j]))
        >>> [tensor.dtype for tensor in cast_floats(module, torch.bfloat16).state_dict().values()]
        [torch.bfloat16, torch.bfloat16, torch.complex64]
    """
    root: Any = module
    root._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)  # noqa: SLF001
    for part in root.modules():
        if isinstance(part, LightningModule):
            vars(part)["_dtype"] = dtype  # for `self.dtype`, as in `LightningModule.to`
    return module
