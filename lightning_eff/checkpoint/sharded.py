"""A checkpoint in a folder: a file for each rank with its rows, and an index that makes them one.

    step-10.ckpt/
        index.ckpt                              what is not divided, and the parts' SHA-256
        part-0123456789abcdef-0-of-2.ckpt       the rows of rank 0, by each tensor's place in the checkpoint
        part-0123456789abcdef-1-of-2.ckpt

Every file is one of `torch.save`'s that carries its own SHA-256 (checkpoint/digest.py), appears in one step
(checkpoint/atomic_write.py), and holds tensors and plain values alone. A save writes parts under new names,
then the index, in one step, then removes the parts that it does not name: at any moment the index names parts
of one save, all of them complete, so that the checkpoint before survives whatever happens. Who dies on the
way leaves files that no index names; the next save or start removes them, unless a writer still holds their
locks. A folder without an index is no checkpoint.

The index holds no names of files, for what a checkpoint says is never joined to a path: they follow from a
token of 16 hexadecimal digits and the number of parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_eff.checkpoint.digest import read, verify, verify_path
from lightning_eff.checkpoint.lazy_tensor import Piece, in_rows, mapped
from lightning_eff.checkpoint.safe_load import check_version, load_plain
from lightning_eff.core.errors import CheckpointError

INDEX = "index.ckpt"
FORMAT = "lightning_eff/parts"
VERSION = 1
_TOKEN = re.compile(r"[0-9a-f]{16}")
PART = re.compile(r"part-[0-9a-f]{16}-[0-9]{1,6}-of-[0-9]{1,6}\.ckpt")
FOREIGN = {
    ".metadata": "torch's distributed checkpoint, which runs code when it is loaded\n"
    "  try: python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER, if FSDPStrategy wrote it\n"
    "  try: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE, for its weights",
    "checkpoint": "DeepSpeed's, by Lightning, which runs code when it is loaded\n"
    "  try: lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict(FOLDER, FILE)",
    "latest": "DeepSpeed's, which runs code when it is loaded\n"
    "  try: python FOLDER/zero_to_fp32.py FOLDER DIR, for its weights",
}
"""What marks the folder of another format, and how it becomes a file."""


@runtime_checkable
class Keeper(Protocol):
    """A plugin for checkpoints that has to know of folders which a strategy writes and reads."""

    def folder_saved(self, path: Path, num_bytes: int, duration_s: float) -> None:
        """Take note of a folder that is on the disk."""
        ...

    def folder_loaded(self, path: Path) -> None:
        """Take note of a folder that was verified and loaded."""
        ...


@dataclass(frozen=True)
class Index:
    """What an index says.

    Args:
        folder: Where it lies.
        token: Of the save.
        digests: The SHA-256 of each part.
        checkpoint: All that is not divided, with outlines in place of what is.
        divided: Paths of the first appearances of what is.
    """

    folder: Path
    token: str
    digests: tuple[str, ...]
    checkpoint: dict[str, Any]
    divided: frozenset[str]

    def part(self, rank: int) -> Path:
        """Return where a rank's part lies."""
        return part_path(self.folder, self.token, rank, len(self.digests))


def is_one(path: Path) -> bool:
    """Say whether a folder is such a checkpoint, by its index's presence alone."""
    return path.is_dir() and (path / INDEX).is_file()


def what_is(path: Path) -> str:
    """Return in words what a folder is that is no such checkpoint, and how it becomes one, if it can."""
    found = [words for name, words in FOREIGN.items() if (path / name).exists()]
    if found:
        return f"a folder in another format, {found[0]}".replace("FOLDER", str(path))
    return f"a folder without {INDEX}: a save that did not end, or no checkpoint"


def part_path(folder: Path, token: str, rank: int, num_ranks: int) -> Path:
    """Return where a rank's part lies."""
    return folder / f"part-{token}-{rank}-of-{num_ranks}.ckpt"


def read_index(path: Path) -> Index:
    """Verify a folder's index and return what it says; parts are not looked at.

    Raises:
        CheckpointError: It is damaged, or of another format.
        FileNotFoundError: There is no such folder.
    """
    if not is_one(path):
        if path.is_dir():
            text = f"checkpoint {path} is not loaded: it is {what_is(path)}"
            raise CheckpointError(text)
        text = f"checkpoint {path}: there is no such folder"
        raise FileNotFoundError(text)

    def content(file: IO[bytes]) -> Any:
        if verify(file) is None:
            text = "it has no SHA-256"
            raise CheckpointError(text)
        said = load_plain(file)
        check_version(said.get("checkpoint") if isinstance(said, dict) else None)
        return said

    return _index(path, read(path / INDEX, content))


