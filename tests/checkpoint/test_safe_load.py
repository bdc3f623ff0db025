"""Special files, which would block or never end, are rejected by name."""

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


@pytest.mark.timeout(60)
def test_opening_a_fifo_does_not_block(empty_folder: Path) -> None:
    os.mkfifo("odd.ckpt")
    os.mkfifo("odd.safetensors")
    path, verify = Path("odd.ckpt"), partial(digest.read_with, reader=digest.verify)
    for look in (verify, stored_weights.checkpoint, Durable().load_checkpoint, digest.has_digest):
        with pytest.raises(CheckpointError, match="it is not a regular file"):
            look(path)
    with pytest.raises(CheckpointError, match=r"odd\.safetensors is not loaded: it is not a regular file"):
        stored_weights.weights(Path("odd.safetensors"))
    with pytest.raises(ValueError, match="which is not a regular file"):
        check_weights(".", SimpleNamespace())
