"""Launchers' environment variables, compared with the Trainer's settings; no process is started."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.core.errors import ConfigError, UsageError
from lightning_eff.launch import job, ranks
from lightning_eff.launch.job import (
    Launch,
    check_machines,
    check_tasks,
    num_ranks,
    shared_run_dir,
)
from tests.support.command_line import Command

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
TORCHRUN["LOCAL_WORLD_SIZE"] = "2"
SLURM = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch()),
        (TORCHRUN, Launch("torchrun", 1, 2, 2)),
        (SLURM, Launch("slurm", 2, 4, 2)),
        (SLURM | {"SLURM_JOB_NAME": "interactive"}, Launch()),
        (SLURM | TORCHRUN, Launch("torchrun", 1, 2, 2)),  # torchrun inside a SLURM job
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, Launch("lightning", 1)),
        ({"NODE_RANK": "1"}, Launch("", 1)),  # the command on the second of two machines
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, Launch("lightning", 1)),
    ],
)
def test_launchers_are_detected_by_their_variables(environment: dict[str, str], expected: Launch) -> None:
    assert Launch.of(environment) == expected


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"devices": "3"}, 3),
        ({"devices": [0, 2]}, 2),
        ({"devices": "0,2"}, 2),
        ({"devices": 2, "num_nodes": 3}, 6),
    ],
)
def test_ranks_are_counted_without_a_trainer(trainer: dict[str, Any], expected: int) -> None:
    assert num_ranks(trainer) == expected


@pytest.mark.parametrize(
    ("trainer", "started", "key"),
    [
        ({"devices": 2}, Launch("torchrun", 0, 4, 4), "trainer.devices"),
        ({"devices": 2, "num_nodes": 3}, Launch("slurm", 0, 4, 2), "trainer.num_nodes"),
        ({"devices": 1}, Launch("slurm", 0, 2), "SLURM_NTASKS"),
        ({"devices": 2}, Launch(), ""),
        ({"devices": 2, "num_nodes": 2}, Launch("slurm", 3, 4, 2), ""),
        ({"num_nodes": "auto"}, Launch("torchrun", 0, 6, 3), ""),
    ],
)
def test_a_number_of_tasks_that_differs_from_the_devices_is_rejected(
    trainer: dict[str, Any], started: Launch, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=") if key else nullcontext():
        check_tasks(trainer, started)


@pytest.mark.parametrize(
    ("trainer", "environment", "key"),
    [
        ({"num_nodes": 2}, {"NODE_RANK": "1", "MASTER_ADDR": "a"}, ""),
        ({"num_nodes": "auto"}, {"NODE_RANK": "0"}, ""),
        ({"num_nodes": "auto"}, {"NODE_RANK": "0", "MASTER_ADDR": "a"}, "NODE_RANK"),
        ({"num_nodes": 2}, {"PET_NNODES": "1:4"}, "PET_NNODES"),
        ({"devices": 1, "num_nodes": 4}, {"WORLD_SIZE": "4", "NODE_RANK": "2"}, ""),
        ({"devices": 2}, {"WORLD_SIZE": "4", "RANK": "2"}, "WORLD_SIZE"),
    ],
)
def test_a_machine_of_several_does_not_train_alone(
    trainer: dict[str, Any], environment: dict[str, str], key: str
) -> None:
    with pytest.raises(ConfigError, match=key) if key else nullcontext():
        check_machines(trainer, environment)


def test_train_rejects_a_wrong_number_of_tasks_before_anything_is_built(
    tiny: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("lightning_eff.run.build", lambda *_, **__: pytest.fail("it was built"))
    monkeypatch.setattr("lightning_eff.launch.ranks.end_with_parent", lambda: None)
    assert "trainer.devices=3: " in command("train", "baseline", *tiny, "trainer.devices=3", code=2)[2]
    assert not Path("outputs").exists()


def test_slurms_ids_name_the_folder_unless_the_user_has_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    slurm, torchrun = Launch("slurm", 1, 2, 2), Launch("torchrun", 1, 2, 2)
    here = Path("outputs/lm/now")
    assert shared_run_dir(slurm, here, has_default_name=True) == Path("outputs/lm/slurm-12-0-0")
    assert shared_run_dir(Launch(), here, has_default_name=True) == here
    for started in (slurm, torchrun):
        assert shared_run_dir(started, here, has_default_name=False) == here
    with pytest.raises(UsageError, match=r"try: hydra\.run\.dir=outputs/NAME"):
        shared_run_dir(torchrun, here, has_default_name=True)


def test_the_ranks_of_each_attempt_meet_at_a_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def started_again() -> None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(store.port))

    def folder_of(rank: int, name: str) -> Path:
        return shared_run_dir(Launch("torchrun", rank, 2, 2), Path(name), has_default_name=True)

    started_again()
    monkeypatch.setattr(job, "WAIT_S", 1.0)
    for rank in (1, 0):  # each rank alone; its question or answer stays in torchrun's store
        with pytest.raises(UsageError, match="within 1 s"):
            folder_of(rank, "lost")
    monkeypatch.setattr(job, "WAIT_S", 60.0)
    for attempt in ("first", "second"):
        started_again()
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(folder_of, (0, 1), (attempt, "other")))
        assert found == [Path(attempt)] * 2
        assert int(os.environ["MASTER_PORT"]) != store.port
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize(
    ("restarts", "rank", "error", "is_reported"),
    [
        ("0", 0, ConfigError("x", 1, allowed="2"), True),
        ("3", 0, ConfigError("x", 1, allowed="2"), False),
        ("3", 1, ConfigError("x", 1, allowed="2"), True),
        ("3", 1, RuntimeError("of one rank"), False),
    ],
)
def test_each_attempt_under_torchrun_reports_its_failure_once(
    restarts: str, rank: int, error: Exception, is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun prints a summary after the last attempt; a setting that all ranks reject is printed once."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setattr(ranks, "report_error", lambda error: True)
    with pytest.raises(type(error)), ranks.reported_to_parent(Launch("lightning", rank)):
        raise error
    assert error.__dict__["is_reported"] is is_reported
