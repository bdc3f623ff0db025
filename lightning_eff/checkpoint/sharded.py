"""Checkpoints in a folder, with one file of rows per rank and an index that joins these files.

    step-10.ckpt/
        index.ckpt                              everything that is not sharded, and the shards' SHA-256
        part-0123456789abcdef-0-of-2.ckpt       rows of rank 0, by each tensor's path in the checkpoint
        part-0123456789abcdef-1-of-2.ckpt       rows of rank 1, which follow the rows of rank 0

atomic_io.py calls `save` and `verified_index` for strategies that shard parameters. In the index, an outline
replaces each sharded tensor. An outline is a `meta` tensor, which has a shape and a dtype but no values. The
rows of a sharded tensor are the rows of all shards, in rank order. Each shard stores a tensor's rows under
the path where the tensor first appears in the checkpoint. Ranks save rows without gathering tensors. On load,
each outline becomes a `LazyShardedTensor`, which reads only the requested rows.

Every file is written by `torch.save`, contains its own SHA-256 (digest.py), appears in one step
(atomic_write.py), and holds only tensors and plain values. A save writes shards under new names, replaces the
index, then removes the shards that the new index does not name. So at any moment the index names the complete
shards of one save, and an interrupted save leaves the previous checkpoint intact. The next save or start
removes files that no index names, unless a writer still holds the folder's lock. A folder without an index is
not a checkpoint.

The index holds no file names, because text from a checkpoint must never become a path. File names are derived
from a token of 16 hexadecimal digits and the number of shards.

Why not torch.distributed.checkpoint: the metadata of its FileSystemWriter is a pickle, which runs code on
load. torch's HuggingFaceStorageWriter stores only tensors. Neither writer has digests, and neither replaces a
checkpoint in one step. Why not safetensors: to add a digest, the file must be written from a full copy in
memory, or be read again. torch can map its own files just as lazily, and plain values need an index anyway.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only, tree_unflatten
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_eff.checkpoint.atomic_write import (
    TEMPORARY,
    Written,
    disk_errors,
    make_folder,
    remove_temporary_files,
    write_with_digest,
    writer_lock,
)
from lightning_eff.checkpoint.digest import has_digest, read_with, verify
from lightning_eff.checkpoint.safe_load import load_plain, with_plain_hparams
from lightning_eff.core.errors import CheckpointError
from lightning_eff.core.shards import full_tensor, local_rows

INDEX = "index.ckpt"
FORMAT = "lightning_eff/shards"
VERSION = 1
SHARD_FILE = re.compile(r"part-[0-9a-f]{16}-[0-9]{1,6}-of-[0-9]{1,6}\.ckpt")
_TOKEN = re.compile(r"[0-9a-f]{16}")
_NEED_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "nbytes", "layout")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.__len__, Tensor.is_floating_point),
}
"""Functions of a lazy tensor that need only the outline, and read no rows."""


@dataclass(frozen=True)
class Index:
    """Content of an index file."""

    folder: Path
    token: str  # random, new in each save
    digests: tuple[str, ...]  # SHA-256 of each shard, by rank
    checkpoint: dict[str, Any]  # with outlines in place of sharded tensors


class LazyShardedTensor(Tensor):
    """A tensor whose rows are read when needed; every computation with it loads the full tensor.

    So hooks that read a checkpoint need no special case, and the full model is in memory only if all tensors
    are used. Why not outlines and a table of rows: a hook that computes with a tensor would get no values,
    and a hook that renames tensors would separate a tensor from its rows.
    """

    outline: Tensor
    shards: list[Tensor]
    """Consecutive rows, mapped from files."""

    def full_tensor(self) -> Tensor:
        """Return the full tensor, always the same object, so that in-place changes persist."""
        if len(self.shards) > 1:
            self.shards = [torch.cat(self.shards)]
        return self.shards[0]

    def rows(self, first: int, end: int) -> Tensor:
        """Read and return only the rows `first` to `end`; return a view if one shard holds all these rows."""
        # `found` starts with an empty tensor, so that an empty result also has a shape and a dtype.
        found, start = [self.shards[0][:0]], 0
        for shard in self.shards:
            part = shard[max(first - start, 0) : max(end - start, 0)]
            found += [part] if len(part) else []
            start += len(shard)
        return torch.cat(found) if len(found) > 2 else found[-1]

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NEED_NO_VALUES:
            return func(args[0].outline, *args[1:], **(kwargs or {}))
        # Any other function gets the full tensor.
        given: Any = (tuple(args), dict(kwargs or {}))
        args, kwargs = tree_map_only(LazyShardedTensor, LazyShardedTensor.full_tensor, given)
        return func(*args, **(kwargs or {}))


def join(outline: Tensor, shards: list[Any]) -> LazyShardedTensor:
    """Return a lazy tensor with an outline's shape and dtype, and with the shards' rows in order.

    Raises:
        CheckpointError: The shards are not the rows of that tensor; a shard may be any object.

    Example:
        >>> lazy = join(torch.empty(3, 1, device="meta"), [torch.zeros(2, 1), torch.ones(1, 1)])
        >>> lazy.shape, lazy.rows(1, 3).tolist(), (lazy * 2).tolist()
        (torch.Size([3, 1]), [[0.0], [1.0]], [[0.0], [0.0], [2.0]])
    """
    num_rows = 0
    # A shard's content comes from a file and may be any object, so check its type and layout.
    for rows in shards:
        layout = (rows.dtype, rows.shape[1:]) if isinstance(rows, Tensor) and rows.ndim else None
        if layout != (outline.dtype, outline.shape[1:]):
            break
        num_rows += len(rows)
    else:
        if outline.ndim and num_rows == len(outline):
            lazy = torch.empty_like(outline, device="meta").as_subclass(LazyShardedTensor)
            lazy.outline, lazy.shards = outline, shards
            return lazy
    raise CheckpointError(f"rows of a tensor of shape {tuple(outline.shape)} are missing or do not fit it")


def map_tensors(value: Any, change: Callable[[str, Tensor], Any]) -> Any:
    """Return a copy of nested containers with each tensor replaced by `change(path, tensor)`.

    `path` is written as subscripts, for example `['a'][0]`. A tensor with several names is changed once, with
    the first path, so tied tensors stay tied.

    Example:
        >>> map_tensors({"a": [torch.ones(1), 2]}, lambda path, _: path)
        {'a': ["['a'][0]", 2]}
    """
    leaves, structure = tree_flatten_with_path(value)
    # Results by the id of each tensor, because two names of one tensor must stay one tensor.
    changed: dict[int, Any] = {}
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in changed:
            changed[id(leaf)] = change(keystr(path), leaf)
    return tree_unflatten([changed.get(id(leaf), leaf) for _, leaf in leaves], structure)


def materialize(value: Any, device: Any = "cpu") -> Any:
    """Return nested containers with lazy tensors replaced by full tensors on `device`."""
    return map_tensors(
        value, lambda _, each: each.full_tensor().to(device) if isinstance(each, LazyShardedTensor) else each
    )


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a folder has an index; the index is not read."""
    return path.is_dir() and (path / INDEX).is_file()


