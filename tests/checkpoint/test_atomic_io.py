"""Files of a strategy that was given no CheckpointIO; tests/checkpoint_io/test_durable.py has the faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_eff.checkpoint.atomic_io import AtomicFiles
from lightning_eff.core.errors import CheckpointError


def test_a_file_is_verified_and_runs_no_code(tmp_path: Path) -> None:
    path, io = tmp_path / "one.ckpt", AtomicFiles()
    io.save_checkpoint({"weight": torch.ones(2)}, path)
    io.save_checkpoint({"weight": torch.zeros(2)}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["one.ckpt"]
    assert torch.equal(io.load_checkpoint(path)["weight"], torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"would run code"):
        io.load_checkpoint(path, weights_only=False)
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        io.load_checkpoint(path)
