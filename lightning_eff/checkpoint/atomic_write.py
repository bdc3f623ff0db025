"""Write a file or a folder in one step, so that a kill, a full disk or an error leaves no partial content.

atomic_io.py and sharded.py write all checkpoints through this module. A temporary file is written in the same
folder, because a rename across file systems is a copy, and a kill can interrupt a copy. Only the owner can
read the temporary file. The file is synced and renamed over the old file, and then the folder is synced.

A process that dies during a write leaves its temporary file, which the next save or start removes. A living
writer holds a lock (`flock`) on its temporary file. The kernel releases the lock when the process ends for
any reason. On file systems without such locks, no temporary file is removed.

Why not a process id in the file name: the id would be wrong in another container, after a restart, or once
the number is reused.
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
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_eff.checkpoint.digest import FIRST_BYTES, DigestWriter, open_regular
from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.text import human_bytes

TEMPORARY = re.compile(r"\.durable-[0-9a-f]{16}\.tmp")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
REMEDY = "free some space, keep fewer checkpoints, or choose another folder: ModelCheckpoint(dirpath=...)"


@dataclass(frozen=True)
class Written:
    """SHA-256 and size in bytes of a file that was written."""

    digest: str
    num_bytes: int


def write_with_digest(path: Path, fill: Callable[[Any], object]) -> Written:
    """Replace a file by a new file with a SHA-256; `fill` writes the content to a file object.

    Raises:
        CheckpointError: As in `atomic_replace`.
        OSError: The disk failed, and `path` is unchanged; raised even if torch raised another error.
    """
    with atomic_replace(path) as fd:
        writer = DigestWriter(fd)
        try:
            fill(writer)
        except RuntimeError as error:
            # torch replaces the OSError by a RuntimeError without a cause; the writer has kept the OSError.
            if writer.error is None:
                raise
            raise writer.error from error
        return Written(writer.finish(), writer.num_bytes)


@contextlib.contextmanager
def atomic_replace(path: Path) -> Generator[int]:
    """Yield the descriptor of a new file, which replaces `path` at the block's end, or is removed on error.

    Raises:
        CheckpointError: `path` exists and is not a checkpoint, or `path` was replaced but its folder could
            not be synced.
        OSError: The disk failed; `path` is unchanged.
    """
    if os.path.lexists(path) and not path.is_symlink():  # a link itself is replaced, not its target
        if path.is_dir():
            raise CheckpointError(f"checkpoint {path} was not saved: a folder of that name exists")
        # A device or FIFO is never replaced.
        head = b"?"
        if path.is_file():
            with open_regular(path) as file:
                head = file.read(512)
        # An existing file may be replaced only if it is empty or starts like a file of `torch.save`.
        if head and not (head.startswith(FIRST_BYTES) and b"/data.pkl" in head):
            text = f"checkpoint {path} was not saved: the existing file is not a checkpoint and is not "
            text += "overwritten"
            raise CheckpointError(text)
    make_folder(path.parent)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fd, temporary = _open_temporary(path.parent)
        try:
            yield fd
            # So far only the owner can read the file. Set the mode of the old file, or the default mode.
            is_file = path.is_file() and not path.is_symlink()
            os.fchmod(fd, stat.S_IMODE(path.stat().st_mode) if is_file else 0o666 & ~_umask())
            os.fsync(fd)  # before the rename, because a power loss could leave an empty file
            # POSIX renames atomically: a reader sees the old file or the new one, never a mixture.
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)
        try:
            # A rename survives a power loss only once its folder is on the disk too.
            _sync_folder(folder)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path} was written completely, but its folder could not be synced "
                f"({error.strerror}): after a power loss the previous checkpoint may reappear"
            ) from error
    finally:
        os.close(folder)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Generator[Path]:
    """Yield an empty folder, which becomes `folder` at the block's end, or is removed on error."""
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    make_folder(folder.parent)
    temporary = folder.parent / f".durable-{secrets.token_hex(8)}.tmp"
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        # So far only the owner can read the folder.
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and sync each of these folders to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync_folder(path.parent)


def remove_temporary_files(folder: Path) -> list[Path]:
    """Remove and return the temporary files of dead writers; files of living writers stay."""
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            # Only regular files with this module's name pattern are ever removed.
            if not TEMPORARY.fullmatch(path.name) or not path.is_file() or path.is_symlink():
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    # A living writer holds the lock, so this raises an OSError; the system releases a dead
                    # writer's lock.
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed.append(path)
                finally:
                    os.close(fd)
    return removed


@contextlib.contextmanager
def writer_lock(folder: Path) -> Generator[None]:
    """Keep a locked temporary file in a folder until the block ends, to show that a writer is active."""
    fd, path = _open_temporary(folder)
    try:
        yield
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Convert a disk error during a save to `path` into an error with cause, free space and remedy.

    Raises:
        CheckpointError: The disk failed.
    """
    try:
        yield
    except OSError as error:
        folder = next((path for path in path.absolute().parents if os.access(path, os.F_OK)), Path("/"))
        left = "the previous checkpoint is unchanged" if os.path.lexists(path) else "no partial file is left"
        free = human_bytes(shutil.disk_usage(folder).free)
        text = f"checkpoint {path} was not saved: {error.strerror or error}"
        text += f"\n  {free} are free; {left}\n  try: {REMEDY}"
        raise CheckpointError(text) from error


def _open_temporary(folder: Path) -> tuple[int, Path]:
    """Create and lock a temporary file; retry if another process removes it before it is locked."""
    while True:
        path = folder / f".durable-{secrets.token_hex(8)}.tmp"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            # Before the file was locked, it looked like the file of a dead writer, so another process may
            # have removed it.
            if os.fstat(fd).st_nlink:
                return fd, path
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0o077)  # the umask can only be read by setting it
    os.umask(mask)
    return mask


def _sync_folder(folder: Path | int) -> None:
    """Sync a folder by its path or its open descriptor."""
    fd = folder if isinstance(folder, int) else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # some network file systems cannot sync folders
            raise
    finally:
        if isinstance(folder, Path):
            os.close(fd)
