"""A fake of Ray in this process: a worker's variables and reports."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_eff.launch.job import RAY

WORKER = {
    RAY: "cpu",
    "TORCHELASTIC_RUN_ID": "ray",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}


class FakeTrain(ModuleType):
    """`ray.train` in a worker: keeps the reports."""

    CheckpointUploadMode = SimpleNamespace(NO_UPLOAD="no upload")

    def __init__(self) -> None:
        super().__init__("ray.train")
        self.reported: list[tuple[dict[str, Any], Any]] = []
        self.Checkpoint = lambda path: SimpleNamespace(path=path)

    def report(self, metrics: dict[str, Any], *, checkpoint: Any, checkpoint_upload_mode: str) -> None:
        assert checkpoint_upload_mode == "no upload"
        self.reported.append((metrics, checkpoint and checkpoint.path))


def install(monkeypatch: pytest.MonkeyPatch, *, in_worker: bool = False) -> FakeTrain:
    """Replace Ray by the fake; with `in_worker` this process is rank 3 of 4."""
    train = FakeTrain()
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    for name, value in WORKER.items() if in_worker else ():
        monkeypatch.setenv(name, value)
    return train
