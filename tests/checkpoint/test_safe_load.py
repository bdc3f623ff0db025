"""Special files, and folders of another version: rejected by name, exit code 2."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_eff.checkpoint import digest, sharded, stored_weights
from lightning_eff.checkpoint.atomic_write import write_with_digest
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError
from lightning_eff.models.hf_causal_lm import check_weights
from tests.support.command_line import Command

BASE = "callbacks.peft_adapter.base_checkpoint"


@pytest.fixture(params=["FIFO", "device"])
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `odd.ckpt` and `odd.safetensors` special files without an end."""
    monkeypatch.chdir(tmp_path)
    for name in ("odd.ckpt", "odd.safetensors"):
        if request.param == "FIFO":
            os.mkfifo(name)
        else:
            Path(name).symlink_to("/dev/zero")


def refused(command: Command, text: str, *words: str) -> None:
    before = sorted(Path().rglob("*"))
    code, _, err = command("train", "baseline", *words)
    assert text in err
    assert code == 2, err
    assert "Traceback" not in err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.timeout(60)
def test_opening_a_special_file_does_not_block(odd: None) -> None:
    path, verify = Path("odd.ckpt"), partial(digest.read_with, reader=digest.verify)
    for look in (verify, stored_weights.checkpoint, Durable().load_checkpoint, digest.has_digest):
        with pytest.raises(CheckpointError, match="it is not a regular file"):
            look(path)
    with pytest.raises(CheckpointError, match=r"odd\.safetensors is not loaded: it is not a regular file"):
        stored_weights.weights(Path("odd.safetensors"))
    with pytest.raises(ValueError, match="which is not a regular file"):
        check_weights(".", SimpleNamespace())


@pytest.mark.timeout(120)
def test_a_run_rejects_special_files(odd: None, tiny: list[str], command: Command) -> None:
    text = "odd.ckpt is not loaded: it is not a regular file"
    refused(command, text, *tiny, "ckpt_path=odd.ckpt")
    refused(command, text, *tiny, "+callbacks=peft_adapter", f"{BASE}=odd.ckpt")
    runs = Path("outputs/baseline/one/checkpoints")
    runs.mkdir(parents=True)
    Path("odd.ckpt").rename(runs / "odd.ckpt")
    refused(command, f"skipped: checkpoint {runs / 'odd.ckpt'} is not loaded", *tiny, "ckpt_path=last")


def test_a_run_rejects_an_invalid_format_version(tiny: list[str], command: Command) -> None:
    content = {"format": sharded.FORMAT, "version": "banana"}
    write_with_digest(Path("parts.ckpt") / sharded.INDEX, lambda file: torch.save(content, file))
    text = "parts.ckpt/index.ckpt is not loaded: it is not an index of version 1"
    refused(command, text, *tiny, "ckpt_path=parts.ckpt")
    refused(command, text, *tiny, "+callbacks=peft_adapter", f"{BASE}=parts.ckpt")
