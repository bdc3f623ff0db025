"""Replacing a checkpoint: after a kill or a disk error at any step it is the old or the new file, intact."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.checkpoint import atomic_write, digest
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError
from tests.support.processes import killed_at

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")


def state(step: int, num_values: int = 5000) -> dict[str, Any]:
    return {"global_step": step, "values": torch.full((num_values,), float(step)), "name": "x"}


def save(path: Path, step: int, io: Any = None) -> None:
    (io or Durable()).save_checkpoint(state(step), path)


def load(path: Path) -> int:
    loaded = Durable().load_checkpoint(path)
    assert torch.equal(loaded["values"], state(loaded["global_step"], len(loaded["values"]))["values"])
    return loaded["global_step"]


@pytest.mark.parametrize(("there", "tmpdir"), [(True, "/dev/shm"), (False, None)])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_file_and_the_next_start_cleans_up(
    there: bool, tmpdir: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default folder for temporary files, and with one on another disk."""
    monkeypatch.setattr(tempfile, "tempdir", tmpdir)
    monkeypatch.setattr(digest, "_CHUNK_BYTES", 2048)
    folder = tmp_path / "run" / "checkpoints"
    path = folder / "last.ckpt"
    found, orphans = list[int | None](), 0
    for number in range(1, 200):
        if there:
            save(path, 1)
        else:
            path.unlink(missing_ok=True)
        code = killed_at(number, lambda: save(path, 2))
        orphans += len(list(folder.glob(".*"))) if folder.exists() else 0
        found.append(load(path) if there or path.exists() else None)
        save(folder / "next.ckpt", 3)
        assert sorted(each.name for each in folder.iterdir()) == [
            name for name in ("last.ckpt", "next.ckpt") if name == "next.ckpt" or path.exists()
        ]
        if code == 0:
            break
    assert number > 12, "the calls were not counted"
    assert orphans > 6, "no temporary file was left to clean up"
    old = 1 if there else None
    change = found.index(2)
    assert found == [old] * change + [2] * (len(found) - change), "the file changes once, for good"


def test_temporary_files_of_living_writers_and_other_files_stay(tmp_path: Path) -> None:
    others = [".durable-0123456789abcdef.tmp.bak", ".durable-xyz.tmp", "durable-0123456789abcdef.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".durable-1111111111111111.tmp").mkdir()
    (tmp_path / ".durable-2222222222222222.tmp").symlink_to(tmp_path / others[0])
    (tmp_path / ".durable-3333333333333333.tmp").write_text("a dead writer's")
    fd, living = atomic_write._open_temporary(tmp_path)
    assert oct(living.stat().st_mode & 0o777) == "0o600"
    kept = {each.name for each in tmp_path.iterdir()}
    removed = atomic_write.remove_temporary_files(tmp_path)
    assert [each.name for each in removed] == [".durable-3333333333333333.tmp"]
    assert {each.name for each in tmp_path.iterdir()} == kept - {removed[0].name}
    os.close(fd)
    assert atomic_write.remove_temporary_files(tmp_path) == [living]


def test_a_writer_whose_file_was_removed_before_its_lock_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, times = fcntl.flock, list[int]()

    def late(fd: int, how: int) -> None:
        times.append(fd)
        if len(times) == 1:
            monkeypatch.setattr(fcntl, "flock", lock)
            assert len(atomic_write.remove_temporary_files(tmp_path)) == 1
            monkeypatch.setattr(fcntl, "flock", late)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    save(tmp_path / "a.ckpt", 1)
    assert len(times) == 2
    assert load(tmp_path / "a.ckpt") == 1


def refusing(name: str, code: int, *, call: int = 1) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Return a function that makes a system call fail, starting at the given call."""

    def prepare(patch: pytest.MonkeyPatch, path: Path) -> None:
        module: Any = fcntl if name == "flock" else os
        whole, calls = getattr(module, name), list[Any]()

        def refuse(*words: Any, **keywords: Any) -> Any:
            ours = name != "open" or ".durable-" in str(words[0])
            calls.append(ours or None)
            if ours and len(calls) >= call:
                raise OSError(code, os.strerror(code))
            return whole(*words, **keywords)

        patch.setattr(module, name, refuse)

    return prepare


def limited(patch: pytest.MonkeyPatch, path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    patch.setattr(signal, "SIGXFSZ", signal.SIGXFSZ)


DISK_ERRORS = {
    "full at the first byte": (refusing("write", errno.ENOSPC), "No space left"),
    "broken while writing": (refusing("write", errno.EIO, call=2), "Input/output error"),
    "broken at the disk's confirmation": (refusing("fsync", errno.EIO), "Input/output error"),
    "really larger than allowed": (limited, "File too large"),
    "no permission to make a file": (refusing("open", errno.EACCES), "Permission denied"),
    "read-only": (refusing("open", errno.EROFS), "Read-only file system"),
    "no permission to replace": (refusing("replace", errno.EPERM), "not permitted"),
    "broken lock": (refusing("flock", errno.EIO), "Input/output error"),
}


@pytest.fixture
def unlimited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DISK_ERRORS)
def test_a_disk_error_is_raised_and_the_old_file_is_unchanged(
    name: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_CHUNK_BYTES", 2048)
    prepare, message = DISK_ERRORS[name]
    path = tmp_path / "last.ckpt"
    save(path, 1)
    old = path.read_bytes()
    io = Durable(asynchronous=asynchronous)

    def save_and_wait() -> None:
        io.save_checkpoint(state(2), path)
        io.teardown()

    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        prepare(patch, path)
        with pytest.raises(CheckpointError, match=message) as caught:
            save_and_wait()
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open, "a file is left open"
    assert str(path) in str(caught.value)

    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert path.read_bytes() == old
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"], "a temporary file is left"
    save(path, 2)
    assert load(path) == 2, "the same save works when the disk does"


def test_an_unsynced_folder_is_reported_and_the_new_file_is_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.ckpt", 1)
    with monkeypatch.context() as patch:
        refusing("fsync", errno.EIO, call=2)(patch, tmp_path)
        with pytest.raises(CheckpointError, match="its folder could not be synced"):
            save(tmp_path / "a.ckpt", 2)
    assert load(tmp_path / "a.ckpt") == 2
    with monkeypatch.context() as patch:
        refusing("fsync", errno.EINVAL, call=2)(patch, tmp_path)  # a file system without it
        save(tmp_path / "a.ckpt", 3)


def test_other_files_are_not_overwritten_and_links_are_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        save(notes, 1)
    (tmp_path / "sharded").mkdir()
    with pytest.raises(CheckpointError, match="sharded"):
        save(tmp_path / "sharded", 1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe"):
        save(tmp_path / "pipe", 1)
    (tmp_path / "last.ckpt").symlink_to(notes)
    save(tmp_path / "last.ckpt", 1)
    assert notes.read_text() == "mine"
    assert not (tmp_path / "last.ckpt").is_symlink()
    (tmp_path / "empty").touch()
    save(tmp_path / "empty", 1)
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:300])
    save(tmp_path / "last.ckpt", 2)  # a damaged checkpoint is one


def test_permissions_follow_the_umask_or_the_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    path.chmod(0o640)
    save(path, 2)
    assert oct(path.stat().st_mode & 0o777) == "0o640"
