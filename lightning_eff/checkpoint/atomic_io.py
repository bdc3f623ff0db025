"""Checkpoint files that are written as a whole or not at all, verified before use, and free of pickled code.

`AtomicFiles` writes and reads single files, and folders with one file per rank (sharded.py).
`checkpoint_io/durable` makes this class available to a Trainer. If the user passes no CheckpointIO, the
strategies use `AtomicFiles`, because Lightning's default overwrites the previous checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io import CheckpointIO
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff.checkpoint import digest, sharded
from lightning_eff.checkpoint.atomic_write import disk_errors, make_folder, write_with_digest
from lightning_eff.checkpoint.safe_load import load_plain, with_plain_hparams
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.checkpoint_stamp import nested_dict
from lightning_eff.core.errors import TO_FULL_CHECKPOINTS, CheckpointError, CheckpointWarning, Remedy
from lightning_eff.core.finite import nonfinite
from lightning_eff.core.optimization.first_gradients import parameters_have

log = logging.getLogger(__name__)
_TO_TORCH = Remedy("checkpoint_io=torch", "TorchCheckpointIO()")


@dataclass
class Statistics:
    """Counts, bytes and seconds of the saves and loads in one run."""

    num_saves: int = 0  # checkpoints that are on the disk
    saved_bytes: int = 0
    writing_s: float = 0.0  # from a save's start until the disk has confirmed it
    waited_s: float = 0.0  # seconds of `writing_s` that blocked the run; all of them if synchronous
    num_verified: int = 0  # checkpoints that were loaded after their SHA-256 matched
    num_without_digest: int = 0  # checkpoints of stock Lightning that were loaded
    num_removed: int = 0
    num_kept: int = 0  # files that Lightning asked to remove but this plugin did not write
    num_orphans: int = 0  # temporary files of dead processes, now removed


class AtomicFiles(CheckpointIO):
    """Writes files atomically with a SHA-256, verifies files and folders, and loads no pickled code.

    Args:
        asynchronous: Write in a thread, from a copy of the state at the call.

    Raises:
        CheckpointError: A checkpoint cannot be written (the previous file is unchanged), has non-finite
            weights, is damaged, or holds more than tensors and plain values.
    """

    @check_arguments
    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._statistics = Statistics()
        self._own_files: set[Path] = set()  # written, or loaded with a digest: safe to remove
        self._own_folders: set[Path] = set()  # folders that this run saves to
        self._cleaned: set[Path] = set()
        self._writer = BackgroundWriter()
        self._is_run_over = False
        self._nonfinite: set[str] | None = None  # non-finite tensors of the first checkpoint

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint, or raise an error and leave the previous file unchanged.

        With `asynchronous`, return when the state has been copied.
        """
        start = time.perf_counter()
        target = _local(path, storage_options=storage_options)
        self._prepare_save(checkpoint, target)
        checkpoint = with_plain_hparams(checkpoint)
        if self.asynchronous and not self._is_run_over:
            # Copy the state in memory, because the run changes its tensors while the thread writes.
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            state = buffer.getbuffer()
            # Lightning may link to the file before the thread writes it, so the folder must exist. An error
            # of the disk is reported by the later write.
            with contextlib.suppress(OSError):
                make_folder(target.parent)
            self._writer.add(lambda: self._write(target, lambda file: file.write(state)))
        else:
            self._write(target, lambda file: torch.save(checkpoint, file))
        self._statistics.waited_s += time.perf_counter() - start

    def save_shards(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        ranks: sharded.Ranks,
        storage_options: Any | None = None,
    ) -> None:
        """Save a checkpoint with DTensors to a folder; each rank writes its own rows, synchronously.

        All ranks must call this method. `sharded.save` documents `checkpoint` and the errors.
        """
        start = time.perf_counter()
        target = _local(path, TO_FULL_CHECKPOINTS, storage_options=storage_options)
        with ranks.all_or_none():
            self._prepare_save(checkpoint, target)
        num_bytes = sharded.save(checkpoint, target, ranks)
        self._count_save(target, num_bytes, time.perf_counter() - start)
        self._statistics.waited_s += time.perf_counter() - start

    def _prepare_save(self, checkpoint: Mapping[str, Any], target: Path) -> None:
        """Wait for the previous save, check that weights are finite, and clean up the target folder.

        The first save accepts non-finite weights if the optimizer's state is finite.
        """
        self._writer.wait()
        # Some models hold inf or NaN on purpose, for example in a mask. Only tensors that were finite in the
        # first checkpoint count as broken.
        found = nonfinite(nested_dict(checkpoint, "state_dict"))
        if self._nonfinite is None:
            states = dict(enumerate(tree_leaves(checkpoint.get("optimizer_states")) if found else ()))
            self._nonfinite = set() if nonfinite(states) else found
        # After a save of broken weights, Lightning would soon remove the last intact checkpoint.
        if broken := sorted(found - self._nonfinite):
            text = f"checkpoint {target} was not saved: {parameters_have(broken)} values that are not finite"
            kept = sorted((p.stat().st_mtime_ns, p) for p in self._own_files if p.exists())
            text += f"; the last finite checkpoint is {kept[-1][1]}" if kept else "; none was saved before"
            text += "\n  try: ckpt_path=PATH of a finite checkpoint, and a smaller optimizer.lr"
            raise CheckpointError(text)
        if target.parent not in self._cleaned:
            self._cleaned.add(target.parent)
            for path in sharded.remove_leftovers(target.parent):
                self._statistics.num_orphans += 1
                log.info("removed %s, left by a process that died while saving", path)

    def _write(self, target: Path, fill: Callable[[Any], object]) -> None:
        start = time.perf_counter()
        with disk_errors(target):
            written = write_with_digest(target, fill)
        # Test once per run that the saved file can be loaded; with `meta` and mmap, no values are read.
        if not self._statistics.num_saves:
            try:
                load_plain(target, map_location="meta", mmap=True)
            except CheckpointError as error:
                text = f"checkpoint {target} cannot be loaded again: {error}"
                warnings.warn(text, CheckpointWarning, stacklevel=2)
        self._count_save(target, written.num_bytes, time.perf_counter() - start)

    def _count_save(self, target: Path, num_bytes: int, duration_s: float) -> None:
        self._own_files.add(_resolve_folder(target))
        self._own_folders.add(_resolve_folder(target).parent)
        self._statistics.num_saves += 1
        self._statistics.saved_bytes += num_bytes
        self._statistics.writing_s += duration_s

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify a checkpoint, then load tensors and plain values, to the CPU by default."""
        target = _local(path, weights_only=weights_only)
        self._writer.wait()
        if target.is_dir():
            index = sharded.verified_index(target)
            self._count_verified(target)
            return sharded.materialize(sharded.lazy_checkpoint(index), map_location or "cpu")

        def load(file: IO[bytes]) -> Any:
            # The SHA-256 is computed while the file is read. An error of `verify` takes precedence over an
            # error of the reader.
            with ThreadPoolExecutor(1) as pool:
                verified = pool.submit(digest.verify, file)
                try:
                    state = load_plain(file, map_location="cpu" if map_location is None else map_location)
                finally:
                    has_digest = verified.result() is not None
            if has_digest:
                self._count_verified(target)
            else:
                self._statistics.num_without_digest += 1
                text = f"checkpoint {target} has no SHA-256 (stock Lightning writes none): its CRC-32s "
                warnings.warn(f"{text}were compared", CheckpointWarning, stacklevel=2)
            # The run resumes from these weights, so its first save is compared with them.
            self._nonfinite = nonfinite(nested_dict(state, "state_dict"))
            return state

        return digest.read_with(target, load)

    def load_shards(
        self, path: str | Path, ranks: sharded.Ranks, *, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify a folder and return its checkpoint, whose sharded tensors are read on first use.

        All ranks must call this method, and each rank verifies a fraction of the files. The number of ranks
        may differ from the number of ranks that saved the folder.

        Raises:
            CheckpointError: A file is damaged or missing; all ranks raise the error.
        """
        target = _local(path, weights_only=weights_only)
        with ranks.all_or_none():
            index = sharded.verified_index(target, ranks.rank, ranks.size)
        self._count_verified(target)
        return sharded.lazy_checkpoint(index)

    def _count_verified(self, target: Path) -> None:
        self._statistics.num_verified += 1
        self._own_files.add(_resolve_folder(target))

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of this plugin after pending saves; warn about other files and keep them."""
        target = _local(path)
        self._writer.add_if_successful(lambda: self._remove(target))

    def _remove(self, target: Path) -> None:
        if not os.path.lexists(target):
            return
        try:
            reason = self._reason_to_keep(_resolve_folder(target))
            if not reason:
                # A link is removed, but not its target.
                is_folder = target.is_dir() and not target.is_symlink()
                sharded.remove(target) if is_folder else target.unlink()
        except OSError as error:
            raise CheckpointError(f"checkpoint {target} was not removed: {error.strerror}") from error
        if reason:
            self._statistics.num_kept += 1
            warnings.warn(f"{target} is not removed: {reason}", CheckpointWarning, stacklevel=2)
        else:
            self._statistics.num_removed += 1

    def _reason_to_keep(self, path: Path) -> str:
        """Return the reason to keep a file, or an empty text if the file may be removed."""
        is_own, is_folder = path in self._own_files, sharded.is_sharded_checkpoint(path)
        # ModelCheckpoint takes the paths of old files from the loaded checkpoint, which may be foreign.
        if path.parent not in self._own_folders and not is_own:
            return "it lies outside the folders that this run saves to"
        if path.is_symlink():
            # Links such as `last.ckpt` point to a file of the same folder by its bare name.
            is_local = path.readlink().name == str(path.readlink())
            return "" if is_local else "it is a link to another folder"
        if path.is_dir() and not is_folder:
            return "it is a folder that another strategy wrote"
        is_own = is_own or digest.has_digest(path / sharded.INDEX if is_folder else path)
        return "" if is_own else "it was not written by this plugin"

    @override
    def teardown(self) -> None:
        """Wait for the last save. Lightning calls this method after a run; Fabric does not."""
        self._is_run_over = True
        self._writer.wait(end=True)


class BackgroundWriter:
    """Runs jobs in order in one thread, which starts with the first job."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def add(self, job: Callable[[], None]) -> None:
        """Run a job after all jobs that were added earlier."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint_writer")
            atexit.register(self._log_errors)
        self._pending.append(self._pool.submit(job))

    def add_if_successful(self, job: Callable[[], None]) -> None:
        """Run a job if no pending job fails; run it immediately if no job is pending."""
        # Lightning requests the next checkpoint and then removes the previous checkpoint. If the save fails,
        # the previous checkpoint is still needed.
        before = list(self._pending)
        if before:
            self.add(lambda: None if any(future.exception() for future in before) else job())
        else:
            job()

    def wait(self, *, end: bool = False) -> None:
        """Wait for all jobs, then raise the first new error; with `end`, also end the thread."""
        pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if end and self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            atexit.unregister(self._log_errors)
        if errors:
            raise errors[0]

    def _log_errors(self) -> None:
        """Log errors if a program ends without calling `wait`."""
        for future in self._pending:
            if error := future.exception():
                log.error("%s", error)


def _local(
    path: str | Path,
    remedy: Remedy = _TO_TORCH,
    *,
    storage_options: Any | None = None,
    weights_only: bool | None = None,
) -> Path:
    """Return a path on a local disk; reject other file systems and unsupported options."""
    if storage_options is not None:
        raise TypeError(f"storage_options={storage_options!r}: local disks have no options")
    if "://" in str(path):
        raise CheckpointError(
            f"checkpoint {path}: checkpoints are written to local disks only\n  try: {remedy}"
        )
    if weights_only is False:
        raise CheckpointError(
            f"checkpoint {path} is not loaded: weights_only=False would run code that it holds\n"
            "  try: weights_only=None, and torch.serialization.add_safe_globals([...]) for what you trust"
        )
    return Path(path).expanduser()


def _resolve_folder(path: Path) -> Path:
    """Resolve a path's folder but not its last component, which may be a link."""
    return path.parent.resolve() / path.name