def shard_path(folder: Path, token: str, rank: int, num_ranks: int) -> Path:
    """Return the path of a rank's shard."""
    return folder / f"part-{token}-{rank}-of-{num_ranks}.ckpt"


def read_index(path: Path) -> Index:
    """Verify and return a folder's index, without reading shards.

    Raises:
        CheckpointError: The index is damaged, or has another format.
        FileNotFoundError: The folder does not exist.
    """
    if not is_sharded_checkpoint(path):
        if path.is_dir():
            raise CheckpointError(f"checkpoint {path} is not loaded: it is a folder without {INDEX}")
        raise FileNotFoundError(f"checkpoint {path}: there is no such folder")

    def content(file: IO[bytes]) -> Any:
        if verify(file) is None:
            raise CheckpointError("it has no SHA-256")
        return load_plain(file)

    loaded = read_with(path / INDEX, content)
    loaded = loaded if isinstance(loaded, dict) else {}
    # A file may hold any objects. The token becomes part of file names, so it must not contain a path.
    types = {"format": str, "version": int, "token": str, "digests": list, "checkpoint": dict}
    if (
        any(type(loaded.get(key)) is not kind for key, kind in types.items())
        or (loaded["format"], loaded["version"]) != (FORMAT, VERSION)
        or not _TOKEN.fullmatch(loaded["token"])
        or {*map(type, loaded["digests"])} != {str}  # also true for an empty list
    ):
        text = f"checkpoint {path / INDEX} is not loaded: it is not an index of version {VERSION}"
        raise CheckpointError(text)
    return Index(path, loaded["token"], tuple(loaded["digests"]), loaded["checkpoint"])


