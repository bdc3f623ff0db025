"""A checkpoint file that carries its own SHA-256, and how it is verified.

`torch.save` writes a zip archive, and an archive may end with a comment: ours is `lightning-eff sha256:` and
the SHA-256 of every byte before those 64 characters. `torch.load`, stock Lightning and `unzip -z` read the
file as ever, and two commands verify it anywhere: `head -c -64 FILE | sha256sum` and `tail -c 64 FILE`.

Why not a file beside it: two files cannot be replaced in one step, so that after a kill a good checkpoint
would meet the digest of another; and a digest must travel when its file is copied or renamed.
Why not leave it at the archive's own CRC-32: torch does not look at them when it loads, and headers, sizes
and names are not covered by any.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from lightning_eff.core.errors import CheckpointError

SEAL = b"lightning-eff sha256:"
NUM_DIGEST_BYTES = 64
NUM_COMMENT_BYTES = len(SEAL) + NUM_DIGEST_BYTES
FIRST_BYTES = b"PK\x03\x04"
END_RECORD = b"PK\x05\x06"
NUM_END_BYTES = 22
"""An archive's last record without its comment; the last two bytes are the comment's length."""
_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFCHR: "character device", stat.S_IFBLK: "block device"}
_PIECE_BYTES = 1 << 22
_UNZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)
"""What Python's reader of archives raises about a damaged one."""


class SealingWriter:
    """What `torch.save` writes to: hashes while it writes, and puts the digest behind the last byte.

    Args:
        fd: An open file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self._pool = ThreadPoolExecutor(1)
        self.num_bytes = 0
        self.error: OSError | None = None
        """Why the file could not be written; torch puts an error of its own in front of it."""

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`, but for the last bytes, which may be the archive's end."""
        if len(data) < _PIECE_BYTES:
            self._held += data
            if len(self._held) >= _PIECE_BYTES:
                self._put(self._held[:-NUM_END_BYTES])
                del self._held[:-NUM_END_BYTES]
        else:
            view = memoryview(data)
            self._put(self._held)
            self._put(view[:-NUM_END_BYTES])
            self._held = bytearray(view[-NUM_END_BYTES:])
        return len(data)

    def flush(self) -> None:
        """Do nothing: the end is written by `seal`."""

    def seal(self) -> str:
        """Give the archive its comment; return the SHA-256 in it.

        Raises:
            CheckpointError: What was written is no archive without a comment.
        """
        end = bytes(self._held[-NUM_END_BYTES:])
        if not end.startswith(END_RECORD) or end[-2:] != b"\0\0":
            text = "torch.save did not write what it used to write: a zip archive without a comment"
            raise CheckpointError(text)
        self._put(self._held[:-2] + struct.pack("<H", NUM_COMMENT_BYTES) + SEAL)
        digest = self._hash.hexdigest()
        self._put(digest.encode())
        return digest

    def close(self) -> None:
        """Let the hashing thread go; the file stays open."""
        self._pool.shutdown()

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            hashing = self._pool.submit(self._hash.update, piece) if len(view) >= _PIECE_BYTES else None
            try:
                written = 0
                while written < len(piece):
                    written += os.write(self._fd, piece[written:])
            except OSError as error:
                self.error = error
                raise
            finally:
                self._hash.update(piece) if hashing is None else hashing.result()
                self.num_bytes += len(piece)


def verify(file: IO[bytes]) -> str | None:
    """Read a checkpoint file once and compare it with its digest.

    Args:
        file: Open for reading; it is at its beginning afterwards.

    Returns:
        The digest; None for a file of stock torch, which has none: its CRC-32s were compared instead, which
        cover the values and not what lies around them.

    Raises:
        CheckpointError: The file is damaged, cut off, or no checkpoint.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - NUM_COMMENT_BYTES))
    tail = file.read()
    file.seek(0)
    whole = file.read(len(FIRST_BYTES)) == FIRST_BYTES
    if tail.startswith(SEAL):
        digest = tail[-NUM_DIGEST_BYTES:].decode("ascii", "replace")
        _compare(file, size - NUM_DIGEST_BYTES, digest)
    elif whole and tail[-NUM_END_BYTES:].startswith(END_RECORD) and tail.endswith(b"\0\0"):
        digest = None
        _compare_parts(file)
    else:
        text = "it is cut off, or no checkpoint at all" if whole or not size else "it is no checkpoint"
        raise CheckpointError(text)
    file.seek(0)
    return digest


def _compare(file: IO[bytes], num_bytes: int, digest: str) -> None:
    found = hashlib.sha256()
    file.seek(0)
    while num_bytes and (piece := file.read(min(num_bytes, _PIECE_BYTES))):
        found.update(piece)
        num_bytes -= len(piece)
    if found.hexdigest() != digest:
        text = f"it is damaged: its SHA-256 is {found.hexdigest()[:12]}... and was {digest[:12]}..."
        raise CheckpointError(text)


def _compare_parts(file: IO[bytes]) -> None:
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except _UNZIP_ERRORS as error:
        text = f"it is damaged: {error}"
        raise CheckpointError(text) from error
    if damaged is not None:
        text = f"it is damaged: the CRC-32 of its part {damaged!r} is wrong"
        raise CheckpointError(text)


def verify_path(path: Path) -> str | None:
    """Verify a file by its name; see `verify`.

    Raises:
        CheckpointError: The file is damaged, cut off, no checkpoint, or cannot be read; it is named.
    """
    return read(path, verify)


def check_regular(path: Path) -> None:
    """Refuse what is no file that can be read to its end; the content is not looked at.

    Raises:
        CheckpointError, FileNotFoundError: As `read`.
    """
    read(path, lambda _: None)


def read(path: Path, how: Callable[[IO[bytes]], Any]) -> Any:
    """Open a checkpoint file and return what `how` makes of it; every complaint names the file.

    Raises:
        CheckpointError: It is no regular file, cannot be read, or `how` says so.
        FileNotFoundError: There is none.
    """
    try:
        with open_regular(path) as file:
            return how(file)
    except FileNotFoundError as error:
        text = f"checkpoint {path}: there is no such file"
        raise FileNotFoundError(text) from error
    except IsADirectoryError as error:
        text = f"checkpoint {path} is not loaded: it is a folder, and not a file"
        raise CheckpointError(text) from error
    except (OSError, CheckpointError) as error:
        text = f"checkpoint {path} is not loaded: {error}"
        raise CheckpointError(text) from error


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading: a FIFO would wait for a writer, and a device need not end.

    Raises:
        CheckpointError: It is no regular file.
        OSError: It cannot be opened.

    Example:
        >>> open_regular(Path("/dev/zero"))
        Traceback (most recent call last):
        lightning_eff.core.errors.CheckpointError: it is a character device, and no regular file
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind == stat.S_IFREG:
            return os.fdopen(os.dup(fd), "rb")
    finally:
        os.close(fd)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    text = f"it is a {_KINDS.get(kind, 'special file')}, and no regular file"
    raise CheckpointError(text)


def looks_like_one(path: Path) -> bool:
    """Say whether a file begins as `torch.save` begins, or is empty: then it may be replaced."""
    with open_regular(path) as file:
        head = file.read(512)
    return not head or (head.startswith(FIRST_BYTES) and b"/data.pkl" in head)


def bears_seal(path: Path) -> bool:
    """Say whether a file was written here, by its last bytes alone."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NUM_COMMENT_BYTES))
        return file.read().startswith(SEAL)
