"""Write, remove and clean up checkpoints in a folder; sharded.py has the format and reads it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_eff.checkpoint.atomic_write import (
    TEMPORARY,
    Written,
    make_folder,
    remove_temporary_files,
    write_with_digest,
    writer_lock,
)
from lightning_eff.checkpoint.digest import has_digest
from lightning_eff.checkpoint.lazy_tensor import RowShard
from lightning_eff.checkpoint.safe_load import with_plain_hparams
from lightning_eff.checkpoint.sharded import (
    FORMAT,
    INDEX,
    SHARD_FILE,
    VERSION,
    is_sharded_checkpoint,
    shard_path,
    token_of,
)
from lightning_eff.core.errors import CheckpointError


@contextlib.contextmanager
def new_save(path: Path) -> Generator[str]:
    """Make the folder to save to, and yield the save's token; one process does this for all ranks.

    Until the block ends, no clean-up takes shards in the folder for leftovers. Then those that the index does
    not name are removed: of the save before, or of this one if it failed. A link is replaced itself, not its
    target.

    Raises:
        CheckpointError: A file or a folder with other content exists; it is not touched.
        OSError: The disk failed.
    """
    if path.is_symlink():
        path.unlink()
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"checkpoint {path} was not saved: a file of that name exists")
    if path.is_dir() and not is_sharded_checkpoint(path):
        names = [file.name for file in path.iterdir()]
        others = [n for n in names if not (n == INDEX or SHARD_FILE.fullmatch(n) or TEMPORARY.fullmatch(n))]
        if others:
            raise CheckpointError(
                f"checkpoint {path} was not saved: a folder of that name holds other files ({others[0]!a})"
            )
    make_folder(path)
    try:
        with writer_lock(path):
            yield secrets.token_hex(8)
    finally:
        with contextlib.suppress(OSError):
            clean_up(path)


def write_shard(path: Path, token: str, rank: int, num_ranks: int, rows: Mapping[str, RowShard]) -> Written:
    """Write the rows of a rank."""
    content = {"token": token, "rows": {key: list(shard) for key, shard in rows.items()}}
    return write_with_digest(shard_path(path, token, rank, num_ranks), lambda file: torch.save(content, file))


def write_index(
    path: Path, token: str, digests: Iterable[str], checkpoint: Mapping[str, Any], sharded: Iterable[str]
) -> Written:
    """Make the shards of a save, whose digests are listed by rank, the checkpoint, in one step.

    Raises:
        CheckpointError: A shard is missing, as on a disk that ranks do not share.
        OSError: The disk failed; the previous checkpoint is unchanged.
    """
    listed = list(digests)
    missing = [r for r in range(len(listed)) if not shard_path(path, token, r, len(listed)).exists()]
    if missing:
        text = f"checkpoint {path} was not saved: the shard of rank {missing[0]} is not visible to rank 0"
        text += "\n  try: a folder on a disk that all ranks share"
        raise CheckpointError(text)
    content = {"format": FORMAT, "version": VERSION, "token": token, "parts": listed}
    content |= {"divided": list(sharded), "checkpoint": with_plain_hparams(checkpoint)}
    return write_with_digest(path / INDEX, lambda file: torch.save(content, file))


def remove(path: Path) -> None:
    """Remove a checkpoint, its index first, so that a kill leaves no partial checkpoint; other files stay."""
    (path / INDEX).unlink()
    for file in _shards_in(path):
        file.unlink(missing_ok=True)  # another rank may be cleaning up
    remove_temporary_files(path)
    with contextlib.suppress(OSError):  # other files are left in it
        path.rmdir()


def clean_up(path: Path) -> list[Path]:
    """Remove what no index names from a folder that nothing writes to, then the folder if it is empty."""
    # In this order: a save that began before the list was made still has its lock, or has its index now.
    shards = _shards_in(path)
    removed = remove_temporary_files(path)
    if any(TEMPORARY.fullmatch(file.name) for file in path.iterdir()):
        return removed
    token = token_of(path)
    if token is None and (path / INDEX).exists():
        return removed  # a damaged index: the user decides about the shards that it names
    for file in shards:
        if f"-{token}-" not in file.name and has_digest(file):
            file.unlink(missing_ok=True)
            removed.append(file)
    if removed and token is None:
        with contextlib.suppress(OSError):
            path.rmdir()
    return removed


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove and return files of dead writers in a folder of checkpoints and in its checkpoint folders."""
    removed = remove_temporary_files(folder)
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.ckpt")):
            if path.is_dir() and not path.is_symlink():
                removed += clean_up(path)
    return removed


def _shards_in(path: Path) -> list[Path]:
    files = sorted(file for file in path.iterdir() if SHARD_FILE.fullmatch(file.name))
    return [file for file in files if file.is_file() and not file.is_symlink()]
