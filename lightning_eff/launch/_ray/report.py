"""Report the run's checkpoints to Ray where they lie, and find them again after a restart."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from typing_extensions import override

from lightning_eff.checkpoint.stored_weights import newest_valid

log = logging.getLogger(__name__)


class RayReport(Checkpoint):
    """Reports to Ray after each checkpoint of the run's `ModelCheckpoint`; all ranks at the same steps.

    Its base class puts it after the callbacks that save. The run's folder lies in Ray's storage, so nothing
    is copied: Ray keeps the folder of checkpoints, in which a restarted run takes the newest intact one.
    """

    def __init__(self) -> None:
        self._reported_step = 0

    def _report(self, trainer: pl.Trainer) -> None:
        savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
        # Lightning 2.6 keeps the step of the last save, and its file, in private attributes.
        step, path = max(
            (
                (vars(saver)["_last_global_step_saved"], vars(saver)["_last_checkpoint_saved"])
                for saver in savers
            ),
            default=(0, ""),
        )
        if step == self._reported_step or not path:
            return
        self._reported_step = step
        report(Path(path), step=step, epoch=trainer.current_epoch, is_first_rank=trainer.is_global_zero)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._report(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer)


def report(path: Path, *, step: int, epoch: int, is_first_rank: bool) -> None:
    """Tell Ray of a checkpoint; all ranks call it, and wait for each other.

    The file is named once, by rank 0; a folder, to which each rank has written its part, by all ranks.
    """
    train: Any = importlib.import_module("ray.train")
    checkpoint = train.Checkpoint(str(path.parent.absolute())) if is_first_rank or path.is_dir() else None
    train.report(
        {"step": step, "epoch": epoch, "checkpoint": path.name},
        checkpoint=checkpoint,
        checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
    )


def reported_checkpoint(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in the run's folder; None if none has been reported to Ray yet."""
    if importlib.import_module("ray.train").get_checkpoint() is None:
        return None
    found = newest_valid(folder)
    log.info("Ray has started the workers again: resumes from %s", found)
    return found
