"""Detect the launcher of this process from the environment, and check the Trainer's number of devices.

A run on several devices consists of several processes. The processes are started by the command
(launch/ranks.py), or by a launcher (torchrun, SLURM), which does not read `trainer.devices`. If there are
more devices than processes, Lightning waits for ranks that never start. If there are more processes than
devices, the same run is trained several times. run.py and the command's verbs call these checks.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lightning_eff.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

RUN_DIR = "LIGHTNING_EFF_RUN_DIR"
"""Environment variable with the run's folder, for ranks that the command started."""
RAY = "LIGHTNING_EFF_RAY"
"""Environment variable with a Ray worker's accelerator; it distinguishes the worker from a torchrun rank."""
WAIT_S = 300.0
"""Time limit for ranks to agree on the run's folder; a slow rank may need a minute to import torch."""
_KEY = "lightning_eff"  # prefix of our keys in torchrun's store
POLL_S = 0.05
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable; its value is `True` while MASTER_PORT is the port of torchrun's store.

torchrun creates this store before it starts the ranks.
"""
_served: list[TCPStore] = []
"""Rank 0's store, kept alive until the process ends; the process group connects to the store's port."""


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, and the rank that the launcher assigned."""

    by: str = ""
    """`torchrun` (or our command, which sets the same variables), `slurm`, `ray`, or `lightning` for other
    launchers that Lightning detects. Empty if no launcher started this process, which then starts the ranks.
    """
    rank: int = 0
    num_tasks: int | None = None
    num_local_tasks: int | None = None
    accelerator: str = ""
    """The accelerator of a Ray worker, which may see other workers' GPUs; otherwise empty."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read the environment variables that launchers set.

        Example:
            >>> Launch.of({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_NTASKS_PER_NODE": "2"})
            Launch(by='slurm', rank=3, num_tasks=4, num_local_tasks=2, accelerator='')
            >>> Launch.of({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}).by  # a shell starts no tasks
            ''
        """
        number = {key: int(text) for key, text in environment.items() if text.isdecimal()}
        # Check torchrun's variable before SLURM's, because torchrun or Ray may run inside a SLURM job.
        if "TORCHELASTIC_RUN_ID" in environment:
            by = "ray" if RAY in environment else "torchrun"
            tasks, local = number.get("WORLD_SIZE"), number.get("LOCAL_WORLD_SIZE")
            return cls(by, number.get("RANK", 0), tasks, local, environment.get(RAY, ""))
        is_shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if "SLURM_NTASKS" in environment and not is_shell:
            tasks, local = number.get("SLURM_NTASKS"), number.get("SLURM_NTASKS_PER_NODE")
            return cls("slurm", number.get("SLURM_PROCID", 0), tasks, local)
        # The environment does not contain the global rank; this value is 0 only on rank 0.
        rank = max(number.get("LOCAL_RANK", 0), number.get("NODE_RANK", 0))
        return cls("lightning" if "LOCAL_RANK" in environment else "", rank)


def num_devices(trainer: Mapping[str, Any]) -> int:
    """Return the number of devices per machine in a Trainer's settings, without building a Trainer.

    Example:
        >>> num_devices({"accelerator": "cpu", "devices": "auto"}), num_devices({"devices": "0,1"})
        (1, 2)
    """
    devices: Any = trainer.get("devices", "auto")
    if isinstance(devices, (list, tuple)):
        return len(devices)  # pyright: ignore[reportUnknownArgumentType]
    text = str(devices).strip()
    if text not in ("auto", "-1"):
        try:
            return len([index for index in text.split(",") if index]) if "," in text else int(text)
        except ValueError as error:
            allowed = "a number, a list of indices, or auto"
            raise ConfigError(key="trainer.devices", value=text, allowed=allowed) from error
    return num_gpus(trainer) or 1


