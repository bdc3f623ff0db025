"""Checkpoint files that appear in one step, for strategies that were given no `CheckpointIO`.

Under a Trainer the recipes, or the user, choose `checkpoint_io/durable`; Fabric's strategies fall back to
this, since what Lightning falls back to writes over the previous checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io import CheckpointIO
from typing_extensions import override

from lightning_eff.checkpoint import digest, sharded, sharded_write
from lightning_eff.checkpoint.atomic_write import save_error, write_with_digest
from lightning_eff.checkpoint.lazy_tensor import materialize
from lightning_eff.checkpoint.safe_load import load_plain
from lightning_eff.core.errors import CheckpointError


class AtomicFiles(CheckpointIO):
    """Write files with a SHA-256 in one step; verify files and folders, and load plain values only.

    Raises:
        CheckpointError: A checkpoint cannot be written (the previous one is unchanged) or is damaged.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "one.ckpt"
        >>> AtomicFiles().save_checkpoint({"weight": torch.ones(2)}, path)
        >>> AtomicFiles().load_checkpoint(path)
        {'weight': tensor([1., 1.])}
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        target = Path(path).expanduser()
        if storage_options is not None:
            text = f"storage_options={storage_options!r}: local disks have no options"
            raise TypeError(text)
        sharded_write.remove_leftovers(target.parent)

        def fill(file: Any) -> None:
            torch.save(checkpoint, file)

        try:
            write_with_digest(target, fill)
        except OSError as error:
            raise save_error(target, error, fill) from error

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        target = Path(path).expanduser()
        if weights_only is False:
            text = f"checkpoint {target}: weights_only=False would run code\n  try: weights_only=None"
            raise CheckpointError(text)
        location = map_location if map_location is not None else "cpu"
        if target.is_dir():
            return materialize(sharded.lazy_checkpoint(sharded.verified_index(target)), location)

        def load(file: IO[bytes]) -> Any:
            digest.verify(file)
            return load_plain(file, map_location=location)

        return digest.read_with(target, load)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        target = Path(path).expanduser()
        if sharded.is_sharded_checkpoint(target):
            sharded_write.remove(target)
        else:
            target.unlink(missing_ok=True)
