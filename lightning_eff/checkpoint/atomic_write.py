"""Replace a file in one step, or leave it as it is: what a kill, a full disk or a refusal cannot undo.

A temporary file in the same folder (elsewhere a rename would be a copy, which a kill cuts in two), readable
by its owner alone, is written, brought to the disk, renamed over the old file, and the folder brought to the
disk too. Whoever dies on the way leaves a temporary file; the next one to come removes it. Whether its writer
lives is asked of the kernel: a writer holds a lock (`flock`) on its temporary file, which ends with it,
however it ends. A process number in the name would be wrong in another container, after a restart, or when
the number is given again. Where a file system has no such locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_eff.checkpoint.digest import SealingWriter, looks_like_one
from lightning_eff.core.errors import CheckpointError

TEMPORARY = re.compile(r"\.durable-[0-9a-f]{16}\.tmp")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[int]:
    """Open a file that takes the place of `path` when the block ends, and leaves no trace when it raises.

    Raises:
        CheckpointError: What is at `path` is no checkpoint and is not overwritten; or all was written, and
            the disk did not confirm the new name.
        OSError: The disk refuses; `path` is as it was.
    """
    _check_replaceable(path)
    make_folder(path.parent)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fd, temporary = _open_temporary(path.parent)
        try:
            yield fd
            os.fchmod(fd, _mode(path))
            os.fsync(fd)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)
        _sync_name(folder, path)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Written:
    """What a file that was written holds: the SHA-256 in its end, and its size."""

    digest: str
    num_bytes: int


def write_sealed(
    path: Path, fill: Callable[[Any], object], held: contextlib.ExitStack | None = None
) -> Written:
    """Replace a file by one that `torch.save` fills and that carries its SHA-256.

    Args:
        path: Of the file.
        fill: Writes to what it is given.
        held: Keeps the new file's lock until it closes, which says that a save is not over; None for none.

    Raises:
        CheckpointError: As `replacing`.
        OSError: The disk refuses, whatever torch made of that; `path` is as it was.
    """
    writer: SealingWriter | None = None
    try:
        with replacing(path) as fd:
            writer = SealingWriter(fd)
            if held is not None:
                held.callback(os.close, os.dup(fd))  # a lock is the open file's, whichever number it has
            with contextlib.closing(writer):
                fill(writer)
                digest = writer.seal()
    except RuntimeError as error:
        cause = writer and writer.error
        if cause is None:
            raise
        raise cause from error
    return Written(digest, writer.num_bytes)


@contextlib.contextmanager
def appearing(folder: Path) -> Generator[Path]:
    """Yield an empty folder that is at `folder` when the block ends, whole, and is gone when it raises.

    Raises:
        FileExistsError: There is something at `folder`, which is left alone.
        OSError: The disk refuses.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    make_folder(folder.parent)
    temporary = folder.parent / f".durable-{secrets.token_hex(8)}.tmp"
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd) if path.is_file() else _sync_folder(fd)
            finally:
                os.close(fd)
        mask = os.umask(0o077)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fd = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync_folder(fd)
    finally:
        os.close(fd)


def _check_replaceable(path: Path) -> None:
    """Refuse to overwrite what is no checkpoint; a link is replaced, and not what it leads to."""
    if not os.path.lexists(path) or path.is_symlink():
        return
    if path.is_dir():
        text = f"checkpoint {path} was not saved: there is a folder of that name, which is left alone"
        raise CheckpointError(text)
    if not path.is_file() or not looks_like_one(path):
        text = f"checkpoint {path} was not saved: what is there is no checkpoint, and is not overwritten"
        raise CheckpointError(text)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each of them on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        fd = os.open(each.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _sync_folder(fd)
        finally:
            os.close(fd)


def _open_temporary(folder: Path) -> tuple[int, Path]:
    """Open a temporary file and hold its lock; again, if another process removed it between the two."""
    while True:
        path = folder / f".durable-{secrets.token_hex(8)}.tmp"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd)
            if os.fstat(fd).st_nlink:
                return fd, path
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)


def _lock(fd: int) -> None:
    """Wait for the lock of an open file, where its file system has locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _mode(path: Path) -> int:
    """Return the permissions of the file that is replaced, or those that any new file has."""
    if path.is_file() and not path.is_symlink():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # some network file systems have no such thing
            raise


def _sync_name(folder: int, path: Path) -> None:
    try:
        _sync_folder(folder)
    except OSError as error:
        text = (
            f"checkpoint {path} is written and whole, but the disk did not confirm its folder "
            f"({error.strerror}): after a loss of power the one before may be there again"
        )
        raise CheckpointError(text) from error


def remove_orphans(folder: Path) -> list[Path]:
    """Remove temporary files whose writer is dead; one that is being written stays.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    for path in _temporaries(folder):
        with contextlib.suppress(OSError), unheld(path):
            path.unlink()
            removed.append(path)
    return removed


@contextlib.contextmanager
def unheld(path: Path, *, without_locks: bool = False) -> Generator[None]:
    """Hold the lock of a file that nobody writes any more.

    Args:
        path: Of the file.
        without_locks: Go on without where the file system has none, and nobody knows.

    Raises:
        OSError: Its writer lives, or the system refuses.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not (without_locks and error.errno in _NO_LOCKS):
                raise
        yield
    finally:
        os.close(fd)


def _temporaries(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                yield path
