"""Describe the machine of a run: versions, device, threads, and facts for rules."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lightning_eff.core.dtypes import dtype_support

PACKAGES = ("lightning-eff", "torch", "lightning", "hydra-core")
FLOAT8_CAPABILITY = 89
"""Compute capability, times ten, of the first GPUs whose tensor cores multiply float8."""


def machine_info(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware as plain types.

    Example:
        >>> machine_info(torch.device("cpu"))["device"] != ""
        True
    """
    return {
        "python": platform.python_version(),
        **{package: package_version(package) for package in PACKAGES},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
    }


def num_cores(num_processes: int = 1) -> int:
    """Return the number of cores for each of `num_processes` processes on this machine."""
    affinity = getattr(os, "sched_getaffinity", None)
    # SLURM and containers may give this process only some of the machine's cores.
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // num_processes)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU or CPU; the name of a CPU comes from PyTorch if possible."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        get_capabilities = getattr(torch.cpu, "get_capabilities", dict)
        return str(get_capabilities().get("cpu_name") or platform.processor() or platform.machine())
    return device.type


def machine_facts(device_type: str) -> dict[str, str]:
    """Return the facts of this machine that rules may mention, each with its description."""
    compiler = find_compiler(device_type)
    facts = {"machine/compiler": f"the compiler {compiler}"} if compiler else {}
    for name in ("bfloat16", "float16"):
        if not dtype_support(device_type, getattr(torch, name)).native:
            facts[f"machine/emulated_{name}"] = f"{name} that is emulated on this {device_type}"
    # ROCm devices also have the type `cuda`, but number their capabilities differently.
    if device_type == "cuda" and not torch.version.hip:
        major, minor = torch.cuda.get_device_capability()
        facts |= gpu_facts(major * 10 + minor)
    return facts


def gpu_facts(capability: int) -> dict[str, str]:
    """Return the GPU properties that rules can use; `capability` is the compute capability times ten.

    Example:
        >>> gpu_facts(80), gpu_facts(90)
        ({}, {'machine/float8': 'float8 products'})
    """
    return {"machine/float8": "float8 products"} if capability >= FLOAT8_CAPABILITY else {}


def find_compiler(device_type: str) -> str | None:
    """Return the path of the compiler that torch.compile's inductor calls for a device, or None.

    For a CPU, inductor calls a C++ compiler. For a GPU, Triton builds a small launcher with a C compiler.
    """
    variable, *programs = ("CXX", "g++", "clang++") if device_type == "cpu" else ("CC", "gcc", "clang")
    # The environment variable has precedence, as in inductor.
    candidates = (os.environ.get(variable), *programs)
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def package_version(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def command_line() -> str:
    """Return this process's command line as a shell command, however the process was started."""
    program = Path(sys.argv[0])
    # `python -m lightning_eff` starts `lightning_eff/__main__.py`.
    is_ours = program.name == "lightning-eff" or program.parent.name == "lightning_eff"
    return shlex.join(["lightning-eff" if is_ours else sys.argv[0], *sys.argv[1:]])