def num_gpus(trainer: Mapping[str, Any]) -> int:
    """Return the number of GPUs of this machine that a Trainer's accelerator can use."""
    from lightning.pytorch import accelerators

    cuda, mps = accelerators.CUDAAccelerator, accelerators.MPSAccelerator
    name = str(trainer.get("accelerator", "auto"))
    kinds = {"auto": (cuda, mps), "gpu": (cuda, mps), "cuda": (cuda,), "mps": (mps,)}.get(name, ())
    return next((kind.auto_device_count() for kind in kinds if kind.is_available()), 0)


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Reject more processes than GPUs of this machine; without GPUs, reject more than 4 processes per core.

    Example:
        >>> check_devices({"accelerator": "cpu", "devices": 99999})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: trainer.devices=99999: expected at most ...
    """
    on_cpu = str(trainer.get("accelerator", "auto")) in ("auto", "cpu")
    gpus, cores = num_gpus(trainer), os.cpu_count() or 1
    most = 4 * cores if on_cpu and not gpus else gpus
    if num_devices(trainer) > most:
        has = f"4 for each of {cores} cores" if on_cpu and not gpus else "as many GPUs as this machine has"
        raise ConfigError("trainer.devices", trainer["devices"], allowed=f"at most {most}, {has}")


def num_nodes(trainer: Mapping[str, Any]) -> int:
    """Return the number of machines in a Trainer's settings; 1 for `auto`."""
    found = trainer.get("num_nodes") or 1
    return 1 if found == "auto" else int(found)


def num_ranks(trainer: Mapping[str, Any]) -> int:
    """Return the number of processes that a run with these settings has on all machines."""
    return num_devices(trainer) * num_nodes(trainer)


