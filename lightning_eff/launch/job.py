"""Which process of a run this is, who started it, and whether that fits what the Trainer is asked for.

A run on several devices is several processes. Lightning starts all but the first with the command of the
first; torchrun and SLURM start all of them, and know nothing of `trainer.devices`. Where the two disagree
Lightning waits for ranks that never come, or trains the same run several times, so it is compared first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_eff.core.errors import ConfigError, UsageError

FOLDER_WAIT_S = 300.0
"""How long a rank waits for the first to choose the run's folder: importing torch may take a minute."""


@dataclass(frozen=True)
class Launch:
    """How this process came to be.

    Args:
        by: `torchrun`, `slurm` or `lightning`, or an empty text for a process on its own, which
            Lightning may still start others for.
        rank: Of this process among all of the run.
        num_tasks: Processes that were started; None where Lightning starts as many as it needs.
        num_local_tasks: Of these on this machine, where that is known.
    """

    by: str = ""
    rank: int = 0
    num_tasks: int | None = None
    num_local_tasks: int | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read it from the variables that launchers set.

        Example:
            >>> Launch.of({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_NTASKS_PER_NODE": "2"})
            Launch(by='slurm', rank=3, num_tasks=4, num_local_tasks=2)
            >>> Launch.of({"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}).by  # a shell: Lightning starts
            ''
        """
        number = {key: int(text) for key, text in environment.items() if text.isdecimal()}
        if "TORCHELASTIC_RUN_ID" in environment:
            tasks, local = number.get("WORLD_SIZE"), number.get("LOCAL_WORLD_SIZE")
            return cls("torchrun", number.get("RANK", 0), tasks, local)
        shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if "SLURM_NTASKS" in environment and not shell:
            tasks, local = number.get("SLURM_NTASKS"), number.get("SLURM_NTASKS_PER_NODE")
            return cls("slurm", number.get("SLURM_PROCID", 0), tasks, local)
        rank, node = number.get("LOCAL_RANK", 0), number.get("NODE_RANK", 0)
        return cls("lightning", max(rank, node)) if rank or node else cls()


def num_devices(trainer: Mapping[str, Any]) -> int:
    """Return how many devices of this machine a Trainer's settings ask for; nothing is built.

    Example:
        >>> num_devices({"accelerator": "cpu", "devices": "auto"}), num_devices({"devices": "0,1"})
        (1, 2)
    """
    devices: Any = trainer.get("devices", "auto")
    if isinstance(devices, (list, tuple)):
        return len(devices)  # pyright: ignore[reportUnknownArgumentType]
    text = str(devices).strip()
    if text not in ("auto", "-1"):
        return len([part for part in text.split(",") if part]) if "," in text else _whole(text)
    from lightning.pytorch import accelerators

    cuda, mps = accelerators.CUDAAccelerator, accelerators.MPSAccelerator
    name = str(trainer.get("accelerator", "auto"))
    kinds = {"auto": (cuda, mps), "gpu": (cuda, mps), "cuda": (cuda,), "mps": (mps,)}.get(name, ())
    return next((kind.auto_device_count() for kind in kinds if kind.is_available()), 1)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            key="trainer.devices", value=text, allowed="a number, a list of indices, or auto"
        ) from error


def num_ranks(trainer: Mapping[str, Any]) -> int:
    """Return how many processes a run with these settings has on all machines."""
    return num_devices(trainer) * int(trainer.get("num_nodes") or 1)


def check_tasks(trainer: Mapping[str, Any], launch: Launch) -> None:
    """Refuse a number of started processes that is not the number of devices.

    Args:
        trainer: The settings of the group `trainer`.
        launch: Of this process.

    Raises:
        ConfigError: The numbers differ.

    Example:
        >>> check_tasks({"devices": 2}, Launch("torchrun", num_tasks=2, num_local_tasks=2))
        >>> check_tasks({"devices": 1}, Launch("torchrun", num_tasks=2, num_local_tasks=2))
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: trainer.devices=1: expected 2, one for each process of ...
    """
    tasks = launch.num_tasks
    if tasks is None:
        return
    asked, nodes = num_devices(trainer), int(trainer.get("num_nodes") or 1)
    local = launch.num_local_tasks
    if launch.by == "slurm" and local is None and tasks > 1:
        _refuse_unspread(tasks, asked)
    local = local or max(tasks // nodes, 1)
    num_nodes = max(tasks // local, 1)
    restart = {
        "torchrun": f"torchrun --nnodes {nodes} --nproc-per-node {asked} -m lightning_eff train ...",
        "slurm": f"srun --nodes={nodes} --ntasks-per-node={asked} lightning-eff train ...",
    }[launch.by]
    if asked != local:
        what = f"{local}, one for each process of {launch.by} on this machine"
        devices = f"trainer.devices={local}"
        remedies = [devices, restart]
        if launch.by == "slurm" and tasks == 1:
            remedies.append("SLURM_JOB_NAME=bash lightning-eff train ...  # Lightning starts the ranks")
        given = trainer.get("devices", "auto")
        raise ConfigError(key="trainer.devices", value=given, allowed=what, remedies=remedies)
    if asked * nodes != tasks:
        what = f"{num_nodes}: {launch.by} started {tasks} processes, and there are {asked} devices a machine"
        raise ConfigError(
            key="trainer.num_nodes",
            value=nodes,
            allowed=what,
            remedies=[f"trainer.num_nodes={num_nodes}", restart],
        )


def check_sweep(launch: Launch, recipe: str, overrides: Iterable[str], *, as_json: bool) -> None:
    """Refuse a sweep that several processes would run, each by itself, and reports that end elsewhere.

    Raises:
        UsageError: So it is; its text has the command that works.
    """
    if (launch.num_tasks or 1) > 1:
        text = f"-m in {launch.num_tasks} processes of {launch.by}: each of them would run the whole sweep"
        text += f"\n  try: lightning-eff train {recipe} -m ...  # each run starts its own ranks"
        raise UsageError(text)
    away = [line for line in overrides if line.startswith("hydra/launcher=submitit")]
    if as_json and away:
        text = f"--json: runs of {away[0]} end elsewhere; their reports are efficiency.json in their folders"
        raise UsageError(text)


def _refuse_unspread(tasks: int, asked: int) -> None:
    raise ConfigError(
        key="SLURM_NTASKS",
        value=tasks,
        allowed="--ntasks-per-node beside it: with --ntasks alone no one knows which ranks share a machine",
        remedies=[f"srun --ntasks-per-node={asked} lightning-eff train ..."],
    )


def shared_run_dir(launch: Launch, folder: Path, *, chosen_here: bool) -> Path:
    """Return the run's folder that all its processes use.

    Each process composes its own, named by the time. Lightning hands the first one's to those it starts.

    Args:
        launch: Of this process.
        folder: As composed here.
        chosen_here: Whether its name is the time of day, and not what a user set.

    Raises:
        UsageError: They cannot tell each other, or the first did not in time.
    """
    if launch.by == "slurm" and chosen_here and (launch.num_tasks or 1) > 1:
        step = [os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
        return folder.parent / "-".join(["slurm", *step])
    if launch.by != "torchrun" or (launch.num_tasks or 1) == 1:
        return folder
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Path(_from_first(launch, str(folder)))
    if chosen_here:
        text = "this torchrun keeps no store, in which its processes could agree on a folder"
        text += "\n  try: hydra.run.dir=outputs/NAME"
        raise UsageError(text)
    return folder


def _from_first(launch: Launch, text: str) -> str:
    """Exchange a text through the store that torchrun keeps; the process group does not exist yet."""
    from torch.distributed import (
        DistError,
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=FOLDER_WAIT_S))
    key = f"lightning_eff/folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if not launch.rank:
        store.set(key, text)
        return text
    try:
        return store.get(key).decode()
    except DistError as error:
        words = f"rank 0 did not say within {FOLDER_WAIT_S:.0f} s which folder the run uses"
        raise UsageError(words) from error
