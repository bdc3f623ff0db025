"""Run `train` in a worker of Ray, as in any other rank, and write output and errors to files.

ray_driver.py sends `work` to each worker. The worker sets torchrun's environment variables, so Lightning and
this package treat the worker as a rank of torchrun. Ray calls `work` in a thread, which receives no signals,
so the driver writes signals to a file (launch/stop.py). The worker's output goes to another file, which the
driver prints. Ray itself would print each line twice, prefixed with the worker's name.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from lightning_eff.checkpoint.stored_weights import newest_valid
from lightning_eff.core.errors import (
    PRE_RUN_ERRORS,
    ConfigError,
    EnvironmentLacksError,
    exit_code,
    root_cause_line,
)
from lightning_eff.launch.job import RAY, RUN_DIR, Launch
from lightning_eff.launch.ranks import ERROR_FILE, STOPPED, error_log, report_error
from lightning_eff.launch.stop import STOP_FILE

log = logging.getLogger(__name__)

FOLDER = "ray"
"""Subfolder of the run's folder, for the files that driver and workers exchange; removed at the end."""


def exchanged(folder: Path, name: str) -> Path:
    """Return the path of a file that driver and workers exchange in a run's folder.

    `rank0.stdout` and `rank0.stderr` contain rank 0's output, and `rank0.error` contains rank 0's error.
    After rank 0 has ended, `code` contains its exit code. `stop` contains the signal that the driver has
    received; before a signal, `stop` is empty.
    """
    return folder / FOLDER / name


def work(config: dict[str, Any]) -> None:
    """Train in this worker.

    Args:
        config: `train` (the function), its `words`, the run's `folder`, the driver's working directory
            `cwd`, and whether each worker has a `gpu`.

    Raises:
        RuntimeError: The run failed. After a signal or an invalid setting, `work` returns without an error,
            so that Ray does not restart the worker.
    """
    folder, rank = Path(config["folder"]), int(os.environ["RANK"])
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "ray",
        "GROUP_RANK": os.environ["NODE_RANK"],
        RAY: "cuda" if config["gpu"] else "cpu",  # a worker without a GPU may still see other workers' GPUs
        RUN_DIR: str(folder),
        STOP_FILE: str(exchanged(folder, "stop")),
        ERROR_FILE: str(exchanged(folder, f"rank{rank}.error")),
    }
    launch = Launch.of()
    _forget_last_attempt(folder, launch)
    os.chdir(config["cwd"])
    sys.path.insert(0, config["cwd"])  # for the user's own classes
    with ExitStack() as stack:
        for stream, redirect in {"stdout": redirect_stdout, "stderr": redirect_stderr}.items():
            file = exchanged(folder, f"rank{rank}.{stream}").open("a", buffering=1, encoding="utf-8")
            stack.enter_context(redirect(stack.enter_context(file)))
        # The command will set a handler on the root logger. Lightning, imported earlier, found no handler and
        # added its own handlers, which would log each line a second time.
        for name in ("", "lightning", "lightning.fabric", "lightning.pytorch"):
            logging.getLogger(name).handlers.clear()
            logging.getLogger(name).propagate = True
        code = _run(config["train"], config["words"], folder, launch)
    if not rank:
        exchanged(folder, "code").write_text(str(code))


def _forget_last_attempt(folder: Path, launch: Launch) -> None:
    """Remove the error files of the last attempt, so that the driver does not report its errors again.

    Raises:
        RuntimeError: This machine does not see the run's folder.
    """
    if not exchanged(folder, "stop").is_file():
        text = f"the machine of rank {launch.rank} does not see {folder}: "
        text += "output_root must be shared by all machines"
        raise RuntimeError(text)
    exchanged(folder, f"rank{launch.rank}.error").unlink(missing_ok=True)
    error_log(folder, launch.rank).unlink(missing_ok=True)
    # After a restart with fewer workers, the errors of missing ranks must not remain.
    if not launch.rank:
        for file in (folder / FOLDER).glob("rank*.error"):
            if int(file.stem.removeprefix("rank")) >= (launch.num_tasks or 1):
                file.unlink(missing_ok=True)


