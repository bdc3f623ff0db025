"""Which checkpoint a run goes on from: it must be whole, and leave something to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # the error alone: nothing is unpickled here
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_eff.errors import CheckpointError, ConfigError
from lightning_eff.saved_with import inside
from lightning_eff.sealed import newest_whole, verify_path

SHARDED = (".metadata", "checkpoint", "latest")
"""What marks a folder as a checkpoint: torch's distributed format, Lightning's and DeepSpeed's."""

UNREADABLE = (CheckpointError, RuntimeError, UnpicklingError, EOFError, OSError, ValueError, LookupError)
"""What reading a file raises that is damaged or no checkpoint."""


def find_checkpoint(ckpt_path: str | None, folder: Path) -> Path | None:
    """Return the checkpoint to go on from.

    Args:
        ckpt_path: None for none, a path, or `last` for the newest below `folder` that is whole.
        folder: Where the runs of one recipe lie.

    Raises:
        ConfigError: There is none.

    Example:
        >>> find_checkpoint(None, Path("outputs/lm")) is None
        True
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        found = newest_whole(folder)
        if found is None:
            raise ConfigError(
                key="ckpt_path", value=ckpt_path, allowed=f"a checkpoint; there is none under {folder}"
            )
        return found
    path = Path(ckpt_path)
    if not path.exists() or (path.is_dir() and not any((path / name).exists() for name in SHARDED)):
        raise ConfigError(key="ckpt_path", value=ckpt_path, allowed="an existing checkpoint, or last")
    return path


def check_something_left(path: Path, trainer: pl.Trainer) -> None:
    """Refuse to go on from a damaged checkpoint, or from where the run would end: `fit` would return at once.

    Raises:
        ConfigError: So it is.
    """
    if not path.is_file():
        return
    try:
        verify_path(path)
        saved = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except UNREADABLE as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        allowed = f"a checkpoint of tensors and plain values ({reason})"
        raise ConfigError(key="ckpt_path", value=str(path), allowed=allowed) from error
    if not isinstance(saved, Mapping):
        allowed = "a checkpoint of a Trainer; this file holds something else"
        raise ConfigError(key="ckpt_path", value=str(path), allowed=allowed)
    step, limit = _number(saved, "global_step"), trainer.max_steps
    if 0 <= limit <= step:
        raise ConfigError(
            key="trainer.max_steps",
            value=limit,
            allowed=f"more than the {step} steps that {path} has behind it",
            remedies=[f"trainer.max_steps={2 * step}"],
        )
    epochs, max_epochs = _number(saved, "epoch") + 1, trainer.max_epochs
    batches_left = _batches_left(saved)
    if limit == -1 and max_epochs is not None and 0 <= max_epochs <= epochs and not batches_left:
        raise ConfigError(
            key="trainer.max_epochs",
            value=max_epochs,
            allowed=f"more than the {epochs} epochs that {path} has behind it",
            remedies=[f"trainer.max_epochs={2 * epochs}"],
        )


def _batches_left(saved: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint was saved in the middle of an epoch."""
    progress = inside(saved, "loops", "fit_loop", "epoch_loop.batch_progress")
    return not progress.get("is_last_batch", True)


def _number(saved: Mapping[str, Any], key: str) -> int:
    """Return a count of a checkpoint, which may hold what it likes there."""
    value = saved.get(key)
    return value if isinstance(value, int) else 0
