"""Verify checkpoints, files or folders of parts, and find the newest that is whole."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_eff.checkpoint import digest, sharded
from lightning_eff.core.errors import CheckpointError

log = logging.getLogger(__name__)


def verify_path(path: Path) -> None:
    """Verify a checkpoint by its name.

    Raises:
        CheckpointError: It is damaged, cut off, no checkpoint, or cannot be read; the file is named.
        FileNotFoundError: There is none.
    """
    if path.is_dir():
        sharded.verified(path)
    else:
        digest.verify_path(path)


def newest_whole(runs: Path) -> Path | None:
    """Return the newest checkpoint of the runs in a folder that is whole; name those that are not.

    Args:
        runs: Where the runs of one recipe lie.
    """
    # A link may lead nowhere, or to one that is found under its own name.
    found = [path for path in runs.glob("**/checkpoints/*.ckpt") if path.exists()]
    skipped = False
    by_file = {path.resolve(): path for path in sorted(found, key=Path.is_symlink, reverse=True)}
    for path in sorted(by_file.values(), key=_written_at, reverse=True):
        try:
            verify_path(path)
        except CheckpointError as error:
            log.warning("skipped: %s", error)
            skipped = True
        except FileNotFoundError:
            continue  # the run that it belongs to has removed it
        else:
            if skipped:
                log.warning("taken instead: %s", path)
            return path
    return None


def _written_at(path: Path) -> float:
    """Return when a checkpoint was written: a folder is as old as its index."""
    try:
        return (path / sharded.INDEX if sharded.is_one(path) else path).stat().st_mtime
    except FileNotFoundError:
        return 0.0
