"""Forecasts: the peak of a recipe to the byte, bytes added for CUDA, whether it fits, names of devices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.commands.plan import split_device
from lightning_eff.config import composition
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import DEVICES
from lightning_eff.planner.forecast import (
    CONTEXT_BYTES,
    HOPPER_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    DeviceMemory,
    ExampleBatch,
    MemoryForecast,
    forecast,
)
from lightning_eff.planner.printing import Plan
from lightning_eff.prediction.predict import Prediction, predict_step
from lightning_eff.run import build

GIB = 2**30


def prediction() -> Prediction:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, foreach=False)
    return predict_step(nn.Linear(10, 10, bias=False), torch.ones(5, 10), lambda net, x: net(x).sum(), sgd)


def test_blocks_are_rounded_and_the_workspace_is_added() -> None:
    """At the peak: weight, gradient and batch in blocks of 512, the loss and its gradient in one each."""
    here = MemoryForecast(prediction(), DeviceMemory.of(devices.named("cpu")))
    there = MemoryForecast(prediction(), DeviceMemory.of(DEVICES["a100"]))
    assert here.num_bytes == 400 + 400 + 200 + 4 + 4
    assert there.num_bytes == 5 * 512 + 4096 * 1024 * 2 + 16 * 1024 * 8
    assert DeviceMemory.of(DEVICES["h100"]).workspace_bytes == 32 * 2**20


def test_the_context_of_the_driver_is_not_free_memory() -> None:
    taken = MemoryForecast(prediction(), DeviceMemory("tight", 2**20, is_cuda=True)).num_bytes
    assert taken is not None
    tight = MemoryForecast(prediction(), DeviceMemory("tight", taken + CONTEXT_BYTES, is_cuda=True))
    short = MemoryForecast(prediction(), DeviceMemory("short", taken + CONTEXT_BYTES - 1, is_cuda=True))
    assert [each.fits for each in (tight, short)] == [True, False]
    unknown = MemoryForecast(Prediction(reason="no"), DeviceMemory("here", 1))
    assert Plan(unknown).as_dict()["peak"]["fits"] is None


def planned(*words: str) -> DeviceMemory:
    device, memory_bytes, _ = split_device(words)
    assert device is not None
    return DeviceMemory.of(device, memory_bytes=memory_bytes)


def test_the_device_is_removed_from_the_overrides() -> None:
    assert split_device(["device=RTX4090", "seed=1"]) == (DEVICES["rtx4090"], None, ["seed=1"])
    assert split_device(["seed=1"]) == (None, None, ["seed=1"])
    memory = planned("device=rtx3090", "device.memory=10GiB")
    assert (memory.name, memory.memory_bytes) == ("RTX 3090", 10 * GIB)
    assert memory.workspace_bytes == WORKSPACE_BYTES
    host = planned("device=cpu", "device.memory=3GiB")
    assert (host.memory_bytes, host.is_cuda) == (3 * GIB, False)


def test_attention_of_an_unknown_gpu_is_planned_as_on_an_a100() -> None:
    memory = planned("device.memory=40GiB")
    assert (memory.memory_bytes, memory.is_cuda, memory.capability) == (40 * GIB, True, 80)
    assert memory.workspace_bytes == HOPPER_WORKSPACE_BYTES, "the larger of the two"
    assert any("A100" in text for text in memory.about)


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (["device=H10"], "device", "'h100'"),
        *[([f"device.memory={size}"], "device.memory", "MiB") for size in ("40", "nanGiB")],
    ],
)
def test_unknown_names_and_sizes_are_rejected_by_key(words: list[str], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_device(words)
    assert caught.value.key == key
    assert text in caught.value.allowed


def compose(recipe: str, *words: str) -> dict[str, Any]:
    return dict(composition.compose_recipe(recipe, list(words), RecipePath.of([])).values)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::lightning_eff.core.errors.NoEffectWarning")
def test_the_predicted_peak_of_a_recipe_is_the_measured_one(tiny: list[str], tmp_path: Path) -> None:
    words = ["data.batch_size=4", "callbacks.micro_batch.micro_batch_size=2", "data.context_length=8"]
    window = "callbacks.gradient_accumulation.global_batch_size=4"
    values = compose("low_memory", *tiny, "trainer.max_steps=2", *words, window, "+callbacks=data_preload")
    values |= {"monitors": {"efficiency_report": values["monitors"]["efficiency_report"]}, "logger": None}
    memory = DeviceMemory.of(devices.this_cpu())
    synthetic = forecast(values, memory).prediction
    measured = build(values, recipe="low_memory", run_dir=tmp_path / "run").fit()["measured"]["peak_bytes"]
    found = forecast(values, memory).prediction
    assert (synthetic.reason, found.reason) == ("", "")
    assert found.peak is not None
    assert synthetic.peak is not None
    assert found.peak.num_bytes == synthetic.peak.num_bytes == measured
    assert any("synthetic" in each for each in synthetic.assumed)
    assert not any("synthetic" in each for each in found.assumed)


def test_prepared_data_give_a_real_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    example = ExampleBatch.of(compose("images"))
    assert example.batch[0].shape == (64, 1, 8, 8)
    assert (example.batch_size, example.num_batches) == (64, 23), "1438 of 1797 digits"
