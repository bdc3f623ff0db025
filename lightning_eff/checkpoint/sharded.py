"""Checkpoints in a folder: one file of rows per rank, and an index that makes them one checkpoint.

    step-10.ckpt/
        index.ckpt                              all tensors that are not sharded, and the shards' SHA-256
        part-0123456789abcdef-0-of-2.ckpt       rows of rank 0, by each tensor's path in the checkpoint
        part-0123456789abcdef-1-of-2.ckpt

Every file is written by `torch.save`, carries its own SHA-256 (digest.py), appears in one step
(atomic_write.py), and holds only tensors and plain values. A save (sharded_write.py) writes shards under new
names, then replaces the index, then removes the shards that it does not name. So at any moment the index
names the complete shards of one save, and an interrupted save leaves the previous checkpoint intact. The next
save or start removes the files that no index names, unless a writer still holds the folder's lock. A folder
without an index is not a checkpoint.

The index holds no file names, since text from a checkpoint must never become a path: names follow from a
token of 16 hexadecimal digits and the number of shards.

Why not torch.distributed.checkpoint: its metadata is a pickle, which runs code when it is loaded, and it
replaces no checkpoint in one step. Why not safetensors shards with their JSON index: they hold neither the
loops' and optimizers' plain values nor digests, and would be a second format beside the single file's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lightning_eff.checkpoint.digest import read_with, verify
from lightning_eff.checkpoint.lazy_tensor import RowShard, from_shards, map_tensors
from lightning_eff.checkpoint.safe_load import load_plain
from lightning_eff.core.errors import CheckpointError

INDEX = "index.ckpt"
FORMAT = "lightning_eff/parts"
VERSION = 1
SHARD_FILE = re.compile(r"part-[0-9a-f]{16}-[0-9]{1,6}-of-[0-9]{1,6}\.ckpt")
_TOKEN = re.compile(r"[0-9a-f]{16}")
NO_INDEX = f"""a folder without {INDEX}: an incomplete save, or the format of another library
  try: that library's own script, which converts it to one file"""
"""What a folder is that is no checkpoint of this package, and what to do with it."""


@dataclass(frozen=True)
class Index:
    """Content of an index file."""

    folder: Path
    token: str  # of the save
    digests: tuple[str, ...]  # the SHA-256 of each shard, by rank
    checkpoint: dict[str, Any]  # all that is not sharded, with outlines of the tensors that are
    sharded: frozenset[str]  # paths of the first appearances of sharded tensors


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a folder has an index; its content is not read."""
    return path.is_dir() and (path / INDEX).is_file()


def shard_path(folder: Path, token: str, rank: int, num_ranks: int) -> Path:
    """Return the path of a rank's shard."""
    return folder / f"part-{token}-{rank}-of-{num_ranks}.ckpt"


def read_index(path: Path) -> Index:
    """Verify and return a folder's index; shards are not read.

    Raises:
        CheckpointError: It is damaged, or of another format.
        FileNotFoundError: The folder does not exist.
    """
    if not is_sharded_checkpoint(path):
        if path.is_dir():
            raise CheckpointError(f"checkpoint {path} is not loaded: it is {NO_INDEX}")
        raise FileNotFoundError(f"checkpoint {path}: there is no such folder")

    def content(file: IO[bytes]) -> Any:
        if verify(file) is None:
            raise CheckpointError("it has no SHA-256")
        return load_plain(file)

    loaded = read_with(path / INDEX, content)
    loaded = loaded if isinstance(loaded, dict) else {}
    version = loaded.get("version")
    # type() and not isinstance: True == 1, and a file may hold anything.
    if loaded.get("format") != FORMAT or type(version) is not int or version != VERSION:
        newer = f", but of version {version}" if isinstance(version, int) and version > VERSION else ""
        raise CheckpointError(
            f"checkpoint {path / INDEX} is not loaded: it is not an index of version {VERSION}{newer}"
        )
    token, digests, sharded, checkpoint = (loaded.get(k) for k in ("token", "parts", "divided", "checkpoint"))
    if (
        not (isinstance(token, str) and _TOKEN.fullmatch(token) and isinstance(checkpoint, dict))
        or not (isinstance(digests, list) and digests and all(isinstance(digest, str) for digest in digests))
        or not (isinstance(sharded, list) and all(isinstance(key, str) for key in sharded))
    ):
        raise CheckpointError(f"checkpoint {path / INDEX} is not loaded: it does not list its shards")
    return Index(path, token, tuple(digests), checkpoint, frozenset(sharded))


def token_of(path: Path) -> str | None:
    """Return the token of the save that a folder's index names; None without a valid index."""
    try:
        return read_index(path).token
    except (CheckpointError, OSError):
        return None


def verified_index(path: Path, rank: int = 0, num_ranks: int = 1) -> Index:
    """Verify a folder's index and every `num_ranks`-th shard from `rank` on (all by default).

    Raises:
        CheckpointError: A file is missing, damaged, or of another save; the text names it.
        FileNotFoundError: The folder does not exist.
    """
    index = read_index(path)
    for shard in range(rank, len(index.digests), num_ranks):
        file = shard_path(path, index.token, shard, len(index.digests))
        try:
            found = read_with(file, verify)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"checkpoint {path} is not loaded: its shard {file.name} is missing"
            ) from error
        if found != index.digests[shard]:
            raise CheckpointError(
                f"checkpoint {file} is not loaded: it is intact, but of another save than its index"
            )
    return index


def lazy_checkpoint(index: Index) -> dict[str, Any]:
    """Return a checkpoint whose shards are verified; its sharded tensors are read on first use.

    Raises:
        CheckpointError: A shard does not hold the rows that belong in it.
    """
    shards: dict[str, list[RowShard]] = {path: [] for path in index.sharded}
    for rank in range(len(index.digests)):
        file = shard_path(index.folder, index.token, rank, len(index.digests))
        content = load_plain(file, mmap=True)
        rows: Any = content.get("rows") if isinstance(content, dict) else None
        listed: list[tuple[str, Any]] = [*rows.items()] if isinstance(rows, dict) else [("", None)]
        for path, shard in listed:
            is_shard = isinstance(shard, list) and len(shard) == 2 and isinstance(shard[0], int)
            if not (is_shard and isinstance(shard[1], Tensor) and shard[1].ndim):
                raise CheckpointError(f"checkpoint {file} is not loaded: it holds no rows of tensors")
            if path in shards:
                shards[path].append((shard[0], shard[1]))
    known: dict[int, Tensor] = {}  # by outline: tied tensors share one, and stay tied

    def lazy(path: str, tensor: Tensor) -> Tensor:
        if path in shards and tensor.is_meta and id(tensor) not in known:
            try:
                known[id(tensor)] = from_shards(tensor, shards[path])
            except CheckpointError as error:
                raise CheckpointError(
                    f"checkpoint {index.folder} is not loaded: {path[:200]!a}: {error}"
                ) from error
        return known.get(id(tensor), tensor)

    return map_tensors(index.checkpoint, lazy)
