"""Check what the ranks of a job see, before a run needs it: each line summarizes the views of all ranks.

Started as a run would be (`torchrun ... -m lightning_eff doctor --cluster`), the ranks meet on gloo, exchange
what each has found, and rank 0 prints it. A rank that is missing is named after `WAIT_S`.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
"""With clocks further apart an older checkpoint may be taken for the newest."""


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
