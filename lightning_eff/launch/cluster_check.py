"""Check what the ranks of a job see, before a run needs it: each line is the view of all of them.

Started as a run would be (`torchrun ... -m lightning_eff doctor --cluster`), the ranks meet on gloo, exchange
what each has found, and rank 0 prints it. One that is missing is named after `WAIT_S`.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_eff.core.errors import ConfigError
from lightning_eff.launch.job import Launch, check_machines, check_tasks
from lightning_eff.launch.machine_check import CheckResult, check_result

WAIT_S = 60.0
"""Time that ranks have to meet."""
MAX_CLOCK_S = 2.0
"""Clocks that differ by more may take an older checkpoint for the newest."""


@dataclass(frozen=True)
class View:
    """What one rank sees."""

    rank: int
    host: str
    torch: str
    gpu: int | None
    """Index of its GPU within those that it sees; None without one."""
    clock: float
    error: str = ""
    """Why it cannot write the shared folder."""
    files: list[str] = field(default_factory=list[str])
    """Of the other ranks, in that folder."""


def inspect_cluster(output_root: Path) -> list[CheckResult]:
    """Return what all ranks see, on each of them; of a process that no launcher started, what it says.

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
        return [*rows, *judged([_view(launch, output_root, {})])]
    address = _address(launch)
    where = ":".join(address)
    try:
        socket.getaddrinfo(address[0], None)
        with _met(launch, address):
            rows.append(CheckResult("address", f"{where}, reached by all"))
            views = _exchanged(launch, output_root)
    except (OSError, dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        fix = "MASTER_ADDR, MASTER_PORT: a name that all machines resolve, a port that no firewall closes"
        return [*rows, CheckResult("address", f"{where}: {reason}", "problem", fix)]
    return [*rows, *judged(views)]


def _address(launch: Launch) -> tuple[str, str]:
    if launch.by == "slurm":
        slurm = SLURMEnvironment()
        return slurm.main_address, str(slurm.main_port)
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", str(29500))


@contextmanager
def _met(launch: Launch, address: tuple[str, str]) -> Generator[None]:
    """Form a group of all ranks on gloo."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address
    wait = timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", rank=launch.rank, world_size=launch.num_tasks or 1, timeout=wait)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _exchanged(launch: Launch, output_root: Path) -> list[View]:
    """Return the views of all ranks, each of which has looked for the files of all others."""
    mark = [f"{os.getpid()}-{time.time_ns()}"]
    dist.broadcast_object_list(mark)
    files = {rank: f".doctor-{mark[0]}-{rank}" for rank in range(launch.num_tasks or 1)}
    own = output_root / files[launch.rank]
    error = ""
    try:
        output_root.mkdir(parents=True, exist_ok=True)
        own.write_text("")
    except OSError as failure:
        error = str(failure)
    dist.barrier()  # all have written
    try:
        views: list[Any] = [None] * (launch.num_tasks or 1)
        dist.all_gather_object(views, _view(launch, output_root, files, error))
        return views
    finally:
        own.unlink(missing_ok=True)


def _view(launch: Launch, output_root: Path, files: dict[int, str], error: str = "") -> View:
    if not files:
        try:
            output_root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output_root):
                pass
        except OSError as failure:
            error = str(failure)
    gpu = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    has_gpu = torch.cuda.is_available() and gpu < torch.cuda.device_count()
    return View(
        launch.rank, socket.gethostname(), torch.__version__, gpu if has_gpu else None, time.time(), error,
        [file for file in files.values() if (output_root / file).exists()],
    )  # fmt: skip


def judged(views: list[View]) -> Iterator[CheckResult]:
    """Return what all views say together; nothing is said of a folder that one rank has for itself."""
    hosts = Counter(view.host for view in views)
    yield CheckResult("machines", ", ".join(f"{host} ({count})" for host, count in hosts.items()))
    versions = Counter(view.torch for view in views)
    found = ", ".join(f"{version} on {count}" for version, count in versions.items())
    fix = "the same environment, or image, on every machine"
    yield check_result("torch", len(versions) == 1, next(iter(versions)), found, fix, problem=True)
    without = [view.rank for view in views if view.gpu is None]
    backend = "nccl, a GPU for each rank" if not without else "gloo, no GPU"
    mixed = f"ranks {_some(without)} see no GPU, others do"
    fix = (
        "as many ranks on a machine as it has GPUs (--gpus-per-node, resourcesPerNode, CUDA_VISIBLE_DEVICES)"
    )
    yield check_result("backend", len(without) in (0, len(views)), backend, mixed, fix, problem=True)
    failed = [view for view in views if view.error]
    blind = [view.rank for view in views if len(views) > 1 and len(view.files) < len(views)]
    text = (
        f"rank {failed[0].rank}: {failed[0].error}"
        if failed
        else f"ranks {_some(blind)} do not see all files"
    )
    fix = "output_root=FOLDER, one that every machine mounts and may write to"
    written = "written by this rank" if len(views) == 1 else "written and seen by all ranks"
    yield check_result("output root", not failed and not blind, written, text, fix, problem=True)
    spread = max(view.clock for view in views) - min(view.clock for view in views)
    about = f"within {MAX_CLOCK_S:.0f} s of each other"
    fix = "timedatectl set-ntp true, on every machine"
    yield check_result("clocks", spread <= MAX_CLOCK_S, about, f"{spread:.0f} s apart", fix)


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
