"""Start the ranks of a run as workers of Ray Train, which restarts all workers when one is lost.

`lightning-eff train RECIPE launch=ray launch.workers=4` starts Ray on this machine, or uses a running
cluster. Each worker runs the same `train` as any other rank, with the recipe's strategy. Ray sets
`trainer.devices` (workers per machine) and `trainer.num_nodes` (machines).

Each checkpoint of `model_checkpoint` is reported to Ray. Checkpoints are not copied, because the run's folder
is Ray's storage; all machines must therefore see the output root. When a worker is lost, Ray restarts all
workers, which resume from the newest intact checkpoint.

This file has the settings; ray_driver.py starts the workers, and each worker runs ray_worker.py.

Costs: 15 to 25 s to start Ray and its workers, and the same time at each restart. The packages need 225 MB,
    without their dependencies (pandas, pyarrow). A report to Ray waits until 2 s have passed since the
    previous report.
Conflicts: `trainer.devices` other than `auto` or the number of workers. torchrun and SLURM, because only one
    launcher can start the ranks. Machines with different numbers of workers.
Source: https://docs.ray.io/en/latest/train/train.html (Ray Train V2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_eff.core.arguments import Count, check_arguments
from lightning_eff.core.batch_size import check_global_batch
from lightning_eff.core.errors import ConfigError
from lightning_eff.launch.job import num_ranks


class Ray:
    """The settings of `launch=ray`.

    Args:
        workers: Number of ranks, or a minimum and a maximum. Within these limits, Ray starts as many workers
            as the cluster has resources for.
        gpu: Whether each worker gets a GPU; otherwise the run uses CPUs.
        cpus: Number of CPU cores reserved for each worker, and number of threads of each worker.
        max_failures: Maximum number of restarts after a worker failed or was lost; -1 for no limit.
        address: Address of a running cluster. If None, RAY_ADDRESS is used; if RAY_ADDRESS is not set either,
            Ray is started.

    Raises:
        ConfigError: A number is too small, or `workers` is neither one number nor two in ascending order.

    Example:
        >>> Ray(workers=[1, 4]).bounds, Ray(workers=2).bounds
        ((1, 4), (2, 2))
        >>> Ray(workers=[4, 1])
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: workers=[4, 1]: expected the least and then the most, ...
    """

    @check_arguments
    def __init__(
        self,
        *,
        workers: Count | tuple[Count, Count] = 1,
        gpu: bool = False,
        cpus: Count = 1,
        max_failures: int = 3,
        address: str | None = None,
    ) -> None:
        self.workers = workers
        self.gpu = gpu
        self.cpus = cpus
        self.max_failures = max_failures
        self.address = address
        least, most = (workers, workers) if isinstance(workers, int) else workers
        if least > most:
            allowed = "the least and then the most, as in [1, 4]"
            raise ConfigError(key="workers", value=workers, allowed=allowed)
        if max_failures < -1:
            raise ConfigError(
                key="max_failures", value=max_failures, allowed="at least 0, or -1 for no limit"
            )
        self.bounds = (least, most)

    @property
    def cluster(self) -> str:
        """The address of Ray's cluster; `local` if Ray is started for this run."""
        return self.address or os.environ.get("RAY_ADDRESS") or "local"

    def check(self, values: Mapping[str, Any]) -> None:
        """Check the settings of a run against the settings of `launch=ray`, before Ray is started.

        Raises:
            ConfigError: The number of devices, the accelerator or the checkpoint folder contradicts
                `launch=ray`, or the global batch size does not fit the number of workers.
        """
        trainer, (least, most) = values["trainer"], self.bounds
        devices = str(trainer.get("devices", "auto"))
        if devices not in ("auto", "-1") and not least == most == num_ranks(trainer):
            allowed = f"auto: launch.workers={self.workers} sets the number of ranks"
            remedies = ["trainer.devices=auto", f"launch.workers={num_ranks(trainer)}"]
            raise ConfigError(key="trainer.devices", value=devices, allowed=allowed, remedies=remedies)
        accelerator = str(trainer.get("accelerator", "auto"))
        accepted = ("auto", "gpu", "cuda") if self.gpu else ("auto", "cpu")
        if accelerator not in accepted:
            allowed = f"{' or '.join(accepted)} with launch.gpu={str(self.gpu).lower()}"
            remedies = [f"launch.gpu={str(not self.gpu).lower()}"]
            raise ConfigError(
                key="trainer.accelerator", value=accelerator, allowed=allowed, remedies=remedies
            )
        saver = (values.get("monitors") or {}).get("model_checkpoint") or {}
        folder = str(Path(values["run_dir"], "checkpoints"))
        if str(saver.get("dirpath") or folder) != folder:
            key = "monitors.model_checkpoint.dirpath"
            allowed = f"{folder}, where a restarted run looks for them"
            raise ConfigError(key=key, value=saver["dirpath"], allowed=allowed)
        check_global_batch(values, least, most)