def as_started(trainer: Mapping[str, Any], launch: Launch | None = None) -> dict[str, Any]:
    """Return a Trainer's settings, with `auto` replaced by the launcher's numbers of devices and machines.

    Example:
        >>> as_started({"devices": "auto", "num_nodes": "auto"}, Launch("slurm", 0, 16, 8))
        {'devices': 8, 'num_nodes': 2}
        >>> as_started({"devices": "auto", "num_nodes": "auto"}, Launch())
        {'devices': 'auto', 'num_nodes': 1}
    """
    launch, settings = Launch.of() if launch is None else launch, dict(trainer)
    tasks = launch.num_tasks or 0
    local = launch.num_local_tasks or (tasks if tasks == 1 else 0)
    if local and settings.get("devices", "auto") == "auto":
        settings["devices"] = local
    if settings.get("num_nodes") == "auto":
        settings["num_nodes"] = max(tasks // local, 1) if local else 1
    return settings | ({"accelerator": launch.accelerator} if launch.accelerator else {})


def check_machines(trainer: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Reject a process that would train alone although several processes were started.

    Raises:
        ConfigError: `PET_NNODES` or `WORLD_SIZE` announces several processes, but torchrun did not start
            this process. Also raised if `NODE_RANK` and `MASTER_ADDR` are set and `trainer.num_nodes` is
            `auto`.

    Example:
        >>> check_machines({"num_nodes": "auto"}, {"PET_NNODES": "2"})
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: PET_NNODES='2': expected torchrun or trainer.num_nodes: ...
    """
    processes = environment.get("WORLD_SIZE", "1")
    is_alone = {
        "PET_NNODES": environment.get("PET_NNODES", "1") != "1",
        "WORLD_SIZE": num_nodes(trainer) == 1 and processes not in ("1", str(num_ranks(trainer))),
        "NODE_RANK": trainer.get("num_nodes") == "auto"
        and {"NODE_RANK", "MASTER_ADDR"} <= environment.keys(),
    }
    for key in (key for key, is_wrong in is_alone.items() if is_wrong):
        allowed = "torchrun or trainer.num_nodes: several processes were started, and each would train alone"
        remedies = [
            "torchrun -m lightning_eff train ...",
            "trainer.num_nodes=2",
            f"env -u {key} lightning-eff train ...  # it is the only one",
        ]
        raise ConfigError(key=key, value=environment[key], allowed=allowed, remedies=remedies)


def check_tasks(trainer: Mapping[str, Any], launch: Launch) -> None:
    """Reject a number of started processes that differs from the number of devices.

    Raises:
        ConfigError: `trainer.devices` or `trainer.num_nodes` does not match the started processes, SLURM does
            not set tasks per node, or `check_machines` rejects the settings.

    Example:
        >>> check_tasks({"devices": 2}, Launch("torchrun", num_tasks=2, num_local_tasks=2))
        >>> check_tasks({"devices": 1}, Launch("torchrun", num_tasks=2, num_local_tasks=2))
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: trainer.devices=1: expected 2: torchrun started 2 ...
    """
    tasks, local = launch.num_tasks, launch.num_local_tasks
    if launch.by in ("", "lightning"):
        check_machines(trainer)
    if tasks is None or launch.by == "ray":  # Ray sets the number of devices itself
        return
    trainer = as_started(trainer, launch)
    devices, nodes = num_devices(trainer), num_nodes(trainer)
    if launch.by == "slurm" and local is None and tasks > 1:
        allowed = "--ntasks-per-node as well: --ntasks alone does not say which ranks share a machine"
        remedies = [f"srun --ntasks-per-node={devices} lightning-eff train ..."]
        raise ConfigError(key="SLURM_NTASKS", value=tasks, allowed=allowed, remedies=remedies)
    local = local or max(tasks // nodes, 1)
    restart = {
        "torchrun": f"torchrun --nnodes {nodes} --nproc-per-node {devices} -m lightning_eff train ...",
        "slurm": f"srun --nodes={nodes} --ntasks-per-node={devices} lightning-eff train ...",
    }[launch.by]
    expected = {"devices": (devices, local), "num_nodes": (nodes, max(tasks // local, 1))}
    for name, (found, needed) in expected.items():
        if found != needed:
            remedies = [f"trainer.{name}=auto", restart]
            if launch.by == "slurm" and tasks == 1:
                remedies.append("SLURM_JOB_NAME=bash lightning-eff train ...  # which starts the ranks")
            processes = "1 process" if tasks == 1 else f"{tasks} processes, {local} of them on this machine"
            allowed = f"{needed}: {launch.by} started {processes}"
            value = trainer.get(name, "auto" if name == "devices" else found)
            raise ConfigError(key=f"trainer.{name}", value=value, allowed=allowed, remedies=remedies)


def check_not_started(launch: Launch) -> None:
    """Reject `launch=ray` in one of several processes that another launcher has started.

    Raises:
        ConfigError: Another launcher has started the ranks.

    Example:
        >>> check_not_started(Launch("slurm", num_tasks=1))  # Ray starts the ranks inside a SLURM job
        >>> check_not_started(Launch("torchrun", num_tasks=2))
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: launch='ray': expected none: torchrun has started the ranks ...
    """
    has_pods = os.environ.get("PET_NNODES", "1") != "1"  # each pod would start a separate Ray
    if (launch.num_tasks or 1) > 1 or launch.by == "lightning" or has_pods:
        allowed = f"none: {'Kubeflow' if has_pods else launch.by} has started the ranks already"
        remedies = ["launch=none", "lightning-eff train ... launch=ray  # once"]
        raise ConfigError(key="launch", value="ray", allowed=allowed, remedies=remedies)


def check_local(values: Mapping[str, Any], reason: str) -> None:
    """Reject `launch=ray` in a verb that does not run on Ray."""
    if values.get("launch"):
        allowed, remedies = f"none: {reason}", ["launch=none"]
        raise ConfigError(key="launch", value="ray", allowed=allowed, remedies=remedies)


def starts_ranks(values: Mapping[str, Any], launch: Launch) -> bool:
    """Return whether this process has to start the ranks, with Ray or as processes on this machine."""
    if values.get("launch") and launch.by != "ray":
        check_not_started(launch)
        return True
    return not launch.by and num_ranks(values["trainer"]) > 1


def check_sweep(launch: Launch, recipe: str) -> None:
    """Reject a sweep if a launcher has started several processes.

    Raises:
        UsageError: A launcher has started several processes; the text suggests a command that works.
    """
    if (launch.num_tasks or 1) > 1:
        text = f"-m in {launch.num_tasks} processes of {launch.by}: each would run the whole sweep"
        text += f"\n  try: lightning-eff train {recipe} -m ...  # each run starts its own ranks"
        raise UsageError(text)


def make_folder(path: Path) -> None:
    """Create a folder below the output root.

    Raises:
        ConfigError: The folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be created ({error})"
        raise ConfigError(key="output_root", value=str(path), allowed=allowed) from error


def shared_run_dir(launch: Launch, folder: Path, *, has_default_name: bool) -> Path:
    """Return the same folder on all ranks of a run, although timestamps in folder names differ by rank.

    Args:
        launch: The launcher of this process, and the rank that the launcher assigned.
        folder: The folder in this rank's configuration.
        has_default_name: Whether the folder's name contains a timestamp; otherwise all ranks have the same
            name.

    Raises:
        UsageError: A rank did not answer in time, or the ranks have no store to exchange the folder.
    """
    if RUN_DIR in os.environ:
        return Path(os.environ[RUN_DIR])
    has_store = os.environ.get(AGENT_STORE) == "True"
    if (launch.num_tasks or 1) == 1 or not (has_default_name or has_store):
        return folder
    if launch.by == "slurm":
        step = [os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
        return folder.parent / "-".join(["slurm", *step])
    text = f"the ranks did not agree on a folder in torchrun's store within {WAIT_S:.0f} s, or there is none"
    text += "\n  try: hydra.run.dir=outputs/NAME"
    if not has_store:
        raise UsageError(text)
    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    # Why not `broadcast_object_list`: the process group does not exist yet.
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=WAIT_S))
        return agree(store, launch.rank, launch.num_tasks or 1, folder)
    except DistError as error:
        raise UsageError(text) from error


def agree(store: TCPStore, rank: int, num_ranks: int, folder: Path) -> Path:
    """Return rank 0's folder, and set the address to which the ranks of this attempt will connect.

    torchrun's store survives a restart, and still contains the addresses of the previous attempt. A restarted
    rank that reads an old address connects to a process that is gone. The restart number does not distinguish
    attempts, because each machine counts its restarts separately. Each rank therefore sends rank 0 a question
    with a random key. Rank 0 answers with the address of a new store, which ends when rank 0 ends.

    Source: https://github.com/pytorch/pytorch/issues/135712 and 167288, open in torch 2.13.

    Args:
        store: torchrun's store, with `WAIT_S` as its timeout.
        rank: The rank of this process.
        num_ranks: Number of ranks on all machines.
        folder: The folder in this rank's configuration.

    Raises:
        DistError: A rank did not ask in time, or rank 0 did not answer in time.
    """
    if rank:
        question = uuid4().hex
        store.set(f"{_KEY}/question/{rank}", question)
        answer = json.loads(store.get(f"{_KEY}/answer/{question}"))
        store.set(f"{_KEY}/received/{answer['attempt']}/{rank}", "")
    else:
        answer = {"attempt": uuid4().hex, "folder": str(folder), **_serve(os.environ["MASTER_ADDR"])}
        _answer_all(store, set(range(1, num_ranks)), answer)
    os.environ |= {"MASTER_ADDR": answer["host"], "MASTER_PORT": str(answer["port"]), AGENT_STORE: "False"}
    return Path(answer["folder"])


def _serve(host: str) -> dict[str, Any]:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    _served.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True))
    port = _served[-1].port
    # `host` is the address of torchrun's store, which may be on another machine than rank 0.
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        host = socket.getfqdn()
    return {"host": host, "port": port}


def _answer_all(store: TCPStore, ranks: set[int], answer: dict[str, Any]) -> None:
    """Answer the ranks' questions until all ranks have read the answer.

    A question in the store may come from a previous attempt, so questions are read and answered repeatedly.
    """
    from torch.distributed import DistStoreError

    end = time.monotonic() + WAIT_S
    while ranks:
        for rank in ranks:
            if store.check([f"{_KEY}/question/{rank}"]):
                question = store.get(f"{_KEY}/question/{rank}").decode()
                store.set(f"{_KEY}/answer/{question}", json.dumps(answer))
        ranks = {rank for rank in ranks if not store.check([f"{_KEY}/received/{answer['attempt']}/{rank}"])}
        if time.monotonic() > end:
            raise DistStoreError(f"rank {min(ranks)} did not ask for the run's folder")
        time.sleep(POLL_S if ranks else 0.0)
