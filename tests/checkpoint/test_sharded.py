"""Sharded checkpoints of three ranks in one process: faults in every file, a kill at every step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.checkpoint import atomic_write, sharded, stored_weights
from lightning_eff.checkpoint.sharded import LazyShardedTensor, split_shards
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError, CheckpointWarning
from tests.support.processes import before_each_step
from tests.support.ranks import is_equal
from tests.support.sharded import rows_of, save_sharded

NUM_RANKS = 3


def checkpoint(value: float = 1.0) -> dict[str, Any]:
    """Return what a Trainer might save: uneven rows, fewer rows than ranks, tied, frozen, scalars, bf16."""
    generator = torch.Generator().manual_seed(int(value))
    tied = torch.randn(7, 2, generator=generator)
    weights = {
        "embedding.weight": tied, "head.weight": tied, "few": torch.randn(2, generator=generator),
        "one": torch.randn(1, 3, 2, generator=generator), "none": torch.zeros(0, 4),
        "half": torch.randn(4, 3, generator=generator).bfloat16(), "scalar": torch.tensor(value),
        "mask": torch.tensor([True, False, True, True]), "count": torch.arange(5),
    }  # fmt: skip
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 2, generator=generator)}, 1: {}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    optimizer = {"state": state, "param_groups": groups}
    return {
        "pytorch-lightning_version": "2.6.6", "global_step": 3, "epoch": 1, "state_dict": weights,
        "optimizer_states": [optimizer], "lr_schedulers": [{"last_epoch": 3}], "list": [tied, (1, tied)],
    }  # fmt: skip


def save(path: Path, content: dict[str, Any] | None = None, num_ranks: int = NUM_RANKS) -> str:
    """Save the shards of all ranks in this process; return the token."""
    return save_sharded(path, checkpoint() if content is None else content, num_ranks)


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_sharded_checkpoint_loads_as_full_tensors(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    token = save(path, num_ranks=num_ranks)
    parts = [f"part-{token}-{rank}-of-{num_ranks}.ckpt" for rank in range(num_ranks)]
    assert names(path) == ["index.ckpt", *parts]
    for load in (Durable().load_checkpoint, stored_weights.checkpoint):
        found = load(path)
        assert is_equal(found, checkpoint())
        assert list(found) == list(checkpoint())
        state = found["state_dict"]
        assert state["head.weight"] is state["embedding.weight"], "tied"
        assert state["half"].dtype == torch.bfloat16
        assert type(state["few"]) is Tensor

    assert found["list"][1][1] is found["list"][0]


def test_every_flipped_byte_is_found_and_its_file_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path)
    for file in sorted(path.iterdir()):
        content = bytearray(file.read_bytes())
        for place in range(0, len(content), len(content) // 20):
            content[place] ^= 4
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=file.name):
                sharded.verified_index(path)
            content[place] ^= 4
        file.write_bytes(content[:-1])
        for load in (Durable().load_checkpoint, stored_weights.checkpoint):
            with pytest.raises(CheckpointError, match=file.name):
                load(path)
        file.write_bytes(content)
    assert is_equal(Durable().load_checkpoint(path), checkpoint()), "negative control"


def test_a_shard_that_is_missing_or_of_another_save_is_named(tmp_path: Path) -> None:
    path, other = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    token, another = save(path), save(other, checkpoint(2.0))
    part = sharded.shard_path(path, token, 1, NUM_RANKS)
    content = part.read_bytes()
    part.write_bytes(sharded.shard_path(other, another, 1, NUM_RANKS).read_bytes())
    with pytest.raises(CheckpointError, match=f"{part.name} is not loaded"):
        Durable().load_checkpoint(path)
    part.unlink()
    with pytest.raises(CheckpointError, match=part.name):
        Durable().load_checkpoint(path)
    part.write_bytes(content)
    (path / "index.ckpt").write_bytes((other / "index.ckpt").read_bytes())
    with pytest.raises(CheckpointError, match=f"part-{another}-0-of-3.ckpt"):
        Durable().load_checkpoint(path)
    (path / "index.ckpt").unlink()
    with pytest.raises(CheckpointError, match=r"index\.ckpt"):
        Durable().load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        Durable().load_checkpoint(tmp_path / "never.ckpt")


def hostile(path: Path, **changes: Any) -> None:
    """Change an index's content, with a correct digest."""
    content = torch.load(path / "index.ckpt", weights_only=True) | changes
    atomic_write.write_with_digest(path / "index.ckpt", lambda file: torch.save(content, file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "../../precious00"}, "not an index"),
        ({"version": 2}, "not an index"),
        ({"version": torch.ones(2)}, "not an index"),
        ({"digests": []}, "not an index"),
        ({"checkpoint": {"state_dict": {"few": torch.empty(3, device="meta")}}}, "few.*of shape .3,."),
        ({"checkpoint": {"state_dict": {"few": torch.empty((), device="meta")}}}, "rows of a tensor"),
    ],
)
def test_hostile_indexes_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path)
    hostile(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        Durable().load_checkpoint(path)


@pytest.mark.parametrize("rows", [None, torch.ones(4), torch.ones(5, 1), torch.ones(5).double()])
def test_hostile_shards_are_rejected(rows: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    token = save(path, {"x": torch.ones(5)}, num_ranks=1)
    part = sharded.shard_path(path, token, 0, 1)
    content = rows if rows is None else {"['x']": rows}
    written = atomic_write.write_with_digest(part, lambda file: torch.save(content, file))
    hostile(path, digests=[written.digest])
    with pytest.raises(CheckpointError, match="'x'"):
        Durable().load_checkpoint(path)


def test_code_is_never_loaded(tmp_path: Path) -> None:
    path, touched = tmp_path / "a.ckpt", tmp_path / "touched"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (touched,)

    token = save(path, num_ranks=1)
    part = sharded.shard_path(path, token, 0, 1)
    content = {"x": torch.ones(1), "more": Hostile()}
    written = atomic_write.write_with_digest(part, lambda file: torch.save(content, file))
    hostile(path, digests=[written.digest])
    file, whole = tmp_path / "file.ckpt", tmp_path / "b.ckpt"
    torch.save({"x": Hostile()}, file)
    save(whole)
    hostile(whole, more=Hostile())
    for hostile_path in (path, file, whole):
        for load in (Durable().load_checkpoint, stored_weights.checkpoint):
            with pytest.raises(CheckpointError, match="it holds a"):
                load(hostile_path)
    with pytest.raises(CheckpointError, match="weights_only=False"):
        Durable().load_checkpoint(file, weights_only=False)
    assert not touched.exists()
    torch.load(part, weights_only=False)
    assert touched.exists(), "negative control"


@pytest.mark.parametrize("first", [True, False])
def test_a_kill_at_any_step_leaves_the_previous_checkpoint(first: bool, tmp_path: Path) -> None:
    """Between every two changes that a save makes on the disk; the next clean-up leaves nothing over."""
    saved, moments, found = tmp_path / "a.ckpt", list[dict[str, bytes]](), list[int | None]()

    def look() -> None:
        files = saved.iterdir() if saved.exists() else []
        moments.append({file.name: file.read_bytes() for file in files})

    if not first:
        save(saved, checkpoint(1.0), num_ranks=2)
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, look)
        save(saved, checkpoint(2.0), num_ranks=2)
    for number, files in enumerate(moments):
        path = tmp_path / str(number) / "a.ckpt"
        path.mkdir(parents=True)
        for name, content in files.items():
            (path / name).write_bytes(content)
        loaded = Durable().load_checkpoint(path) if "index.ckpt" in files else None
        found.append(next((n for n in (1, 2) if is_equal(loaded, checkpoint(float(n)))), None))
        sharded.remove_leftovers(path.parent)
        left = names(path) if path.exists() else []
        assert len(left) == (3 if loaded else 0), number
        assert left[:1] == ["index.ckpt"][: len(left)]
    change = found.index(2)
    assert found == [None if first else 1] * change + [2] * (len(found) - change)
    assert len(found) > 20


def test_a_clean_up_removes_nothing_during_a_save_and_leftovers_after_it(tmp_path: Path) -> None:
    """A second folder is that of a save that died."""
    path = tmp_path / "a.ckpt"
    rest, rows = split_shards(checkpoint(), rows_of(0, 1))
    save_ = sharded.new_save(path)
    token = save_.__enter__()
    shard = sharded.write_shard(path, token, 0, 1, rows)
    (other,) = (each for each in path.iterdir() if token not in each.name)
    assert other.name.startswith(".durable-")
    assert sharded.remove_leftovers(tmp_path) == []
    shutil.copytree(path, dead := tmp_path / "dead.ckpt")
    (path / "part-1111111111111111-0-of-1.ckpt").write_text("no digest: another file")
    (dead / "part-1111111111111111-0-of-1.ckpt").write_text("no digest: another file")
    sharded.write_index(path, token, [shard.digest], rest)
    save_.__exit__(None, None, None)
    assert len(sharded.remove_leftovers(tmp_path)) == 2
    assert is_equal(Durable().load_checkpoint(path), checkpoint())
    assert names(dead) == ["part-1111111111111111-0-of-1.ckpt"]
    assert len(names(path)) == 3


def test_an_error_after_the_index_is_written_removes_no_shard(tmp_path: Path) -> None:
    """For example, the folder cannot be synced."""
    path = tmp_path / "a.ckpt"
    rest, rows = split_shards(checkpoint(), rows_of(0, 1))
    late = sharded.new_save(path)
    token = late.__enter__()
    shard = sharded.write_shard(path, token, 0, 1, rows)
    sharded.write_index(path, token, [shard.digest], rest)
    error = OSError(5, "late")
    assert not late.__exit__(OSError, error, None)
    assert is_equal(Durable().load_checkpoint(path), checkpoint())


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("mine")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / "thesis.txt").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match=name):
            save(tmp_path / f"{name}.ckpt")
    save(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    before = names(tmp_path / "a.ckpt")
    save(tmp_path / "last.ckpt", checkpoint(2.0))
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert names(tmp_path / "a.ckpt") == before, "the link is replaced, not its target"


def test_the_index_is_removed_first_and_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gone = tmp_path / "a.ckpt", list[str]()
    save(path)
    (path / "notes.txt").write_text("mine")
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **k: (gone.append(self.name), unlink(self, **k))[1])
    io = Durable()
    with pytest.warns(CheckpointWarning, match="is not removed"):
        io.remove_checkpoint(path)
    io.save_checkpoint({}, tmp_path / "b.ckpt")
    gone.clear()
    io.remove_checkpoint(path)
    assert gone[0] == "index.ckpt"
    assert len(gone) == NUM_RANKS + 1
    assert names(path) == ["notes.txt"]
    save(tmp_path / "c.ckpt")
    (tmp_path / "d.ckpt").symlink_to("c.ckpt")
    io.remove_checkpoint(tmp_path / "d.ckpt")
    io.remove_checkpoint(tmp_path / "c.ckpt")
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]
    assert io.outcome().numbers["num_removed"] == 3


def test_the_newest_valid_checkpoint_may_be_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = tmp_path / "run" / "checkpoints"
    Durable().save_checkpoint({"x": 1}, runs / "step-1.ckpt")
    token = save(runs / "step-2.ckpt")
    os.utime(runs / "step-1.ckpt", (1e9, 1e9))
    assert stored_weights.newest_valid(tmp_path) == runs / "step-2.ckpt"
    sharded.shard_path(runs / "step-2.ckpt", token, 2, NUM_RANKS).unlink()
    assert stored_weights.newest_valid(runs.parent) == runs / "step-1.ckpt"
    assert f"its shard part-{token}-2-of-3.ckpt is missing" in caplog.messages[0]


def test_unused_optimizer_state_is_not_read(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    state = stored_weights.checkpoint(tmp_path / "a.ckpt")["optimizer_states"][0]["state"][0]["exp_avg"]
    assert isinstance(state, LazyShardedTensor)
    assert len(state.shards) == NUM_RANKS