def _index(path: Path, said: Any) -> Index:
    """Return an index of what a file holds, which may be anything."""
    said = said if isinstance(said, dict) else {}
    version = said.get("version")
    if said.get("format") != FORMAT or type(version) is not int or version != VERSION:
        newer = f", of format {version}" if isinstance(version, int) and version > VERSION else ""
        text = f"checkpoint {path / INDEX} is not loaded: it is no index of this version{newer}"
        raise CheckpointError(text)
    token, digests, divided, checkpoint = (said.get(k) for k in ("token", "parts", "divided", "checkpoint"))
    if (
        not (isinstance(token, str) and _TOKEN.fullmatch(token) and isinstance(checkpoint, dict))
        or not (isinstance(digests, list) and digests and all(isinstance(each, str) for each in digests))
        or not (isinstance(divided, list) and all(isinstance(each, str) for each in divided))
    ):
        text = f"checkpoint {path / INDEX} is not loaded: it does not say which parts there are"
        raise CheckpointError(text)
    return Index(path, token, tuple(digests), checkpoint, frozenset(divided))


def token_of(path: Path) -> str | None:
    """Return the token of the save that a folder's index is of; None without an index that is whole."""
    try:
        return read_index(path).token
    except (CheckpointError, OSError):
        return None


def verify_parts(index: Index, ranks: Iterable[int] | None = None) -> None:
    """Compare parts with the SHA-256 that the index has of them.

    Args:
        index: Says which there are.
        ranks: Whose; None for all.

    Raises:
        CheckpointError: One is missing, damaged, or of another save; it is named.
    """
    for rank in range(len(index.digests)) if ranks is None else ranks:
        file = index.part(rank)
        try:
            found = verify_path(file)
        except FileNotFoundError as error:
            text = f"checkpoint {index.folder} is not loaded: its part {file.name} is missing"
            raise CheckpointError(text) from error
        if found != index.digests[rank]:
            text = f"checkpoint {file} is not loaded: it is whole, and not the one that its index names"
            raise CheckpointError(text)


def verified(path: Path) -> Index:
    """Verify a folder's index and every part.

    Raises:
        CheckpointError: A file is missing, damaged, or of another save; it is named.
        FileNotFoundError: There is no such folder.
    """
    index = read_index(path)
    verify_parts(index)
    return index


def joined(index: Index) -> dict[str, Any]:
    """Return a checkpoint whose parts are verified; its divided tensors are read when they are needed.

    Raises:
        CheckpointError: Parts hold something else than the rows that belong there.
    """
    places: dict[str, list[Piece]] = {place: [] for place in index.divided}
    for rank in range(len(index.digests)):
        for place, piece in _rows(index.part(rank)).items():
            if place in places:
                places[place].append(piece)
    known: dict[int, Tensor] = {}

    def put(place: str, tensor: Tensor) -> Tensor:
        if place in places and tensor.is_meta and id(tensor) not in known:
            try:
                known[id(tensor)] = in_rows(tensor, places[place])
            except CheckpointError as error:
                text = f"checkpoint {index.folder} is not loaded: {place[:200]!a}: {error}"
                raise CheckpointError(text) from error
        return known.get(id(tensor), tensor)

    return mapped(index.checkpoint, put)


def _rows(file: Path) -> dict[str, Piece]:
    content = load_plain(file, mmap=True)
    rows: Any = content.get("rows") if isinstance(content, dict) else None
    pieces: list[Any] = list(rows.values()) if isinstance(rows, dict) else [None]
    if not all(
        isinstance(piece, list)
        and len(piece) == 2
        and isinstance(piece[0], int)
        and isinstance(piece[1], Tensor)
        and piece[1].ndim
        for piece in pieces
    ):
        text = f"checkpoint {file} is not loaded: it holds no rows of tensors"
        raise CheckpointError(text)
    return {str(place): (piece[0], piece[1]) for place, piece in rows.items()}
