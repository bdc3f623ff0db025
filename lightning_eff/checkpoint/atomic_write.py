"""Replace a file or a folder in one step: a kill, a full disk or an error leaves the old one as it was.

A temporary file in the same folder (a rename across file systems is a copy, which a kill cuts in two),
readable by its owner only, is written and synced, renamed over the old file, and the folder is synced too. A
process that dies meanwhile leaves its temporary file, which the next save or start removes. The kernel
decides whether its writer still lives: a writer holds a lock (`flock`) on its temporary file, released when
the process ends for any reason. Where a file system has no such locks nothing is removed.

Why not a process id in the file name: it would be wrong in another container, after a restart, or once the
number is reused.
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
from types import SimpleNamespace
from typing import Any

from lightning_eff.checkpoint.digest import FIRST_BYTES, DigestWriter, open_regular
from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.text import human_bytes

TEMPORARY = re.compile(r"\.durable-[0-9a-f]{16}\.tmp")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_FEWER = "keep fewer checkpoints: ModelCheckpoint(save_top_k=1)"
_ELSEWHERE = "a writable folder: ModelCheckpoint(dirpath=...), output_root=..."
REMEDIES = {
    errno.ENOSPC: f"free some space, or {_FEWER}",
    errno.EDQUOT: f"free some of your quota, or {_FEWER}",
    errno.EFBIG: "allow larger files: ulimit -f unlimited",
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.EROFS: _ELSEWHERE,
    errno.ENOTDIR: _ELSEWHERE,
    errno.EIO: "check the system log for errors of this disk before writing more to it",
    errno.ENAMETOOLONG: "a shorter name: ModelCheckpoint(filename=...)",
}


@dataclass(frozen=True)
class Written:
    """A file that was written: its SHA-256 and its size in bytes."""

    digest: str
    num_bytes: int


def write_with_digest(path: Path, fill: Callable[[Any], object]) -> Written:
    """Replace a file by one with its SHA-256, which `fill` writes to a file object as `torch.save` does.

    Raises:
        CheckpointError: As `atomic_replace`.
        OSError: The disk failed (also where torch raised its own error for it); `path` is as it was.
    """
    with atomic_replace(path) as fd:
        writer = DigestWriter(fd)
        try:
            fill(writer)
        except RuntimeError as error:
            if writer.error is None:
                raise
            raise writer.error from error
        return Written(writer.finish(), writer.num_bytes)


@contextlib.contextmanager
def atomic_replace(path: Path) -> Generator[int]:
    """Yield the descriptor of a file that replaces `path` when the block ends and is removed if it raises.

    Raises:
        CheckpointError: `path` exists and is not a checkpoint; or it was replaced, but not its folder synced.
        OSError: The disk failed; `path` is as it was.
    """
    if os.path.lexists(path) and not path.is_symlink():  # a link is replaced itself, not its target
        if path.is_dir():
            raise CheckpointError(f"checkpoint {path} was not saved: a folder of that name exists")
        head = b"?"
        if path.is_file():
            with open_regular(path) as file:
                head = file.read(512)
        # An empty file may be replaced, and one that begins as `torch.save` begins.
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
            is_file = path.is_file() and not path.is_symlink()
            os.fchmod(fd, stat.S_IMODE(path.stat().st_mode) if is_file else 0o666 & ~_umask())
            os.fsync(fd)  # content before the name: else a power loss could leave an empty file
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)
        try:
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
    """Yield an empty folder that becomes the new `folder` when the block ends and is removed if it raises."""
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    make_folder(folder.parent)
    temporary = folder.parent / f".durable-{secrets.token_hex(8)}.tmp"
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync each of them."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync_folder(path.parent)


def remove_temporary_files(folder: Path) -> list[Path]:
    """Remove and return the temporary files of dead writers; a living writer's file stays."""
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if not TEMPORARY.fullmatch(path.name) or not path.is_file() or path.is_symlink():
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed.append(path)
                finally:
                    os.close(fd)
    return removed


@contextlib.contextmanager
def writer_lock(folder: Path) -> Generator[None]:
    """Keep a temporary file in a folder until the block ends, which shows others that it is written to."""
    fd, path = _open_temporary(folder)
    try:
        yield
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def disk_errors(path: Path, fill: Callable[[Any], object]) -> Generator[None]:
    """Explain a disk's error in a save to `path`: cause, bytes needed and free, what is left, remedy.

    `fill` writes the checkpoint to a file object, here to measure its size.

    Raises:
        CheckpointError: The disk failed.
    """
    try:
        yield
    except OSError as error:
        sizes: list[int] = []
        # torch 2.13 ignores what `write` returns.
        fill(SimpleNamespace(write=lambda data: sizes.append(len(data)), flush=lambda: None))
        folder = next((path for path in path.absolute().parents if os.access(path, os.F_OK)), Path("/"))
        left = "the previous checkpoint is unchanged" if os.path.lexists(path) else "no partial file is left"
        needed, free = human_bytes(sum(sizes)), human_bytes(shutil.disk_usage(folder).free)
        remedy = REMEDIES.get(error.errno or 0)
        lines = [f"checkpoint {path} was not saved: {error.strerror or error}"]
        lines += [f"  it needs {needed}, {free} are free; {left}", *([f"  try: {remedy}"] if remedy else [])]
        raise CheckpointError("\n".join(lines)) from error


def _open_temporary(folder: Path) -> tuple[int, Path]:
    """Create and lock a temporary file; retry if another process removed it between the two."""
    while True:
        path = folder / f".durable-{secrets.token_hex(8)}.tmp"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if os.fstat(fd).st_nlink:
                return fd, path
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
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
