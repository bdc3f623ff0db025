"""The digest in a checkpoint file: no damaged file loads, and stock readers still read the file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_eff.checkpoint import digest
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError, CheckpointWarning


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    values = {"a": torch.randn(40, 40), "b": torch.randn(300).to(torch.bfloat16), "c": torch.arange(50)}
    return {"state_dict": values, "global_step": 3, "name": "x", "rates": [0.1, None, True]}


def save(path: Path, values: dict[str, Any] | None = None) -> bytes:
    Durable().save_checkpoint(values or state(), path)
    return path.read_bytes()


def equal(loaded: dict[str, Any], expected: dict[str, Any]) -> bool:
    pairs = zip(loaded["state_dict"].values(), expected["state_dict"].values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and {**loaded, "state_dict": 0} == {
        **expected,
        "state_dict": 0,
    }


def test_stock_readers_read_the_file_and_two_commands_verify_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    content = save(path)
    for keywords in ({}, {"mmap": True}):
        assert equal(torch.load(path, weights_only=True, **keywords), state())
    assert equal(torch.load(io.BytesIO(content), weights_only=True), state())
    assert equal(TorchCheckpointIO().load_checkpoint(path, weights_only=True), state())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment == content[-digest.NUM_COMMENT_BYTES :]
    shown = [f"head -c -64 {path} | sha256sum", f"tail -c 64 {path}"]
    digests = [subprocess.check_output(each, shell=True, text=True)[:64] for each in shown]
    assert digests[0] == digests[1] == hashlib.sha256(content[:-64]).hexdigest()
    plain = io.BytesIO()
    torch.save(state(), plain)
    assert len(content) == len(plain.getvalue()) + digest.NUM_COMMENT_BYTES


def flipped(content: bytes, place: int, bit: int) -> bytes:
    return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]


def damaged(draw: random.Random, good: bytes, other: bytes) -> dict[str, bytes]:
    """Return the content of damaged files, by kind of damage."""
    place = draw.randrange(1, len(good) - 64)
    return {
        "flip": flipped(good, draw.randrange(len(good)), draw.randrange(8)),
        "cut": good[: draw.randrange(len(good))],
        "zeros": good[:place] + bytes(64) + good[place + 64 :],
        "other tail": good[:place] + other[place:],
        "more": good + draw.randbytes(draw.randrange(1, 100)),
    }


def loads_silently(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        Durable().load_checkpoint(path)
    except (CheckpointError, FileNotFoundError):
        return False
    return True


@pytest.mark.parametrize(
    "num_files", [pytest.param(70), pytest.param(700, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_no_damaged_file_loads(num_files: int, tmp_path: Path) -> None:
    good, other = save(tmp_path / "a.ckpt"), save(tmp_path / "b.ckpt", state(1))
    draw = random.Random(num_files)
    tried, accepted_by_torch = 0, 0
    for _ in range(num_files // 5):
        for kind, content in damaged(draw, good, other).items():
            if content in (good, other):
                continue
            tried += 1
            assert not loads_silently(tmp_path / "bad.ckpt", content), kind
            if kind == "flip":
                with contextlib.suppress(Exception):  # whatever it is, it is no silence
                    torch.load(tmp_path / "bad.ckpt", weights_only=True)
                    accepted_by_torch += 1
    assert tried > 0.9 * num_files
    assert accepted_by_torch > 0.5 * num_files / 5, "negative control: torch takes most of them"
    assert loads_silently(tmp_path / "bad.ckpt", good)


def test_no_bit_of_the_end_or_the_beginning_can_flip(tmp_path: Path) -> None:
    """A flip in the digest's prefix must not turn the file into one without a digest."""
    good, path = save(tmp_path / "a.ckpt"), tmp_path / "bad.ckpt"
    for place in [*range(0, 40, 5), *range(len(good) - 110, len(good) - 60)]:
        for bit in (0, 3, 7):
            assert not loads_silently(path, flipped(good, place, bit)), (place, bit)
    for place in range(len(good) - 130, len(good), 3):
        assert not loads_silently(path, good[:place])


def test_a_stock_file_loads_with_a_warning_and_only_if_its_checksums_match(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    TorchCheckpointIO().save_checkpoint(state(), path)
    io_ = Durable()
    with pytest.warns(CheckpointWarning, match="has no SHA-256"):
        assert equal(io_.load_checkpoint(path), state())
    assert io_.outcome().numbers["num_without_digest"] == 1
    content = path.read_bytes()
    place = content.index(state()["state_dict"]["a"].numpy().tobytes()) + 1000
    path.write_bytes(flipped(content, place, 2))
    assert not torch.equal(torch.load(path)["state_dict"]["a"], state()["state_dict"]["a"]), "torch is silent"
    with pytest.raises(CheckpointError, match="CRC-32"):
        Durable().load_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\5\6" + bytes(18)])
def test_other_files_are_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not loaded"):
        Durable().load_checkpoint(tmp_path / "a.ckpt")