def verified_index(path: Path, rank: int = 0, num_ranks: int = 1) -> Index:
    """Verify a folder's index and this rank's fraction of the shards; by default, verify all shards.

    Raises:
        CheckpointError: A file is missing, damaged, or from another save; the error names the file.
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
        # `verify` compared the shard with its own digest; only the index says which save it belongs to.
        if found != index.digests[shard]:
            raise CheckpointError(
                f"checkpoint {file} is not loaded: it is intact, but of another save than its index"
            )
    return index


def lazy_checkpoint(index: Index) -> dict[str, Any]:
    """Return the checkpoint of a verified index; its sharded tensors are read on first use.

    Raises:
        CheckpointError: The shards do not hold the rows of the index's outlines.
    """
    num_ranks, shards = len(index.digests), list[Mapping[str, Any]]()
    # With `mmap`, values stay on the disk until they are used.
    for rank in range(num_ranks):
        content = load_plain(shard_path(index.folder, index.token, rank, num_ranks), mmap=True)
        shards.append(content if isinstance(content, dict) else {})

    def lazy(path: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        try:
            return join(tensor, [shard.get(path) for shard in shards])
        except CheckpointError as error:
            text = f"checkpoint {index.folder} is not loaded: {path[:200]!a}: {error}"
            raise CheckpointError(text) from error

    return map_tensors(index.checkpoint, lazy)


class Ranks:
    """The ranks of the default process group; a single rank without a process group.

    Messages are JSON, as bytes in a tensor; nothing is unpickled.

    Args:
        device: Device of the process group's backend.

    Example:
        >>> with Ranks(torch.device("cpu")).all_or_none() as step:
        ...     step.local["done"] = 1
        >>> step.gathered
        [{'done': 1}]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_distributed else 0
        self.size = dist.get_world_size() if is_distributed else 1

    @contextlib.contextmanager
    def all_or_none(self) -> Generator[Any]:
        """Run a step that fails on all ranks if it fails on one rank; all ranks must reach the end.

        The yielded object has two attributes. `local` is a dictionary of plain JSON values that this rank
        sends at the end of the step. `gathered` is the list of all ranks' values, by rank, once the step is
        over.

        Raises:
            CheckpointError: Another rank failed; the error names the first such rank and its error.
        """
        step = SimpleNamespace(local={}, gathered=[])
        try:
            yield step
        except BaseException as error:
            # The other ranks wait in their all-gather, so send the error to them.
            self._all_gather({"failed": str(error) or repr(error)})
            raise
        step.gathered = self._all_gather(step.local)
        for rank, message in enumerate(step.gathered):
            if "failed" in message:
                raise CheckpointError(f"rank {rank}: {message['failed']}")

    def _all_gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange one message per rank; all ranks must call this method."""
        if self.size == 1:
            return [message]
        # Messages differ in length, so use torchmetrics' gather, which pads messages and cuts the padding.
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self._device)
        return [json.loads(bytes(row.tolist())) for row in gather_all_tensors(data)]


@torch.no_grad()
def save(checkpoint: Mapping[str, Any], path: Path, ranks: Ranks) -> int:
    """Save a checkpoint with DTensors to a folder; all ranks must call this function.

    If a rank fails, the previous checkpoint stays in the folder.

    Args:
        checkpoint: The checkpoint of this rank; entries that are not sharded are saved from rank 0.
        path: The folder; all ranks use the path of rank 0.
        ranks: Makes each step fail on all ranks or on none.

    Returns:
        Total bytes of all files.

    Raises:
        CheckpointError: A rank cannot write its files.
    """
    with contextlib.ExitStack() as saving:  # ends with rank 0's clean-up
        # 1. Rank 0 creates the folder, locks it against clean-up and names the save.
        with ranks.all_or_none() as step, disk_errors(path):
            if ranks.rank == 0:
                step.local = {"path": str(path), "token": saving.enter_context(new_save(path))}
        path, token = Path(step.gathered[0]["path"]), step.gathered[0]["token"]
        # Tensors that are not sharded by rows are gathered here, by all ranks in the same order.
        rest, rows = split_shards(checkpoint, _own_rows)
        # 2. Each rank writes its shard.
        with ranks.all_or_none() as step, disk_errors(path):
            shard = write_shard(path, token, ranks.rank, ranks.size, rows)
            step.local = {"digest": shard.digest, "bytes": shard.num_bytes}
        shards = step.gathered
        # 3. Rank 0 replaces the index. Only now does the folder hold the new checkpoint.
        with ranks.all_or_none() as step, disk_errors(path):
            if ranks.rank == 0:
                index = write_index(path, token, [shard["digest"] for shard in shards], rest)
                step.local["bytes"] = index.num_bytes
    return step.gathered[0]["bytes"] + sum(shard["bytes"] for shard in shards)


def split_shards(
    checkpoint: Any, rows_of: Callable[[Tensor], Tensor | None]
) -> tuple[Any, dict[str, Tensor]]:
    """Return a checkpoint with outlines in place of its sharded tensors, and this rank's rows by path.

    `rows_of` returns this rank's rows of a tensor, or None if the tensor is not sharded.
    """
    shards: dict[str, Tensor] = {}

    def outlined(path: str, tensor: Tensor) -> Tensor:
        rows = rows_of(tensor)
        if rows is None:
            return full_tensor(tensor).to("cpu") if isinstance(tensor, DTensor) else tensor
        shards[path] = rows
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return map_tensors(checkpoint, outlined), shards


def _own_rows(tensor: Tensor) -> Tensor | None:
    """Return this rank's rows of a tensor that is sharded by rows; return None for other tensors."""
    if not isinstance(tensor, DTensor) or local_rows(tensor) is None:
        return None
    rows = tensor.to_local()
    is_view = rows.untyped_storage().nbytes() != rows.nbytes  # torch.save would write the whole storage
    return rows.clone() if is_view else rows


