"""The files that a Ray worker writes, and how the driver reads them, with a fake of Ray."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.core.errors import ConfigError, EnvironmentLacksError
from lightning_eff.launch import ray_driver, ray_worker, stop
from lightning_eff.launch.job import RUN_DIR, Launch
from lightning_eff.launch.ranks import ERROR_FILE
from lightning_eff.launch.ray import Ray
from tests.support.fake_ray import FakeTrain, install


class WorkerHealthCheckFailedError(Exception):
    """Ray's error for a lost worker, which is recognized by its name."""


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    return install(monkeypatch, in_worker=True)


def run_worker(train: Callable[[Any], None], folder: Path) -> None:
    (folder / "ray").mkdir(exist_ok=True)
    ray_worker.exchanged(folder, "stop").touch()
    ray_worker.work(
        {"train": train, "words": ["lm"], "folder": str(folder), "cwd": str(folder), "gpu": False}
    )


@pytest.fixture
def rank_0(in_worker: FakeTrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a run, in the worker with rank 0 of one."""
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in (RUN_DIR, ERROR_FILE, stop.STOP_FILE):  # so that they are restored: the worker sets them
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_workers_output_and_exit_code_are_in_files(rank_0: Path) -> None:
    def train(words: list[str]) -> None:
        assert words == ["lm"]
        assert Launch.of().by == "ray"
        assert sys.path[0] == str(rank_0)
        sys.stdout.write("a line\n")
        sys.stderr.write("another\n")

    run_worker(train, rank_0)
    assert ray_worker.exchanged(rank_0, "rank0.stdout").read_text() == "a line\n"
    assert ray_worker.exchanged(rank_0, "rank0.stderr").read_text() == "another\n"
    assert ray_worker.exchanged(rank_0, "code").read_text() == "0"


@pytest.mark.parametrize(
    ("error", "raised", "expected"),
    [
        (SystemExit(143), None, None),
        (ConfigError("x", 1, allowed="2", remedies=["x=2"]), None, ("x=1: expected 2\n  try: x=2", 2)),
        (ValueError("bad\nmore"), "ValueError: bad", ("rank 0: ValueError: bad", 1)),
        (MemoryError("none"), "MemoryError: none", ("rank 0: MemoryError: none", 4)),
    ],
)
def test_a_workers_error_reaches_the_driver_and_only_failures_are_restarted(
    error: BaseException, raised: str | None, expected: tuple[str, int] | None, rank_0: Path
) -> None:
    def train(_: Any) -> None:
        raise error

    (rank_0 / "ray").mkdir()
    for stale in (0, 1):  # files of the previous attempt
        ray_worker.exchanged(rank_0, f"rank{stale}.error").write_text("stale")
    if raised is None:
        run_worker(train, rank_0)
    else:
        with pytest.raises(RuntimeError, match=raised):
            run_worker(train, rank_0)
    failure = ray_driver._failure(None, rank_0, 3)
    found = (str(failure), failure.exit_code) if failure else None
    assert found == expected


def test_a_machine_that_does_not_see_the_runs_folder_is_an_error(rank_0: Path) -> None:
    with pytest.raises(RuntimeError, match="output_root"):
        ray_worker.work(
            {"train": print, "words": [], "folder": str(rank_0 / "other"), "cwd": ".", "gpu": False}
        )


def test_a_lost_worker_is_named(tmp_path: Path) -> None:
    error: Any = RuntimeError("Training failed")
    error.worker_failures = {0: RuntimeError("connection closed"), 1: WorkerHealthCheckFailedError()}
    failure = ray_driver._failure(error, tmp_path, 3)
    assert str(failure).startswith("rank 1 ")
    assert str(ray_driver._failure(RuntimeError("other"), tmp_path, 3)) == "RuntimeError: other"
    assert ray_driver._failure(None, tmp_path, 3) is None


def test_a_run_receives_a_signal_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, received = tmp_path / "stop", list[int]()
    file.touch()
    monkeypatch.setenv(stop.STOP_FILE, str(file))
    with stop._signals_from_file(lambda number, _: received.append(number)):
        file.write_text(str(int(signal.SIGTERM)))
        deadline = time.monotonic() + 60
        while not received and time.monotonic() < deadline:
            time.sleep(0.01)
    assert received == [signal.SIGTERM]


def test_a_machine_without_enough_resources_is_rejected_but_a_cluster_may_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_driver._check_room(Ray(workers=[2, 4], gpu=True), {"CPU": 2.0, "GPU": 2.0})
    for options, resources, remedy in [
        ({"workers": [3, 9], "gpu": True}, {"CPU": 3.0, "GPU": 2.0}, r"launch\.workers=2"),
        ({"workers": 3, "gpu": True}, {"CPU": 3.0}, r"launch\.gpu=false"),
        ({"cpus": 5}, {"CPU": 4.0}, r"launch\.cpus=1"),
    ]:
        with pytest.raises(EnvironmentLacksError, match=f"try: {remedy}"):
            ray_driver._check_room(Ray(**options), resources)
    ray_driver._check_room(Ray(workers=3, cpus=2, address="auto"), {"CPU": 4.0})
