"""A fake of Ray in this process: the variables and the context of a worker, and what it reports."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_eff.launch.job import RAY

WORKER = {
    RAY: "1",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}
CONTEXT = SimpleNamespace(
    get_world_size=lambda: 4,
    get_world_rank=lambda: 3,
    get_local_rank=lambda: 1,
    get_local_world_size=lambda: 2,
    get_node_rank=lambda: 1,
)


class FakeTrain(ModuleType):
    """`ray.train` in a worker: keeps what is reported."""

    CheckpointUploadMode = SimpleNamespace(NO_UPLOAD="no upload")

    def __init__(self, context: Any = CONTEXT, checkpoint: Any = None) -> None:
        super().__init__("ray.train")
        self.reported: list[tuple[dict[str, Any], Any]] = []
        self.get_context = lambda: context
        self.get_checkpoint = lambda: checkpoint
        self.Checkpoint = lambda path: SimpleNamespace(path=path)

    def report(self, metrics: dict[str, Any], *, checkpoint: Any, checkpoint_upload_mode: str) -> None:
        assert checkpoint_upload_mode == "no upload"
        self.reported.append((metrics, checkpoint and checkpoint.path))


def install(monkeypatch: pytest.MonkeyPatch, *, in_worker: bool = False) -> FakeTrain:
    """Put the fake in Ray's place; with `in_worker` this process is rank 3 of 4."""
    train = FakeTrain()
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    for name, value in WORKER.items() if in_worker else ():
        monkeypatch.setenv(name, value)
    return train
