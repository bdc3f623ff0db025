"""Check this machine: versions, GPU, compiler, disk; print one command per problem that fixes it.

With `--cluster` each line summarizes what all ranks of a job see. Started as a run would be (`torchrun ...
-m lightning_eff doctor --cluster`), the ranks meet on gloo, exchange what each has found, and rank 0 prints
it. A rank that is missing is named after `WAIT_S`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_eff.core import host_memory
from lightning_eff.core.catalog import CONSTRAINTS
from lightning_eff.core.dtypes import dtype_support
from lightning_eff.core.errors import EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from lightning_eff.core.machine import find_compiler
from lightning_eff.core.text import human_bytes, print_json, text_table
from lightning_eff.launch.job import Launch, check_machines, check_tasks

REQUIRED = ("torch", "lightning", "hydra-core", "omegaconf", "numpy", "tokenizers")
OPTIONAL = ("triton", "peft", "deepspeed", "transformers", "scikit-learn")
MIN_DISK_BYTES = 2 * 2**30
MIN_SHARED_BYTES = 256 * 2**20
WAIT_S = 60.0
"""Time that ranks have to meet."""
MAX_CLOCK_S = 2.0
"""With clocks further apart an older checkpoint may be taken for the newest."""


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    what: str
    found: str
    status: str = "ok"
    """`ok`, `note` (works, but could be better) or `problem` (something does not work)."""
    fix: str = ""
    """One command; empty if there is nothing to fix."""


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.cluster:
        findings, is_first = inspect_cluster(options.output_root), not Launch.of().rank
    else:
        findings, is_first = inspect_machine(), True
    if not is_first:
        pass  # rank 0 prints what all have found
    elif options.json:
        print_json({"rows": [asdict(finding) for finding in findings]})
    else:
        rows = [[finding.what, finding.found, finding.status, finding.fix] for finding in findings]
        sys.stdout.write(text_table(["what", "found", "status", "fix"], rows) + "\n")
    return EXIT_ENVIRONMENT if any(finding.status == "problem" for finding in findings) else EXIT_OK


def check_result(
    what: str, is_ok: object, found: str, otherwise: str, fix: str, *, problem: bool = False
) -> CheckResult:
    """Return `found` if the check passes, else a note or problem with `otherwise` and the fix."""
    if is_ok:
        return CheckResult(what, found)
    return CheckResult(what, otherwise, "problem" if problem else "note", fix)


def inspect_machine() -> list[CheckResult]:
    """Run all checks, most basic first."""
    return [*_packages(), *_gpus_and_dtypes(), *_host()]


def _packages() -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    fix = "install Python 3.11 or newer"
    yield check_result("python", sys.version_info >= (3, 11), version, version, fix, problem=True)
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if CONSTRAINTS.is_file() else []
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
            same = not pin or version.partition("+")[0] == pin
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
    shared = Path("/dev/shm")  # noqa: S108 - inspected, not written to
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        text = f"{human_bytes(size)} for DataLoader workers"
        fix = "data.num_workers=0, or start the container with --shm-size=2g"
        yield check_result("shared memory", size >= MIN_SHARED_BYTES, text, text, fix)


@dataclass(frozen=True)
class View:
    """What one rank sees."""

    rank: int
    host: str
    torch: str
    gpu: int | None
    """Index of its GPU among those that it sees; None without one."""
    clock: float
    error: str = ""
    """Why it cannot write the shared folder."""
    files: Sequence[int] = ()
    """Ranks whose files it sees in that folder."""


def inspect_cluster(output_root: Path) -> list[CheckResult]:
    """Summarize what all ranks see, on each of them; without a launcher, what this process sees.

    Args:
        output_root: Folder of the runs, which all ranks must share.
    """
    launch = Launch.of()
    try:
        if not launch.by:
            check_machines({"num_nodes": "auto"})
        elif launch.by == "slurm":
            check_tasks({"devices": "auto", "num_nodes": "auto"}, launch)
    except ConfigError as error:
        text, _, fix = str(error).partition("\n  try: ")
        return [CheckResult("launcher", text, "problem", fix)]
    tasks = launch.num_tasks or 1
    name = launch.by or "none: this process alone"
    local = f", {launch.num_local_tasks} on each machine" if launch.num_local_tasks else ""
    rows = [CheckResult("launcher", f"{name}; {tasks} rank{'s' * (tasks != 1)}{local}")]
    if tasks == 1:
        return [*rows, *summarize_views(_exchange_views(launch, output_root))]
    if launch.by == "slurm":
        slurm = SLURMEnvironment()
        host, port = slurm.main_address, str(slurm.main_port)
    else:
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    try:
        socket.getaddrinfo(host, None)
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        wait = timedelta(seconds=WAIT_S)
        dist.init_process_group("gloo", rank=launch.rank, world_size=tasks, timeout=wait)
        try:
            rows.append(CheckResult("address", f"{host}:{port}, reached by all"))
            return [*rows, *summarize_views(_exchange_views(launch, output_root))]
        finally:
            dist.destroy_process_group()
    except (OSError, dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        fix = "MASTER_ADDR, MASTER_PORT: a name that all machines resolve, a port that no firewall closes"
        return [*rows, CheckResult("address", f"{host}:{port}: {reason}", "problem", fix)]


def _exchange_views(launch: Launch, output_root: Path) -> list[View]:
    """Return the views of all ranks, each of which has written a file and looked for those of the others."""
    num_ranks, mark = launch.num_tasks or 1, [f"{os.getpid()}-{time.time_ns()}"]
    if num_ranks > 1:
        dist.broadcast_object_list(mark)
    files = [output_root / f".doctor-{mark[0]}-{rank}" for rank in range(num_ranks)]
    error = ""
    try:
        output_root.mkdir(parents=True, exist_ok=True)
        files[launch.rank].write_text("")
    except OSError as failure:
        error = str(failure)
    try:
        if num_ranks > 1:
            dist.barrier()  # all have written
        gpu = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
        has_gpu = torch.cuda.is_available() and gpu < torch.cuda.device_count()
        found = [rank for rank, file in enumerate(files) if file.exists()]
        own = View(
            launch.rank, socket.gethostname(), torch.__version__, gpu if has_gpu else None, time.time(),
            error, found,
        )  # fmt: skip
        views: list[Any] = [own] * num_ranks
        if num_ranks > 1:
            dist.all_gather_object(views, own)
        return views
    finally:
        with suppress(OSError):  # it was not written
            files[launch.rank].unlink()


def summarize_views(views: Sequence[View]) -> Iterator[CheckResult]:
    """Compare the views of all ranks, a line for each thing that they see."""
    hosts = Counter(view.host for view in views)
    yield CheckResult("machines", ", ".join(f"{host} ({count})" for host, count in hosts.items()))
    versions = Counter(view.torch for view in views)
    found = ", ".join(f"{version} on {count}" for version, count in versions.items())
    fix = "the same environment, or image, on every machine"
    yield check_result("torch", len(versions) == 1, next(iter(versions)), found, fix, problem=True)
    without = [view.rank for view in views if view.gpu is None]
    backend = "nccl, a GPU for each rank" if not without else "gloo, no GPU"
    mixed = f"ranks {_listed(without)} see no GPU, others do"
    fix = "as many ranks per machine as it has GPUs (--gpus-per-node, resourcesPerNode, CUDA_VISIBLE_DEVICES)"
    yield check_result("backend", len(without) in (0, len(views)), backend, mixed, fix, problem=True)
    errors = [f"rank {view.rank}: {view.error}" for view in views if view.error]
    partial = [view.rank for view in views if len(view.files) < len(views)]
    errors += [f"ranks {_listed(partial)} do not see all files"] if partial else []
    fix = "output_root=FOLDER, one that every machine mounts and may write to"
    written = "written by this rank" if len(views) == 1 else "written and seen by all ranks"
    yield check_result("output root", not errors, written, "".join(errors[:1]), fix, problem=True)
    apart_s = max(view.clock for view in views) - min(view.clock for view in views)
    about = f"within {MAX_CLOCK_S:.0f} s of each other"
    fix = "timedatectl set-ntp true, on every machine"
    yield check_result("clocks", apart_s <= MAX_CLOCK_S, about, f"{apart_s:.0f} s apart", fix)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
