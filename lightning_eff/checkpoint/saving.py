"""How a checkpoint in a folder (folder.py) is written, removed, and what dead processes left tidied up."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_eff.checkpoint import atomic_write
from lightning_eff.checkpoint.atomic_write import TEMPORARY, Written, make_folder, unheld, write_sealed
from lightning_eff.checkpoint.digest import bears_seal
from lightning_eff.checkpoint.lazy_tensor import Piece
from lightning_eff.checkpoint.sharded import FORMAT, INDEX, PART, VERSION, is_one, part_path, token_of
from lightning_eff.core.errors import CheckpointError

AT_ONCE = 64
"""Parts whose locks are held at a time; a process may have about 1,000 files open."""


def new_token() -> str:
    """Return the name of a save."""
    return secrets.token_hex(8)


def prepare(path: Path) -> None:
    """Make the folder that is saved to; a link gives way, and not what it leads to.

    Raises:
        CheckpointError: There is something of that name which is none of ours, and is left alone.
        OSError: The disk refuses.
    """
    if path.is_symlink():
        path.unlink()
    if path.exists() and not path.is_dir():
        text = f"checkpoint {path} was not saved: there is a file of that name, which is left alone"
        raise CheckpointError(text)
    if path.is_dir() and not is_one(path):
        others = [each.name for each in path.iterdir() if not _is_ours(each.name)]
        if others:
            text = f"checkpoint {path} was not saved: the folder of that name holds other things "
            text += f"({others[0]!a}), and is left alone"
            raise CheckpointError(text)
    make_folder(path)


def _is_ours(name: str) -> bool:
    return name == INDEX or bool(PART.fullmatch(name) or TEMPORARY.fullmatch(name))


@contextlib.contextmanager
def part(path: Path, token: str, rank: int, num_ranks: int, rows: Mapping[str, Piece]) -> Generator[Written]:
    """Write a rank's part; it goes again if the block raises, unless an index names it.

    Its lock is held within the block, so that nobody who tidies up takes it for left over.

    Raises:
        OSError: The disk refuses.
    """
    target = part_path(path, token, rank, num_ranks)
    with contextlib.ExitStack() as held:
        content = {"token": token, "rows": {place: list(piece) for place, piece in rows.items()}}
        written = write_sealed(target, lambda file: torch.save(content, file), held)
        try:
            yield written
        except BaseException:
            if token_of(path) != token:
                with contextlib.suppress(OSError):
                    target.unlink()
            raise


def write_index(
    path: Path, token: str, digests: Iterable[str], checkpoint: Mapping[str, Any], divided: Iterable[str]
) -> Written:
    """Make the parts of a save the checkpoint, in one step.

    Args:
        path: The folder.
        token: Of the save.
        digests: Of its parts, in the order of their ranks.
        checkpoint: All that is not divided.
        divided: Paths of what is.

    Raises:
        CheckpointError: A part is not there, as on a disk that ranks do not share.
        OSError: The disk refuses; the checkpoint before is as it was.
    """
    listed = list(digests)
    missing = [r for r in range(len(listed)) if not part_path(path, token, r, len(listed)).exists()]
    if missing:
        text = f"checkpoint {path} was not saved: rank 0 does not see there what rank {missing[0]} wrote"
        text += "\n  try: a folder on a disk that all ranks share"
        raise CheckpointError(text)
    content = {"format": FORMAT, "version": VERSION, "token": token, "parts": listed}
    content |= {"divided": list(divided), "checkpoint": dict(checkpoint)}
    return write_sealed(path / INDEX, lambda file: torch.save(content, file))


def remove(path: Path) -> None:
    """Remove a checkpoint: its index first, so that what a kill leaves is none; files of others stay.

    Raises:
        OSError: The disk refuses.
    """
    (path / INDEX).unlink()
    for each in list(path.iterdir()):
        if PART.fullmatch(each.name) and not each.is_symlink() and each.is_file():
            each.unlink(missing_ok=True)  # another rank may be tidying up
    atomic_write.remove_orphans(path)
    with contextlib.suppress(OSError):  # something of someone else's is in it
        path.rmdir()


def tidy(path: Path, *, just_saved: bool = False) -> list[Path]:
    """Remove from a folder what no index names and nobody is writing; the folder too, if nothing is left.

    Args:
        path: The folder.
        just_saved: Whether a save has ended here: then the parts before it go even where a file system has no
            locks.

    Returns:
        What was removed.
    """
    removed = atomic_write.remove_orphans(path)
    token = token_of(path)
    parts = sorted(each for each in path.iterdir() if PART.fullmatch(each.name))
    others = [each for each in parts if f"-{token}-" not in each.name and _is_sealed(each)]
    for first in range(0, len(others), AT_ONCE):
        with contextlib.ExitStack() as locks:
            free: list[Path] = []
            for each in others[first : first + AT_ONCE]:
                with contextlib.suppress(OSError):
                    locks.enter_context(unheld(each, without_locks=just_saved))
                    free.append(each)
            # A writer holds the locks until its index is there: only now it is known which one names these.
            token = token_of(path)
            if token is None and (path / INDEX).exists():
                break  # it is damaged: what it names is for a person to decide
            for each in free:
                if f"-{token}-" not in each.name:
                    each.unlink()
                    removed.append(each)
    if removed and token is None:
        with contextlib.suppress(OSError):
            path.rmdir()
    return removed


def _is_sealed(part: Path) -> bool:
    return not part.is_symlink() and part.is_file() and bears_seal(part)


def remove_orphans(folder: Path) -> list[Path]:
    """Remove what dead processes left in a folder of checkpoints, and in those that are folders.

    Returns:
        What was removed.
    """
    removed = atomic_write.remove_orphans(folder)
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.ckpt")):
            if path.is_dir() and not path.is_symlink():
                removed += tidy(path)
    return removed
