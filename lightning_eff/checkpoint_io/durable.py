"""Write checkpoints that survive a kill or a full disk, verify them before use, never execute their content.

Lightning writes a checkpoint to the folder for temporary files and moves it over the old one. If that folder
is on another disk, the move is a copy: a kill or a full disk in its middle destroys the old checkpoint. Here
a file is written in the same folder, synced and renamed (checkpoint/atomic_write.py). It carries its own
SHA-256 (checkpoint/digest.py), which is compared before any tensor is assigned: torch accepts most files with
a flipped bit. Only tensors and plain values are unpickled. A checkpoint also names older files, which
Lightning removes later. Here a file is removed only if this plugin wrote it, in a folder that this run saves
to, so a foreign checkpoint cannot choose what is deleted.

Non-finite weights are not saved: the error ends the run, and the last finite checkpoint stays.

With `asynchronous`, the state is serialized into memory at the call, and a thread writes it, one save at a
time. A removal waits for the save before it and is skipped if that save failed. An error is raised at the
next save, load or end of the run.

Saves: the checkpoint: after a kill or on a full disk it is complete or absent.
Costs: SHA-256 at each save and load (0.25 to 2 GB/s), and waiting for the disk. `asynchronous` takes both off
    the run at a save, for host memory of the checkpoint's size.
When not: checkpoints on object stores (`s3://`): `checkpoint_io=torch`.
Conflicts: FSDP2's checkpoint folders are written synchronously by its ranks, even with `asynchronous`. They
    are verified, loaded and removed here like files. Folders of other formats are not touched. Paths with a
    protocol (`s3://`) are rejected. POSIX systems only. `AsyncCheckpointIO` around it works, but removes the
    old checkpoint before the new one is written. Use `asynchronous` instead, with file names that differ by
    step or epoch, since Lightning looks for a free name before the last file is written.
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
    """Atomic, verified checkpoints; `Trainer(plugins=[Durable()])`, also under Fabric.

    Args:
        asynchronous: Write in a thread, from a copy of the state at the call. A save after the end of a run
            is synchronous, since nothing would wait for it.

    Raises:
        CheckpointError: A checkpoint cannot be written (the previous one is unchanged), has non-finite
            weights, is damaged, or holds more than tensors and plain values.
        ConfigError: A flag is neither True nor False.

    Warns:
        CheckpointWarning: A checkpoint without a digest was loaded, a file that this plugin did not write was
            not removed, hyperparameters are left out, or the first checkpoint holds other objects.

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
