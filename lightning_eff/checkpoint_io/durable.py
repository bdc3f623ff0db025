"""Write checkpoints that survive: whole or not at all, verified before they are used, never code.

Lightning writes a checkpoint to the folder for temporary files and moves it over the old one. From another
disk that move is a copy: a kill in its middle, or a full disk, destroys the checkpoint that was there. Here a
file is written next to it, brought to the disk and renamed (checkpoint/atomic_write.py), and carries its own
SHA-256 (checkpoint/digest.py), compared before a tensor is assigned: torch itself accepts most files with a
flipped bit. Loading never unpickles more than tensors and plain values. A checkpoint names other files, which
Lightning removes as time goes on; here only a file of our own goes, in a folder that this run saves to, so
that a checkpoint of someone else's cannot name what is deleted.

With `asynchronous` the state is serialized at the call, into memory, and written by a thread; one save at a
time. What is removed meanwhile waits for the save before it and stays if that failed. An error is raised at
the next save, load or end of the run.

Costs: SHA-256 at each save and load (0.25 to 2 GB/s; while saving beside the writing, where there is a second
    core), and waiting for the disk. `asynchronous` takes both off the run, for the checkpoint's size in host
    memory.
Conflicts: FSDP2's checkpoints in folders are written by its ranks, at once also with `asynchronous`, and are
    verified, loaded and removed here like files; folders of other formats are left alone. Paths with a
    protocol (`s3://`) are refused. Files on POSIX systems only. Within `AsyncCheckpointIO` it works, but that
    removes the old checkpoint while the new one is not yet written: use `asynchronous`. File names must then
    differ, by step or epoch: Lightning looks for a free name before the last one is written.
Source: rename(2), fsync(2), flock(2); https://lwn.net/Articles/457667/; the comment of a zip archive,
    APPNOTE.TXT 4.3.16.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from typing_extensions import override

from lightning_eff.checkpoint import saving, sharded
from lightning_eff.checkpoint.atomic_write import make_folder, write_sealed
from lightning_eff.checkpoint.background_writer import InOrder
from lightning_eff.checkpoint.digest import bears_seal, read, verify
from lightning_eff.checkpoint.lazy_tensor import assembled
from lightning_eff.checkpoint.refusals import not_saved
from lightning_eff.checkpoint.safe_load import load_plain
from lightning_eff.core import checkpoint_stamp, rules
from lightning_eff.core.errors import CheckpointError, CheckpointWarning, check_flags
from lightning_eff.core.technique import SHARDED_CHECKPOINTS, PLACES_STATE, Facts, Outcome, Rule, Verdict
from lightning_eff.core.text import human_bytes

log = logging.getLogger(__name__)


@dataclass
class Done:
    """What was done so far.

    Args:
        num_saves: Checkpoints that are on the disk.
        saved_bytes: Their size.
        writing_s: Seconds from a save's beginning to the disk's confirmation.
        waited_s: Seconds of these that the run stood still; less than that only with `asynchronous`.
        num_verified: Checkpoints that were loaded after their SHA-256 had been compared.
        num_without_digest: Checkpoints of stock Lightning that were loaded.
        num_removed: Checkpoints that were removed.
        num_kept: Files that were to be removed and are none of ours.
        num_orphans: Temporary files of dead processes that were removed.
    """

    num_saves: int = 0
    saved_bytes: int = 0
    writing_s: float = 0.0
    waited_s: float = 0.0
    num_verified: int = 0
    num_without_digest: int = 0
    num_removed: int = 0
    num_kept: int = 0
    num_orphans: int = 0


class Durable(CheckpointIO):
    """Checkpoints that are whole or not there; `Trainer(plugins=[Durable()])`, also under Fabric.

    Args:
        asynchronous: Write in a thread, from a copy of the state at the call. After the end of a run, when
            nobody would wait for it, a save is on the disk when it returns.
        require_digest: Refuse checkpoints without a digest, such as stock Lightning's.

    Raises:
        CheckpointError: A checkpoint cannot be written (the one before is as it was), or is damaged, or holds
            more than tensors and plain values.
        ConfigError: A flag is neither True nor False.

    Warns:
        CheckpointWarning: A checkpoint without digest is loaded, or a file that is none of ours was to be
            removed and stays.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "one.ckpt"
        >>> Durable().save_checkpoint({"weight": torch.ones(2)}, path)
        >>> Durable().load_checkpoint(path)
        {'weight': tensor([1., 1.])}
        >>> _ = path.write_bytes(path.read_bytes()[:-1])
        >>> Durable().load_checkpoint(path)
        Traceback (most recent call last):
        lightning_eff.core.errors.CheckpointError: checkpoint ...one.ckpt is not loaded: it is cut off, ...
    """

    __repr__ = rules.plugin_repr

    def __init__(self, *, asynchronous: bool = False, require_digest: bool = False) -> None:
        check_flags(asynchronous=asynchronous, require_digest=require_digest)
        self.asynchronous = asynchronous
        self.require_digest = require_digest
        self._done = Done()
        self._own: set[Path] = set()
        self._folders: set[Path] = set()
        self._tidied: set[Path] = set()
        self._behind = InOrder()
        self._run_is_over = False

    def facts(self) -> Facts:
        """State whose checkpoints it does not see."""
        reason = "sharded checkpoints are folders that the strategy writes itself, and are neither verified"
        reason += " nor removed here"
        names = [rule.name for rule in PLACES_STATE if rule.name.startswith("lightning/")]
        rules = [Rule(name=name, reason=reason, verdict=Verdict.WARNED) for name in names]
        if self.asynchronous:
            reason = "ranks write their parts at the call: asynchronous=True has no effect on these saves"
            remedies = ("checkpoint_io.asynchronous=false", "strategy.checkpoints=full")
            rules.append(Rule(name=SHARDED_CHECKPOINTS, reason=reason, remedies=remedies, verdict=Verdict.WARNED))
        return Facts(excludes=tuple(rules))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save, or raise and leave everything as it was; with `asynchronous` return with a copy."""
        if storage_options is not None:
            text = f"storage_options={storage_options!r}: Durable writes to local disks and has no options"
            raise TypeError(text)
        start = time.perf_counter()
        target = _local(path)
        checkpoint = checkpoint_stamp.add_plugin_stamp(checkpoint, self)
        self._behind.settle()
        self._tidy(target.parent)
        if self.asynchronous and not self._run_is_over:
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            state = buffer.getbuffer()
            with contextlib.suppress(OSError):  # writing tells it; Lightning may put a link there meanwhile
                make_folder(target.parent)
            self._behind.add(lambda: self._write(target, lambda writer: writer.write(state)))
        else:
            self._write(target, lambda writer: torch.save(checkpoint, writer))
        self._done.waited_s += time.perf_counter() - start

    def _write(self, target: Path, fill: Callable[[Any], object]) -> None:
        start = time.perf_counter()
        try:
            written = write_sealed(target, fill)
        except OSError as error:
            text = not_saved(target, error, fill)
            raise CheckpointError(text) from error
        self._take_note(target, written.num_bytes, time.perf_counter() - start)

    def _take_note(self, target: Path, num_bytes: int, duration_s: float) -> None:
        self._own.add(_real(target))
        self._folders.add(_real(target).parent)
        self._done.num_saves += 1
        self._done.saved_bytes += num_bytes
        self._done.writing_s += duration_s

    def folder_saved(self, path: Path, num_bytes: int, duration_s: float) -> None:
        """Take note of a folder that a strategy wrote, so that it may be removed."""
        self._tidy(path.parent)
        self._take_note(path, num_bytes, duration_s)
        self._done.waited_s += duration_s

    def folder_loaded(self, path: Path) -> None:
        """Take note of a folder that a strategy verified and loaded."""
        self._tidy(path.parent)
        self._done.num_verified += 1
        self._own.add(_real(path))

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify, then load tensors and plain values, to the CPU if nothing else is said."""
        target = _local(path)
        if weights_only is False:
            text = (
                f"checkpoint {target} is not loaded: weights_only=False would run code that it holds\n"
                "  try: weights_only=None, and torch.serialization.add_safe_globals([...]) for what you trust"
            )
            raise CheckpointError(text)
        self._behind.settle()
        if target.is_dir():
            return self._load_folder(target, map_location)
        self._tidy(target.parent)

        def verified(file: IO[bytes]) -> Any:
            digest = verify(file)
            self._judge(target, digest)
            state = load_plain(file, map_location="cpu" if map_location is None else map_location)
            if digest is not None:
                self._own.add(_real(target))
            return state

        return read(target, verified)

    def _load_folder(self, target: Path, map_location: Any) -> dict[str, Any]:
        """Load what ranks have written to a folder, each tensor put together."""
        if not isinstance(map_location, (str, torch.device, type(None))):
            text = f"checkpoint {target} is not loaded: map_location of a folder is a device, or None"
            raise CheckpointError(text)
        state = sharded.joined(sharded.verified(target))
        self.folder_loaded(target)
        return assembled(state, map_location or "cpu")

    def _judge(self, target: Path, digest: str | None) -> None:
        if digest is not None:
            self._done.num_verified += 1
            return
        if self.require_digest:
            text = "it has no SHA-256, and require_digest=True\n  try: checkpoint_io.require_digest=false"
            raise CheckpointError(text)
        self._done.num_without_digest += 1
        text = f"checkpoint {target} has no SHA-256 (stock Lightning's have none): its CRC-32s were compared"
        warnings.warn(text, CheckpointWarning, stacklevel=2)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of our own, after the saves before it; anything else stays, with a warning."""
        target = _local(path)
        self._behind.add_if_all_went_well(lambda: self._remove(target))

    def _remove(self, target: Path) -> None:
        if not os.path.lexists(target):
            return
        try:
            real = _real(target)
            reason = self._reason_to_keep(real)
            if not reason:
                saving.remove(target) if sharded.is_one(real) and not real.is_symlink() else target.unlink()
                self._done.num_removed += 1
                return
        except OSError as error:
            text = f"checkpoint {target} was not removed: {error.strerror}"
            raise CheckpointError(text) from error
        self._done.num_kept += 1
        warnings.warn(f"{target} is not removed: {reason}", CheckpointWarning, stacklevel=2)

    def _reason_to_keep(self, real: Path) -> str:
        """Say why a file is none of ours; a checkpoint that was loaded may have named it."""
        if real.parent not in self._folders and real not in self._own:
            return "it lies outside the folders that this run saves to"
        if real.is_symlink():
            return "" if real.readlink().name == str(real.readlink()) else "it is a link to another folder"
        if real.is_dir() and not sharded.is_one(real):
            return "it is a folder, which another strategy wrote"
        file = real / sharded.INDEX if real.is_dir() else real
        return "" if real in self._own or bears_seal(file) else "it was not written by this plugin"

    def _tidy(self, where: Path) -> None:
        if where not in self._tidied:
            self._tidied.add(where)
            for path in saving.remove_orphans(where):
                self._done.num_orphans += 1
                log.info("removed %s, which a process left that died while it saved", path)

    @override
    def teardown(self) -> None:
        """Wait for the last save; Lightning calls it after a run, under Fabric it is yours to call."""
        self._run_is_over = True
        self._behind.close()

    def outcome(self) -> Outcome:
        """Say what was saved, loaded and removed."""
        done = self._done
        parts = [
            (done.num_saves, f"saved {done.num_saves} times, {human_bytes(done.saved_bytes)}"),
            (done.num_saves, f"{done.writing_s:.2f} s until on disk, {done.waited_s:.2f} s of waiting"),
            (done.num_verified, f"verified and loaded {done.num_verified}"),
            (done.num_without_digest, f"loaded {done.num_without_digest} without a digest"),
            (done.num_removed, f"removed {done.num_removed}"),
            (done.num_kept, f"left {done.num_kept} that are none of ours"),
            (done.num_orphans, f"tidied up {done.num_orphans} left by dead processes"),
        ]
        did = "; ".join(words for number, words in parts if number)
        return Outcome(did=did or "nothing saved or loaded", effective=bool(did), numbers=asdict(done))


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        text = f"checkpoint {path}: Durable writes to local disks\n  try: checkpoint_io=torch"
        raise CheckpointError(text)
    return Path(path).expanduser()


def _real(path: Path) -> Path:
    """Return where a file is, its own name not followed."""
    return path.parent.resolve() / path.name
