"""Check versions, GPU, compiler and disk of this machine; print a command that fixes each problem."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

from lightning_eff.core import host_memory
from lightning_eff.core.catalog import CONSTRAINTS
from lightning_eff.core.dtypes import dtype_support
from lightning_eff.core.errors import EXIT_ENVIRONMENT, EXIT_OK
from lightning_eff.core.machine import find_compiler
from lightning_eff.core.text import human_bytes, print_json, text_table

REQUIRED = ("torch", "lightning", "hydra-core", "omegaconf", "numpy", "tokenizers")
OPTIONAL = ("triton", "peft", "deepspeed", "transformers", "scikit-learn")
MIN_DISK_BYTES = 2 * 2**30
MIN_SHARED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    what: str
    found: str
    status: str = "ok"
    """`ok`, `note` (a limitation) or `problem` (something does not work)."""
    fix: str = ""
    """A command that fixes the problem; empty if there is no problem."""


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    findings = inspect_machine()
    if options.json:
        print_json({"rows": [asdict(finding) for finding in findings]})
    else:
        rows = [[finding.what, finding.found, finding.status, finding.fix] for finding in findings]
        sys.stdout.write(text_table(["what", "found", "status", "fix"], rows) + "\n")
    return EXIT_ENVIRONMENT if any(finding.status == "problem" for finding in findings) else EXIT_OK


def check_result(
    what: str, is_ok: object, found: str, otherwise: str, fix: str, *, problem: bool = False
) -> CheckResult:
    """Return a result with the text `found` if `is_ok`, else a note or problem with `otherwise` and `fix`."""
    if is_ok:
        return CheckResult(what, found)
    return CheckResult(what, otherwise, "problem" if problem else "note", fix)


def inspect_machine() -> list[CheckResult]:
    """Run all checks, most basic first."""
    return [*_packages(), *_gpus_and_dtypes(), *_host()]


def _packages() -> Iterator[CheckResult]:
    yield CheckResult("python", platform.python_version())
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if CONSTRAINTS.is_file() else []
    # A line is `name==version; marker`.
    pins = (line.partition(";")[0].strip().partition("==") for line in lines if "==" in line)
    tested = {name.strip().lower(): version for name, _, version in pins}
    for package in (*REQUIRED, *OPTIONAL):
        pin = tested.get(package, "")
        install = f"pip install '{package}=={pin}'" if pin else f"pip install {package}"
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            status = "problem" if package in REQUIRED else "note"
            yield CheckResult(package, "not installed", status, install)
        else:
            same = not pin or version.partition("+")[0] == pin  # 2.13.0+cpu is a build of 2.13.0
            yield check_result(package, same, version, f"{version} (tested with {pin})", install)


def _gpus_and_dtypes() -> Iterator[CheckResult]:
    cuda, reinstall = torch.version.cuda, "pip install --force-reinstall torch"
    yield CheckResult("torch build", f"CUDA {cuda}" if cuda else "CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for index in range(torch.cuda.device_count() if device == "cuda" else 0):
        total = torch.cuda.get_device_properties(index).total_memory
        yield CheckResult(f"gpu {index}", f"{torch.cuda.get_device_name(index)}, {human_bytes(total)}")
    if device == "cpu":
        has_driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
        wrong = f"NVIDIA GPU, but {'CUDA does not start' if cuda else 'torch is a CPU build'}"
        fix = "nvidia-smi" if cuda else reinstall
        yield check_result("gpu", not has_driver, "none that torch can use", wrong, fix, problem=True)
    for dtype in (torch.bfloat16, torch.float16):
        answer, name = dtype_support(device, dtype), str(dtype).removeprefix("torch.")
        fix = "precision=auto (chooses what is fast)"
        yield check_result(name, answer.native, answer.why, answer.why, fix)
    if cuda:
        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        yield check_result("nccl", nccl, "available", "missing: no strategy over several GPUs", reinstall)


def _host() -> Iterator[CheckResult]:
    """Check compiler, memory and disk."""
    compiler = find_compiler("cuda" if torch.cuda.is_available() else "cpu")
    missing = "none: torch.compile's inductor needs one"
    yield check_result("compiler", compiler, str(compiler), missing, "apt-get install g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = "missing: Triton and DeepSpeed build against it"
    yield check_result("Python.h", header.exists(), str(header), missing, "apt-get install python3-dev")
    limit, installed = host_memory.host_memory_limit(), human_bytes(host_memory.installed_bytes())
    limited = f"{human_bytes(limit.num_bytes)} by {limit.name}, of {installed}"
    yield CheckResult("memory", limited if limit.name else installed)
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{human_bytes(free)} free here"
    yield check_result("disk", free >= MIN_DISK_BYTES, text, text, "output_root=/another/disk")
    is_writable, missing = os.access(Path.cwd(), os.W_OK), "read-only: runs cannot be written"
    yield check_result("this folder", is_writable, "writable", missing, "output_root=/yours")
    # DataLoader workers pass batches through shared memory, which containers limit to 64 MiB by default.
    shared = Path("/dev/shm")  # noqa: S108 - inspected, not written to
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        text = f"{human_bytes(size)} for DataLoader workers"
        fix = "data.num_workers=0, or start the container with --shm-size=2g"
        yield check_result("shared memory", size >= MIN_SHARED_BYTES, text, text, fix)
