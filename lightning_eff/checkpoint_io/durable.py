"""Write checkpoints that survive a kill or a full disk, and verify checkpoints before use.

Lightning writes a new checkpoint to the folder for temporary files, and then moves the file over the old
checkpoint. If that folder is on another disk, the move is a copy, and a kill or a full disk during the copy
destroys the old checkpoint. This plugin writes the file in the same folder, syncs the file, and renames it
(checkpoint/atomic_write.py). The file contains its own SHA-256 (checkpoint/digest.py), which is verified
before any tensor is assigned, because torch accepts most files with a flipped bit. Only tensors and plain
values are unpickled, so no code in a checkpoint runs. A checkpoint also names older files, which Lightning
removes later. This plugin removes only files that the plugin wrote, and only in folders that this run saves
to; the file that the run was resumed from may also be removed. So a foreign checkpoint cannot choose which
files are deleted.

A checkpoint with non-finite weights is not saved. Such a save ends the run with an error, and the last finite
checkpoint stays.

With `asynchronous`, the state is serialized into memory at the call, and a thread writes the bytes, one save
at a time. A removal waits for the save that came before, and is skipped if that save failed. An error in the
thread is raised at the next save, at the next load, or at the end of the run.

Saves: the checkpoint; after a kill or a full disk, each file is either complete or absent.
Costs: computing the SHA-256 at each save and load (0.25 to 2 GB/s), and waiting for the disk at each save.
    With `asynchronous`, a thread hashes and writes, and a save needs host memory of the checkpoint's size.
When not: checkpoints on object stores (`s3://`), which need `checkpoint_io=torch`.
Conflicts: FSDP2's ranks write checkpoint folders synchronously, even with `asynchronous`. This plugin
    verifies, loads and removes FSDP2's folders like files. Folders of other formats are not touched. Paths
    with a protocol (`s3://`) are rejected. The plugin needs a POSIX system. `AsyncCheckpointIO` around this
    plugin works, but removes the old checkpoint before the new checkpoint is written. Use `asynchronous`
    instead, with file names that contain the step or the epoch, because Lightning looks for a free name
    before the last file is written.
Source: rename(2), fsync(2), flock(2); https://lwn.net/Articles/457667/; the comment of a zip archive,
    APPNOTE.TXT 4.3.16.
"""

from __future__ import annotations

from dataclasses import asdict

from lightning_eff.checkpoint.atomic_io import AtomicFiles
from lightning_eff.core import rules
from lightning_eff.core.errors import TO_FULL_CHECKPOINTS, Remedy
from lightning_eff.core.technique import PLACES_STATE, SHARDED_CHECKPOINTS, Facts, Outcome, Rule, Verdict
from lightning_eff.core.text import human_bytes


class Durable(AtomicFiles):
    """Atomic, verified checkpoints, for `Trainer(plugins=[Durable()])` and for Fabric.

    Args:
        asynchronous: Write in a thread, from a copy of the state at the call. A save after the end of a run
            is synchronous, because no later call would wait for the thread.

    Raises:
        CheckpointError: A checkpoint cannot be written (the previous file is unchanged), has non-finite
            weights, is damaged, or holds more than tensors and plain values.
        ConfigError: A flag is neither True nor False.

    Warns:
        CheckpointWarning: A checkpoint without a digest was loaded, a file that this plugin did not write was
            not removed, hyperparameters were left out, or the first checkpoint cannot be loaded again.

    Example:
        >>> import pathlib, tempfile, torch
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "one.ckpt"
        >>> Durable().save_checkpoint({"weight": torch.ones(2)}, path)
        >>> Durable().load_checkpoint(path)
        {'weight': tensor([1., 1.])}
        >>> _ = path.write_bytes(path.read_bytes()[:-1])
        >>> Durable().load_checkpoint(path)
        Traceback (most recent call last):
        lightning_eff.core.errors.CheckpointError: checkpoint ...one.ckpt is not loaded: it is cut off or ...
    """

    __repr__ = rules.plugin_repr

    def facts(self) -> Facts:
        """Warn about strategies that write their checkpoints without this plugin."""
        reason = "sharded checkpoints are folders that the strategy writes itself; they are neither verified"
        reason += " nor removed here"
        names = [rule.name for rule in PLACES_STATE if rule.name.startswith("lightning/")]
        excludes = [Rule(name=name, reason=reason, verdict=Verdict.WARNED) for name in names]
        if self.asynchronous:
            late = "ranks write their shards at the call: asynchronous=True has no effect on these saves"
            blocking = Remedy("checkpoint_io.asynchronous=false", "Durable(asynchronous=False)")
            fixes = (blocking, TO_FULL_CHECKPOINTS)
            warned = Verdict.WARNED
            excludes.append(Rule(name=SHARDED_CHECKPOINTS, reason=late, remedies=fixes, verdict=warned))
        return Facts(excludes=tuple(excludes))

    def outcome(self) -> Outcome:
        """Report saved, loaded and removed checkpoints."""
        done = self._statistics
        counts = (done.num_saves, done.num_verified, done.num_without_digest)
        saves, verified, without = ("once" if count == 1 else f"{count} times" for count in counts)
        parts = [
            (done.num_saves, f"saved {saves}, {human_bytes(done.saved_bytes)}"),
            (done.num_saves, f"{done.writing_s:.2f} s until on disk, {done.waited_s:.2f} s blocked the run"),
            (done.num_verified, f"verified and loaded {verified}"),
            (done.num_without_digest, f"loaded {without} without a digest"),
            (done.num_removed, f"removed {done.num_removed}"),
            (done.num_kept, f"kept {done.num_kept} not written by this plugin"),
            (done.num_orphans, f"removed {done.num_orphans} left by dead processes"),
        ]
        did = "; ".join(text for count, text in parts if count)
        return Outcome(did=did or "nothing saved or loaded", effective=bool(did), numbers=asdict(done))
