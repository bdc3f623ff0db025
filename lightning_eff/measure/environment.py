"""What a figure was measured on: versions, device, threads."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("lightning-eff", "torch", "lightning", "hydra-core")


def describe(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware as plain types.

    Example:
        >>> describe(torch.device("cpu"))["device"] != ""
        True
    """
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
    }


def device_name(device: torch.device) -> str:
    """Return the chip's name as its driver, or on the CPU PyTorch, gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    if device.type == "cpu":
        read = getattr(torch.cpu, "get_capabilities", dict)
        return str(read().get("cpu_name") or platform.processor() or platform.machine())
    return device.type


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
