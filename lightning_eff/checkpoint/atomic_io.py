"""Checkpoint files that appear in one step, are verified before use, and hold only tensors and plain values.

`checkpoint_io/durable` is this for a Trainer. Fabric's strategies fall back to it, since what Lightning falls
back to writes over the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io import CheckpointIO
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff.checkpoint import digest, sharded, sharded_write
from lightning_eff.checkpoint.atomic_write import make_folder, save_error, write_with_digest
from lightning_eff.checkpoint.background_writer import BackgroundWriter
from lightning_eff.checkpoint.lazy_tensor import materialize
from lightning_eff.checkpoint.safe_load import load_plain, with_plain_hparams
from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.checkpoint_stamp import nested_dict
from lightning_eff.core.errors import CheckpointError, CheckpointWarning, Remedy
from lightning_eff.core.finite import nonfinite
from lightning_eff.core.optimization.first_gradients import parameters_have

log = logging.getLogger(__name__)


@dataclass
class Statistics:
    """Counts of one run."""

    num_saves: int = 0  # checkpoints on the disk
    saved_bytes: int = 0
    writing_s: float = 0.0  # from a save's start until the disk has confirmed it
    waited_s: float = 0.0  # seconds of these that blocked the run; fewer only with `asynchronous`
    num_verified: int = 0  # checkpoints that were loaded after their SHA-256 was compared
    num_without_digest: int = 0  # checkpoints of stock Lightning that were loaded
    num_removed: int = 0
    num_kept: int = 0  # files that Lightning asked to remove and that this plugin did not write
    num_orphans: int = 0  # temporary files of dead processes that were removed


class AtomicFiles(CheckpointIO):
    """Write files with a SHA-256 in one step; verify files and folders, and load plain values only.

    Args:
        asynchronous: Write in a thread, from a copy of the state at the call.
        require_digest: Reject checkpoints without a digest.

    Raises:
        CheckpointError: A checkpoint cannot be written (the previous one is unchanged), has weights that are
            not finite, is damaged, or holds more than tensors and plain values.
    """

    @check_arguments
    def __init__(self, *, asynchronous: bool = False, require_digest: bool = False) -> None:
        self.asynchronous = asynchronous
        self.require_digest = require_digest
        self._statistics = Statistics()
        self._own_files: set[Path] = set()  # written, or loaded with a digest: may be removed
        self._own_folders: set[Path] = set()  # saved to in this run
        self._cleaned: set[Path] = set()
        self._writer = BackgroundWriter()
        self._is_run_over = False
        self._nonfinite: set[str] | None = None  # tensors of the first checkpoint: buffers, on purpose

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save, or raise and leave the previous file unchanged; with `asynchronous` return after copying."""
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r}: local disks have no options")
        start = time.perf_counter()
        target = _local(path)
        self._writer.wait()
        self.check_weights(checkpoint, target)
        self._clean_up(target.parent)
        checkpoint = with_plain_hparams(checkpoint)
        if self.asynchronous and not self._is_run_over:
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            state = buffer.getbuffer()
            # Lightning may link into the folder before the thread writes; the write reports the error.
            with contextlib.suppress(OSError):
                make_folder(target.parent)
            self._writer.add(lambda: self._write(target, lambda file: file.write(state)))
        else:
            self._write(target, lambda file: torch.save(checkpoint, file))
        self._statistics.waited_s += time.perf_counter() - start

    def check_weights(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        """Reject weights that are no longer finite; in a first save, if the optimizer's state is not finite.

        Raises:
            CheckpointError: There are some.
        """
        found = nonfinite(nested_dict(checkpoint, "state_dict"))
        if self._nonfinite is None:
            states = dict(enumerate(tree_leaves(checkpoint.get("optimizer_states")) if found else ()))
            self._nonfinite = set() if nonfinite(states) else found
        if broken := sorted(found - self._nonfinite):
            text = f"checkpoint {path} was not saved: {parameters_have(broken)} values that are not finite; "
            kept = sorted((p.stat().st_mtime_ns, p) for p in self._own_files if p.exists())
            text += f"the last finite checkpoint is {kept[-1][1]}" if kept else "none was saved before"
            text += "\n  try: ckpt_path=PATH of a finite checkpoint, and a smaller optimizer.lr"
            raise CheckpointError(text)

    def _write(self, target: Path, fill: Callable[[Any], object]) -> None:
        start = time.perf_counter()
        try:
            written = write_with_digest(target, fill)
        except OSError as error:
            raise save_error(target, error, fill) from error
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

    def folder_saved(self, path: Path, num_bytes: int, duration_s: float) -> None:
        """Record a folder that a strategy wrote, so that it may be removed."""
        self._clean_up(path.parent)
        self._count_save(path, num_bytes, duration_s)
        self._statistics.waited_s += duration_s

    def folder_loaded(self, path: Path) -> None:
        """Record a folder that a strategy verified and loaded."""
        self._clean_up(path.parent)
        self._statistics.num_verified += 1
        self._own_files.add(_resolve_folder(path))

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify, then load tensors and plain values, to the CPU by default."""
        target = _local(path)
        if weights_only is False:
            raise CheckpointError(
                f"checkpoint {target} is not loaded: weights_only=False would run code that it holds\n"
                "  try: weights_only=None, and torch.serialization.add_safe_globals([...]) for what you trust"
            )
        self._writer.wait()
        if target.is_dir():
            state = sharded.lazy_checkpoint(sharded.verified_index(target))
            self.folder_loaded(target)
            return materialize(state, map_location or "cpu")
        self._clean_up(target.parent)

        def load(file: IO[bytes]) -> Any:
            has_digest = digest.verify(file) is not None
            if not has_digest and self.require_digest:
                remedy = Remedy("checkpoint_io.require_digest=false", "Durable(require_digest=False)")
                raise CheckpointError(f"it has no SHA-256, and require_digest=True\n  try: {remedy}")
            state = load_plain(file, map_location="cpu" if map_location is None else map_location)
            if has_digest:
                self._statistics.num_verified += 1
                self._own_files.add(_resolve_folder(target))
            else:
                self._statistics.num_without_digest += 1
                text = f"checkpoint {target} has no SHA-256 (stock Lightning writes none): its CRC-32s "
                warnings.warn(f"{text}were compared", CheckpointWarning, stacklevel=2)
            self._nonfinite = nonfinite(nested_dict(state, "state_dict"))
            return state

        return digest.read_with(target, load)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of this plugin, after the saves before it; other files stay, with a warning."""
        target = _local(path)
        self._writer.add_if_successful(lambda: self._remove(target))

    def _remove(self, target: Path) -> None:
        if not os.path.lexists(target):
            return
        try:
            reason = self._reason_to_keep(_resolve_folder(target))
            if not reason:
                is_folder = target.is_dir() and not target.is_symlink()
                sharded_write.remove(target) if is_folder else target.unlink()
        except OSError as error:
            raise CheckpointError(f"checkpoint {target} was not removed: {error.strerror}") from error
        if reason:
            self._statistics.num_kept += 1
            warnings.warn(f"{target} is not removed: {reason}", CheckpointWarning, stacklevel=2)
        else:
            self._statistics.num_removed += 1

    def _reason_to_keep(self, path: Path) -> str:
        """Say why a file is not removed: a foreign checkpoint may have named it in Lightning's request."""
        is_own, is_folder = path in self._own_files, sharded.is_sharded_checkpoint(path)
        if path.parent not in self._own_folders and not is_own:
            return "it lies outside the folders that this run saves to"
        if path.is_symlink():
            is_local = path.readlink().name == str(path.readlink())
            return "" if is_local else "it is a link to another folder"
        if path.is_dir() and not is_folder:
            return "it is a folder that another strategy wrote"
        is_own = is_own or digest.has_digest(path / sharded.INDEX if is_folder else path)
        return "" if is_own else "it was not written by this plugin"

    def _clean_up(self, folder: Path) -> None:
        if folder not in self._cleaned:
            self._cleaned.add(folder)
            for path in sharded_write.remove_leftovers(folder):
                self._statistics.num_orphans += 1
                log.info("removed %s, left by a process that died while saving", path)

    @override
    def teardown(self) -> None:
        """Wait for the last save; Lightning calls this after a run, under Fabric you must."""
        self._is_run_over = True
        self._writer.wait(end=True)


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        remedy = Remedy("checkpoint_io=torch", "TorchCheckpointIO()")
        raise CheckpointError(
            f"checkpoint {path}: checkpoints are written to local disks only\n  try: {remedy}"
        )
    return Path(path).expanduser()


def _resolve_folder(path: Path) -> Path:
    """Return a path with its folder resolved, but not its own name, which may be a link."""
    return path.parent.resolve() / path.name