def _run(train: Callable[[Sequence[str]], None], words: Sequence[str], folder: Path, launch: Launch) -> int:
    """Train; return the exit code if the run finished, was stopped, or would fail again after a restart.

    Raises:
        RuntimeError: The run failed. Ray pickles the error, and not every error class can be pickled.
    """
    try:
        check_even(launch)
        if os.environ[RAY] == "cuda":
            device: Any = importlib.import_module("ray.train.torch").get_device()
            check_device(device, int(os.environ["LOCAL_RANK"]))
        train(words)
    except BaseException as error:  # noqa: BLE001 - Ctrl-C and SystemExit end in an exit code too
        code = exit_code(error)
        if code in STOPPED:
            return code
        report_error(error)
        file = exchanged(folder, f"rank{launch.rank}.error")
        failed_s = file.stat().st_mtime  # lets the driver find the rank that failed first
        file.write_text(json.dumps(json.loads(file.read_text()) | {"exit_code": code}))
        os.utime(file, (failed_s, failed_s))
        if isinstance(error, PRE_RUN_ERRORS):
            return code  # the error is the same on all ranks, and no rank has trained
        raise RuntimeError(root_cause_line(error)) from None
    return 0


def check_even(launch: Launch) -> None:
    """Reject machines with different numbers of workers; Lightning assumes equal numbers."""
    if not dist.is_initialized():
        return
    counts: list[int] = [0] * (launch.num_tasks or 1)
    dist.all_gather_object(counts, launch.num_local_tasks)
    if len(set(counts)) > 1:
        found = sorted(set(counts))
        allowed = f"a number that divides evenly among the machines; they have {found} workers"
        raise ConfigError(key="launch.workers", value=launch.num_tasks, allowed=allowed)


def check_device(device: Any, local_rank: int) -> None:
    """Reject a GPU whose index is not the worker's local rank: Lightning uses `devices[local_rank]`.

    `device` is the device that Ray assigned, with its index among the visible devices.
    """
    if device.type == "cuda" and device.index != local_rank:
        text = (
            f"local rank {local_rank} has {device}: Lightning would use cuda:{local_rank}, another worker's"
        )
        text += "\n  try: start Ray so that this run's workers get a machine's first GPUs"
        raise EnvironmentLacksError(text)


class RayReport(Checkpoint):
    """Reports each checkpoint of the run's `ModelCheckpoint` to Ray, on all ranks at the same step.

    The base class `Checkpoint` makes Lightning call `RayReport` after the callbacks that save. The run's
    folder is Ray's storage, so nothing is copied. Ray stores the path of this folder. A restarted run finds
    the newest intact checkpoint there.
    """

    def __init__(self) -> None:
        self._reported_step = 0

    def _report(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        # Lightning 2.6 keeps the step and the file of the last save in private attributes.
        saved = [
            (vars(saver)["_last_global_step_saved"], vars(saver)["_last_checkpoint_saved"])
            for saver in trainer.checkpoint_callbacks
            if isinstance(saver, ModelCheckpoint)
        ]
        step, file = max(saved, default=(0, ""))
        if step == self._reported_step or not file:
            return
        self._reported_step = step
        path = Path(file)
        train: Any = importlib.import_module("ray.train")
        # `report` waits for all ranks. A checkpoint file was written by rank 0, which alone passes the path.
        # A checkpoint folder was written by all ranks, so all ranks pass the path.
        is_named = trainer.is_global_zero or path.is_dir()
        train.report(
            {"step": step, "epoch": trainer.current_epoch, "checkpoint": path.name},
            checkpoint=train.Checkpoint(str(path.parent.absolute())) if is_named else None,
            checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
        )

    # The Trainer is the first argument of each of these hooks.
    on_train_batch_end = on_validation_end = on_train_epoch_end = on_train_end = _report


def reported_checkpoint(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in the run's folder; None if no checkpoint was reported to Ray.

    A worker that Ray has restarted resumes from this checkpoint.
    """
    if importlib.import_module("ray.train").get_checkpoint() is None:
        return None
    found = newest_valid(folder)
    log.info("Ray has started the workers again: resumes from %s", found)
    return found
