"""Write checkpoint files that contain their own SHA-256, and verify such files.

`torch.save` writes a zip archive, which may end with a comment. Here the comment is `lightning-eff sha256:`
and 64 characters, which are the SHA-256 of all earlier bytes. `torch.load`, stock Lightning and `unzip -z`
read the file as usual. Two shell commands verify a file: `head -c -64 FILE | sha256sum` must print the
characters that `tail -c 64 FILE` prints. atomic_io.py and sharded.py verify each file before they load it.

Why not a separate digest file: two files cannot be replaced in one step, so a kill could leave a good
checkpoint with the digest of another checkpoint. A digest must also stay with its file when the file is
copied or renamed. Why not the archive's own CRC-32: torch does not check the CRC-32 on load, and a CRC-32
covers neither headers, sizes nor names.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from lightning_eff.core.errors import CheckpointError

DIGEST_PREFIX = b"lightning-eff sha256:"
NUM_DIGEST_BYTES = 64
NUM_COMMENT_BYTES = len(DIGEST_PREFIX) + NUM_DIGEST_BYTES
FIRST_BYTES = b"PK\x03\x04"
END_RECORD = b"PK\x05\x06"
NUM_END_BYTES = 22
"""Length of an archive's end record without a comment; the last two bytes are the comment's length."""
_CHUNK_BYTES = 1 << 22
_UNZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)
"""Errors that `zipfile` raises for a damaged archive."""


class DigestWriter:
    """File object for `torch.save` that hashes the bytes, and writes the hash as the archive's comment."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._hash = hashlib.sha256()
        # The last NUM_END_BYTES stay in the buffer, because `finish` rewrites the end record.
        self._buffer = bytearray()
        self.num_bytes = 0
        self.error: OSError | None = None
        """The error of a failed write, which torch replaces by its own RuntimeError."""

    def write(self, data: bytes | memoryview) -> None:
        """Write `data` except its last bytes, which may be the archive's end record."""
        # torch.save writes many small pieces and a few large pieces. Small pieces share one system call.
        if len(data) < _CHUNK_BYTES:
            self._buffer += data
            if len(self._buffer) >= _CHUNK_BYTES:
                self._write_out(self._buffer[:-NUM_END_BYTES])
                del self._buffer[:-NUM_END_BYTES]
        else:
            self._write_out(self._buffer)
            self._write_out(memoryview(data)[:-NUM_END_BYTES])
            self._buffer = bytearray(data[-NUM_END_BYTES:])

    def flush(self) -> None:
        """Do nothing, because `finish` writes the remaining bytes."""

    def finish(self) -> str:
        """Write the archive's comment and return the SHA-256 in it."""
        end = bytes(self._buffer[-NUM_END_BYTES:])
        if not end.startswith(END_RECORD) or end[-2:] != b"\0\0":
            raise CheckpointError(
                "torch.save did not write a zip archive without a comment, as torch 2.13 does"
            )
        # The last 2 bytes of the end record are the length of the comment that follows.
        self._write_out(self._buffer[:-2] + struct.pack("<H", NUM_COMMENT_BYTES) + DIGEST_PREFIX)
        digest = self._hash.hexdigest()
        self._write_out(digest.encode())
        return digest

    def _write_out(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)
        rest = memoryview(data)
        try:
            # `os.write` may write fewer bytes than requested, for example at a limit of the file system.
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.error = error
            raise


def verify(file: IO[bytes]) -> str | None:
    """Compare a checkpoint file with its digest, and return the digest.

    Another thread may read the file at the same time. A file of stock torch has no digest. For such a file,
    compare the archive's CRC-32s, which cover only the values, and return None.

    Raises:
        CheckpointError: The file is damaged, cut off, or not a checkpoint.
    """
    fd = file.fileno()  # `pread` below leaves the position of the file object unchanged
    size = os.fstat(fd).st_size
    tail = os.pread(fd, NUM_COMMENT_BYTES, max(0, size - NUM_COMMENT_BYTES))
    is_archive = os.pread(fd, len(FIRST_BYTES), 0) == FIRST_BYTES
    if tail.startswith(DIGEST_PREFIX):
        digest = tail[-NUM_DIGEST_BYTES:].decode("ascii", "replace")
        found, position, chunk = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK_BYTES))
        # The digest covers everything before its own 64 characters, the prefix included.
        while num_bytes := os.preadv(fd, [chunk[: size - NUM_DIGEST_BYTES - position]], position):
            found.update(chunk[:num_bytes])
            position += num_bytes
        if found.hexdigest() != digest:
            raise CheckpointError(
                f"it is damaged: its SHA-256 is {found.hexdigest()[:12]}..., expected {digest[:12]}..."
            )
        return digest
    # Stock torch writes no comment, so a complete file ends with an end record with comment length 0.
    if not (is_archive and tail[-NUM_END_BYTES:].startswith(END_RECORD) and tail.endswith(b"\0\0")):
        raise CheckpointError(
            "it is cut off or not a checkpoint" if is_archive or not size else "it is not a checkpoint"
        )
    try:
        with zipfile.ZipFile(file.name) as archive:
            damaged = archive.testzip()
    except _UNZIP_ERRORS as error:
        raise CheckpointError(f"it is damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"it is damaged: the CRC-32 of its entry {damaged!r} is wrong")
    return None


def read_with(path: Path, reader: Callable[[IO[bytes]], Any]) -> Any:
    """Open a checkpoint file and return `reader(file)`; each error names the file.

    Raises:
        CheckpointError: The file is not a regular file, cannot be read, or is rejected by `reader`.
        FileNotFoundError: The file does not exist.
    """
    try:
        with open_regular(path) as file:
            return reader(file)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"checkpoint {path}: there is no such file") from error
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {path} is not loaded: {error}") from error


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; reject FIFOs, which would block, and devices, which may never end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"it is {'a folder' if path.is_dir() else 'not a regular file'}")
    return path.open("rb")


def has_digest(path: Path) -> bool:
    """Return whether a file ends with a digest of this module, by reading only the last bytes."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NUM_COMMENT_BYTES))
        return file.read().startswith(DIGEST_PREFIX)
