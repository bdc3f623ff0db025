"""What a figure was measured on: versions, device, threads."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from typing import Any

import torch

from lightning_eff.measure.formats import support

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


def machine_facts(device_type: str) -> dict[str, str]:
    """Return what this machine has that a technique may need, by name, in words.

    Args:
        device_type: Where the model is trained.
    """
    compiler = find_compiler(device_type)
    facts = {"machine/compiler": f"the compiler {compiler}"} if compiler else {}
    for dtype in (torch.bfloat16, torch.float16):
        answer = support(device_type, dtype)
        if not answer.native:
            name = str(dtype).removeprefix("torch.")
            facts[f"machine/emulated_{name}"] = f"{name} that is emulated on this {device_type}"
    return facts


def find_compiler(device_type: str) -> str | None:
    """Return the compiler that torch.compile's inductor calls on a device, or None.

    On the CPU it generates C++; on a GPU Triton builds a small C launcher.
    """
    candidates = (
        (os.environ.get("CXX"), "g++", "clang++")
        if device_type == "cpu"
        else (os.environ.get("CC"), "gcc", "clang")
    )
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