@contextlib.contextmanager
def new_save(path: Path) -> Generator[str]:
    """Create the folder to save to, and yield the save's token; one process does this for all ranks.

    Until the block ends, no clean-up removes shards in the folder. At the end, shards that the index does not
    name are removed: the previous save's shards or, if the save failed, its own shards. If `path` is a link,
    the link is replaced, not its target.

    Raises:
        CheckpointError: `path` is a file, or a folder with other content; its content stays unchanged.
        OSError: The disk failed.
    """
    if path.is_symlink():
        path.unlink()
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"checkpoint {path} was not saved: a file of that name exists")
    if path.is_dir() and not is_sharded_checkpoint(path):
        names = [file.name for file in path.iterdir()]
        # Only files of a failed save are replaced. A folder with other files belongs to the user.
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


def write_shard(path: Path, token: str, rank: int, num_ranks: int, rows: Mapping[str, Tensor]) -> Written:
    """Write the shard of a rank; `rows` are the rank's rows, by the path of each tensor in the checkpoint."""
    file = shard_path(path, token, rank, num_ranks)
    return write_with_digest(file, lambda file: torch.save(dict(rows), file))


def write_index(path: Path, token: str, digests: list[str], checkpoint: Mapping[str, Any]) -> Written:
    """Write the index, which turns the shards of a save into the checkpoint; `digests` are in rank order.

    Raises:
        CheckpointError: A shard is missing, for example on a disk that ranks do not share.
        OSError: The disk failed; the previous checkpoint is unchanged.
    """
    missing = [r for r in range(len(digests)) if not shard_path(path, token, r, len(digests)).exists()]
    if missing:
        text = f"checkpoint {path} was not saved: the shard of rank {missing[0]} is not visible to rank 0"
        text += "\n  try: a folder on a disk that all ranks share"
        raise CheckpointError(text)
    content = {"format": FORMAT, "version": VERSION, "token": token, "digests": digests}
    # The index must load with `weights_only`, and hyperparameters may be any objects.
    content |= {"checkpoint": with_plain_hparams(checkpoint)}
    return write_with_digest(path / INDEX, lambda file: torch.save(content, file))


def remove(path: Path) -> None:
    """Remove a checkpoint, first its index, so that a kill leaves no partial checkpoint; keep other files."""
    (path / INDEX).unlink()
    for file in _shards_in(path):
        file.unlink(missing_ok=True)  # another rank may remove files at the same time
    remove_temporary_files(path)
    with contextlib.suppress(OSError):  # the folder still holds other files
        path.rmdir()


def clean_up(path: Path) -> list[Path]:
    """Remove and return files that no index names; then remove a folder without an index if it is empty.

    During a save, only temporary files of dead writers are removed.
    """
    # List the shards first, then look for locks. A save that began before the listing then still holds its
    # lock, or has already replaced the index.
    shards = _shards_in(path)
    removed = remove_temporary_files(path)
    if any(TEMPORARY.fullmatch(file.name) for file in path.iterdir()):
        return removed
    token = None
    if (path / INDEX).exists():
        try:
            token = read_index(path).token
        except (CheckpointError, OSError):
            return removed  # the user decides about the shards of a damaged index
    for file in shards:
        # A file without a digest was not written by this package, whatever its name is.
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
