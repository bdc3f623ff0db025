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
    exclusive_lock,
    make_folder,
    remove_temporary_files,
    write_with_digest,
)
from lightning_eff.checkpoint.digest import has_digest
from lightning_eff.checkpoint.lazy_tensor import RowShard
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

MAX_LOCKS = 64
"""Shards locked at a time during clean-up; a process may have about 1,000 open files."""


def prepare(path: Path) -> str:
    """Make the folder to save to and return a new token; a link is replaced itself, not its target.

    Raises:
        CheckpointError: A file or a folder with other content exists; it is not touched.
        OSError: The disk failed.
    """
    if path.is_symlink():
        path.unlink()
    if path.exists() and not path.is_dir():
        text = f"checkpoint {path} was not saved: a file of that name exists"
        raise CheckpointError(text)
    if path.is_dir() and not is_sharded_checkpoint(path):
        names = [file.name for file in path.iterdir()]
        others = [n for n in names if not (n == INDEX or SHARD_FILE.fullmatch(n) or TEMPORARY.fullmatch(n))]
        if others:
            text = f"checkpoint {path} was not saved: a folder of that name holds other files ({others[0]!a})"
            raise CheckpointError(text)
    make_folder(path)
    return secrets.token_hex(8)


@contextlib.contextmanager
def write_shard(
    path: Path, token: str, rank: int, num_ranks: int, rows: Mapping[str, RowShard]
) -> Generator[Written]:
    """Write a rank's shard; it is removed if the block raises, unless an index names it.

    Its lock is held within the block, so that no clean-up takes it for a leftover.

    Raises:
        OSError: The disk failed.
    """
    target = shard_path(path, token, rank, num_ranks)
    with contextlib.ExitStack() as locks:
        content = {"token": token, "rows": {key: list(shard) for key, shard in rows.items()}}
        written = write_with_digest(target, lambda file: torch.save(content, file), locks)
        try:
            yield written
        except BaseException:
            if token_of(path) != token:
                with contextlib.suppress(OSError):
                    target.unlink()
            raise


def write_index(
    path: Path, token: str, digests: Iterable[str], checkpoint: Mapping[str, Any], sharded: Iterable[str]
) -> Written:
    """Make the shards of a save the checkpoint, in one step.

    Args:
        path: The folder.
        token: Of the save.
        digests: Of its shards, by rank.
        checkpoint: All that is not sharded, with outlines.
        sharded: Paths of sharded tensors.

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
    content |= {"divided": list(sharded), "checkpoint": dict(checkpoint)}
    return write_with_digest(path / INDEX, lambda file: torch.save(content, file))


def remove(path: Path) -> None:
    """Remove a checkpoint, its index first, so that a kill leaves no partial checkpoint; other files stay.

    Raises:
        OSError: The disk failed.
    """
    (path / INDEX).unlink()
    for file in list(path.iterdir()):
        if SHARD_FILE.fullmatch(file.name) and not file.is_symlink() and file.is_file():
            file.unlink(missing_ok=True)  # another rank may be cleaning up
    remove_temporary_files(path)
    with contextlib.suppress(OSError):  # other files are left in it
        path.rmdir()


def clean_up(path: Path, *, just_saved: bool = False) -> list[Path]:
    """Remove leftovers: files that no index names and no writer holds, then the folder if it is empty.

    Args:
        path: The folder.
        just_saved: Whether a save has just ended: then older shards go even where a file system has no locks.

    Returns:
        The removed files.
    """
    removed = remove_temporary_files(path)
    token = token_of(path)
    shards = sorted(
        file
        for file in path.iterdir()
        if SHARD_FILE.fullmatch(file.name) and not file.is_symlink() and file.is_file()
    )
    unnamed = [file for file in shards if f"-{token}-" not in file.name and has_digest(file)]
    for start in range(0, len(unnamed), MAX_LOCKS):
        with contextlib.ExitStack() as locks:
            locked: list[Path] = []
            for file in unnamed[start : start + MAX_LOCKS]:
                with contextlib.suppress(OSError):
                    locks.enter_context(exclusive_lock(file, ignore_missing_locks=just_saved))
                    locked.append(file)
            # A writer holds its locks until its index is written, so only now the index is final for these.
            token = token_of(path)
            if token is None and (path / INDEX).exists():
                break  # a damaged index: the user decides about the shards that it names
            for file in locked:
                if f"-{token}-" not in file.name:
                    file.unlink()
                    removed.append(file)
    if removed and token is None:
        with contextlib.suppress(OSError):
            path.rmdir()
    return removed


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove files of dead writers from a folder of checkpoints and from its checkpoint folders.

    Returns:
        The removed files.
    """
    removed = remove_temporary_files(folder)
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.ckpt")):
            if path.is_dir() and not path.is_symlink():
                removed += clean_up(path)
    return removed
