"""GPUs of data sheets, and any other by its memory: what is unknown is not scaled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_eff.commands.plan import PlannedDevice
from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels import devices
from lightning_eff.planner import gpus
from lightning_eff.planner.device_memory import HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES, DeviceMemory
from lightning_eff.planner.gpus import GIB, GPUS
from tests.support.command_line import Command

CPU = torch.device("cpu")
ASKED = (
    "a100 a100_40gb a10 a40 a30 l4 l40s a6000 rtx6000ada t4 v100 rtx3060 rtx3070 rtx3080 rtx3090 rtx4060 "
    "rtx4070 rtx4080 rtx4090 rtx5060ti rtx5070 rtx5080 rtx5090 h100 h100_pcie h100_nvl h200 b200 gh200 "
    "rtxpro6000 mi250x mi300x mi325x"
)


def test_common_gpus_are_known_by_name() -> None:
    for name in ASKED.split():
        assert DeviceMemory.of(name, CPU).is_cuda
    assert len(set(gpus.names())) == len(gpus.names())


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("a10", torch.bfloat16, 125),
        ("l4", torch.float8_e4m3fn, 242.5),
        ("t4", torch.float16, 65),
        ("t4", torch.bfloat16, None),  # it has no units for it
        ("rtx3090", torch.float16, 71),  # with sums in float32; 142 with float16's
        ("rtx3060", torch.float32, None),
        ("rtxpro6000", torch.bfloat16, None),
        ("mi300x", torch.bfloat16, 1307.4),
        ("h100", torch.bfloat16, 989),
        ("cpu", torch.float32, None),  # a guess, which is no peak
    ],
)
def test_speeds_are_those_of_data_sheets_or_unknown(
    name: str, dtype: torch.dtype, tflops: float | None
) -> None:
    found = gpus.peak(gpus.named(name), dtype)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_no_memory_is_more_than_the_data_sheets() -> None:
    assert GPUS["rtx3090"].memory_bytes == int(24 * 0.97 * GIB)
    assert GPUS["l4"].memory_bytes == int(24 * 15 / 16 * 0.97 * GIB)
    assert "1/16 for error correction" in GPUS["l4"].assumed[0]
    for gpu in GPUS.values():
        for dtype, rate in gpu.tflops.items():
            assert 1 < rate < 3000, (gpu.name, dtype)
        half, tf32 = gpu.tflops.get("float16"), gpu.tflops.get("tf32")
        assert half is None or tf32 is None or half / tf32 == pytest.approx(2, rel=0.02), gpu.name


def test_a_gpu_of_a_given_memory_has_nothing_else_that_is_known() -> None:
    memory = DeviceMemory.of("", CPU, memory_bytes=gpus.memory_of("40GiB"))
    assert (memory.name, memory.memory_bytes, memory.is_cuda) == ("a GPU", 40 * GIB, True)
    assert memory.workspace_bytes == HOPPER_WORKSPACE_BYTES, "the larger of the two"
    assert any("unknown" in text for text in memory.about)
    assert gpus.peak(gpus.any_gpu(GIB), torch.float32) is None
    smaller = DeviceMemory.of("rtx3090", CPU, memory_bytes=10 * GIB)
    assert (smaller.name, smaller.memory_bytes, smaller.about) == ("RTX 3090", 10 * GIB, ())
    assert smaller.workspace_bytes == WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("40GiB", 40 * GIB), ("1.5 GB", 1_500_000_000), ("512mib", 2**29), ("1TiB", 2**40)],
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert gpus.memory_of(text) == num_bytes


@pytest.mark.parametrize("text", ["40", "GiB", "-1GiB", "0GiB", "40 G iB", "40Gib/s", "", "nanGiB"])
def test_other_sizes_are_refused_with_the_key_and_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size above 0 with its unit, one of KiB, MiB") as caught:
        gpus.memory_of(text)
    assert (caught.value.key, caught.value.value) == ("device.memory", text)


def test_rules_are_those_of_the_gpus_capability() -> None:
    assert set(gpus.facts(GPUS["l4"])) == {"machine/float8"}
    assert set(gpus.facts(GPUS["t4"])) == {"machine/emulated_bfloat16"}
    assert gpus.facts(GPUS["mi300x"]) == gpus.facts(gpus.any_gpu(GIB)) == {}
    assert DeviceMemory.of("t4", CPU).capability == 75
    assert DeviceMemory.of("mi300x", CPU).capability == devices.DEVICES["a100"].capability


def test_a_plan_for_any_gpu_says_what_it_does_not_know(command: Command, empty_folder: Path) -> None:
    del empty_folder
    words = ["baseline", "data.batch_size=2", "data.context_length=32", "trainer.accelerator=cpu", "--json"]
    found = json.loads(command("plan", *words, "device.memory=40GiB", code=0)[1])["peak"]
    assert (found["device"], found["device_bytes"], found["fits"]) == ("a GPU", 40 * GIB, True)
    assert any("speed and formats are unknown" in text for text in found["assumed"])
    tight = json.loads(command("plan", *words, "device=l4", "device.memory=520MiB", code=0)[1])["peak"]
    assert (tight["device"], tight["fits"]) == ("L4", False)


def test_the_case_of_a_name_does_not_count() -> None:
    assert PlannedDevice.split(["device=RTX4090", "seed=1"]) == (PlannedDevice("rtx4090"), ["seed=1"])
