"""World size, ranks and address of a worker, from Ray's context, in Lightning's terms."""

from __future__ import annotations

import importlib
import os
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from lightning_eff.core.errors import ConfigError, EnvironmentLacksError


def context() -> Any:
    """Return Ray's context of this worker."""
    return importlib.import_module("ray.train").get_context()


class RayProcesses(ClusterEnvironment):
    """The processes that Ray has started; their process group exists before the run begins."""

    def __init__(self) -> None:
        self._context = context()

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]  # set by Ray in all workers

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    @override
    def detect() -> bool:
        return False  # it is passed to the Trainer

    @override
    def world_size(self) -> int:
        return self._context.get_world_size()

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: it is Ray's."""

    @override
    def global_rank(self) -> int:
        return self._context.get_world_rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: it is Ray's."""

    @override
    def local_rank(self) -> int:
        return self._context.get_local_rank()

    @override
    def node_rank(self) -> int:
        return self._context.get_node_rank()


def keywords(*, gpu: bool) -> dict[str, Any]:
    """Return the Trainer's arguments for the devices of this worker's machine and the number of machines.

    Raises:
        ConfigError: The machines have different numbers of workers.
        EnvironmentLacksError: This worker's GPU is not the one that Lightning would take.
    """
    here = context()
    world_size, num_local = here.get_world_size(), here.get_local_world_size()
    check_even(num_local, world_size)
    if gpu:
        device: Any = importlib.import_module("ray.train.torch").get_device()
        check_device(device, here.get_local_rank())
    return {
        "accelerator": "cuda" if gpu else "cpu",  # a worker without a GPU of its own may see others' GPUs
        "devices": num_local,
        "num_nodes": world_size // num_local,
    }


def check_even(num_local: int, world_size: int) -> None:
    """Reject machines with different numbers of workers: Lightning multiplies devices by machines."""
    import torch.distributed as dist

    counts = [num_local]
    if dist.is_initialized():
        counts = [0] * world_size
        dist.all_gather_object(counts, num_local)
    if len(set(counts)) > 1:
        found = sorted(set(counts))
        allowed = f"a number that each machine gets the same part of; they have {found} workers"
        raise ConfigError(key="launch.workers", value=world_size, allowed=allowed)


def check_device(device: Any, local_rank: int) -> None:
    """Reject a GPU that is not the worker's by its local rank: Lightning takes `devices[local_rank]`.

    `device` is what Ray assigned, with its index among the visible ones.
    """
    if device.type == "cuda" and device.index != local_rank:
        text = (
            f"local rank {local_rank} has {device}: Lightning would use cuda:{local_rank}, another worker's"
        )
        text += "\n  try: start Ray so that this run's workers get a machine's first GPUs"
        raise EnvironmentLacksError(text)
