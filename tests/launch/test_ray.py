"""Settings, ranks, reports and errors of a run under Ray, with a fake of Ray; real jobs are slow tests."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_eff.core.errors import ConfigError, EnvironmentLacksError
from lightning_eff.launch import ray_driver
from lightning_eff.launch.job import Launch, check_tasks
from lightning_eff.launch.ray import Ray
from lightning_eff.launch.ray_worker import RayReport, check_device, check_even
from tests.support.command_line import TINY, Command
from tests.support.fake_ray import WORKER, FakeTrain, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    return install(monkeypatch)


def test_a_worker_is_not_confused_with_a_rank_of_another_launcher() -> None:
    others = {"TORCHELASTIC_RUN_ID": "x", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert Launch.of(WORKER) == Launch.of(others | WORKER) == Launch("ray", 3, 4, 2, "cpu")
    check_tasks({"devices": "auto"}, Launch("ray", 3, 4, 2))


@pytest.mark.parametrize(
    ("options", "changed", "text"),
    [
        ({"workers": [1, 1000]}, {}, ""),
        ({"workers": 2}, {"trainer": {"devices": 2}}, ""),
        ({"workers": [2, 4]}, {"trainer": {"devices": 2}}, "trainer.devices="),
        ({"gpu": True}, {"trainer": {"accelerator": "cpu"}}, "trainer.accelerator="),
        ({}, {"monitors": {"model_checkpoint": {"dirpath": "out/other"}}}, "model_checkpoint.dirpath="),
    ],
)
def test_contradicting_settings_are_rejected_before_ray_starts(
    options: dict[str, Any], changed: dict[str, Any], text: str
) -> None:
    values = {"trainer": {"devices": "auto", "accelerator": "auto"}, "run_dir": "out"}
    values["trainer"] = {**values["trainer"], **changed.get("trainer", {})}
    values |= {key: value for key, value in changed.items() if key != "trainer"}
    with pytest.raises(ConfigError, match=text) if text else nullcontext():
        Ray(**options).check(values)


def test_a_global_batch_must_fit_any_number_of_workers() -> None:
    values: dict[str, Any] = {"trainer": {}, "run_dir": "out"}
    values["data"] = {"_target_": "lightning_eff.data.text.Text", "batch_size": 4}
    values["callbacks"] = {"gradient_accumulation": {"global_batch_size": 16}}
    Ray(workers=[1, 2]).check(values)
    for workers in ([1, 3], 8):
        with pytest.raises(ConfigError, match="global_batch_size=16"):
            Ray(workers=workers, address="auto").check(values)
    Ray(workers=8, address="auto").check(values | {"data": {"_target_": "mine.Data", "batch_size": 4}})


def test_the_number_of_workers_replaces_a_recipes_devices_but_not_an_override(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> dict[str, Any]:
        started.append(arguments)
        return {}

    monkeypatch.setattr(ray_driver, "run", run)
    own = ["data.batch_size=4", f"output_root={tmp_path}"]
    code, _, log = command("train", "fsdp2", "launch=ray", "launch.workers=[1,2]", *own)
    assert code == 0, log
    assert started[0][0].bounds == (1, 2)
    assert command("train", "fsdp2", "launch=ray", "launch.workers=1", "trainer.devices=2", *own)[0] == 2


def test_without_ray_the_command_shows_the_installation_and_leaves_no_folder(
    command: Command, fake: FakeTrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    code, _, log = command("train", "lm", "launch=ray", *TINY, f"output_root={tmp_path}")
    assert code == 3
    assert "try: pip install 'lightning-eff[ray]'" in log
    assert list(tmp_path.iterdir()) == []


def test_machines_with_different_numbers_of_workers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(counts: list[int], own: int) -> None:
        counts[:] = [2, 2, own]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    check_even(Launch("ray", num_tasks=3, num_local_tasks=2))
    with pytest.raises(ConfigError, match=r"launch\.workers=3: .*\[1, 2\]"):
        check_even(Launch("ray", num_tasks=3, num_local_tasks=1))


def test_a_gpu_whose_index_is_not_the_local_rank_is_rejected() -> None:
    check_device(torch.device("cuda:1"), 1)
    check_device(torch.device("cpu"), 1)
    with pytest.raises(EnvironmentLacksError, match="cuda:2"):
        check_device(torch.device("cuda:2"), 0)


class Saver(SimpleNamespace):
    """The attributes of a Trainer that `RayReport` reads."""

    @classmethod
    def at(cls, step: int, path: Path, rank: int) -> Any:
        from lightning.pytorch.callbacks import ModelCheckpoint

        saver = ModelCheckpoint()
        saver._last_global_step_saved, saver._last_checkpoint_saved = step, str(path) if step else ""
        return cls(checkpoint_callbacks=[saver], current_epoch=0, is_global_zero=rank == 0)


@pytest.mark.parametrize(("rank", "is_folder"), [(0, False), (1, False), (1, True)])
def test_each_save_is_reported_once_by_all_ranks(
    rank: int, is_folder: bool, fake: FakeTrain, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoints" / "step-2.ckpt"
    path.mkdir(parents=True) if is_folder else path.parent.mkdir()
    reporter, module = RayReport(), Any
    reporter.on_train_batch_end(Saver.at(0, path, rank), module, None, None, 0)
    assert fake.reported == []
    for hook in (reporter.on_validation_end, reporter.on_train_epoch_end, reporter.on_train_end):
        hook(Saver.at(2, path, rank), module)
    named = str(path.parent) if rank == 0 or is_folder else None
    assert fake.reported == [({"step": 2, "epoch": 0, "checkpoint": "step-2.ckpt"}, named)]
