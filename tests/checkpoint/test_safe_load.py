"""Special files, which have no end, are rejected by name."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_eff.checkpoint import digest, stored_weights
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError
from lightning_eff.models.hf_causal_lm import check_weights
from tests.support.command_line import Command


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_opening_a_special_file_does_not_block(kind: str, empty_folder: Path) -> None:
    for name in ("odd.ckpt", "odd.safetensors"):
        if kind == "FIFO":
            os.mkfifo(name)
        else:
            Path(name).symlink_to("/dev/zero")
    path, verify = Path("odd.ckpt"), partial(digest.read_with, reader=digest.verify)
    for look in (verify, stored_weights.checkpoint, Durable().load_checkpoint, digest.has_digest):
        with pytest.raises(CheckpointError, match="it is not a regular file"):
            look(path)
    with pytest.raises(CheckpointError, match=r"odd\.safetensors is not loaded: it is not a regular file"):
        stored_weights.weights(Path("odd.safetensors"))
    with pytest.raises(ValueError, match="which is not a regular file"):
        check_weights(".", SimpleNamespace())


@pytest.mark.timeout(120)
def test_a_run_rejects_a_special_file_and_writes_nothing(tiny: list[str], command: Command) -> None:
    os.mkfifo("odd.ckpt")
    before = sorted(Path().rglob("*"))
    _, _, err = command("train", "baseline", *tiny, "ckpt_path=odd.ckpt", code=2)
    assert "odd.ckpt" in err
    assert "Traceback" not in err
    assert sorted(Path().rglob("*")) == before
