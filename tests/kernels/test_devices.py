"""Devices: sizes come from the driver, peaks from the table, and TF32 is read from any switch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels import devices, gemm_kernels
from lightning_eff.kernels.devices import KIB
from tests.support.tf32 import SWITCHES, in_forks

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the driver report a GPU."""

    def report(name: str, num_sms: int, memory_gib: float, capability: int) -> None:
        properties = SimpleNamespace(
            name=name, major=capability // 10, minor=capability % 10, multi_processor_count=num_sms,
            total_memory=int(memory_gib * KIB**3), L2_cache_size=48 * KIB**2,
            shared_memory_per_block=48 * KIB, shared_memory_per_block_optin=200 * KIB,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10))

    return report


@pytest.mark.parametrize(
    ("name", "num_sms", "memory_gib", "capability", "in_table"),
    [
        ("NVIDIA H200", 132, 139.8, 90, "h200"),
        ("NVIDIA A100-SXM4-40GB", 108, 39.4, 80, "a100"),
        ("NVIDIA GH200 480GB", 132, 94.5, 90, None),  # contains H200, but is another GPU
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 15.7, 89, None),
    ],
)
def test_sizes_come_from_the_driver_and_peaks_from_the_table(
    gpu: Any, name: str, num_sms: int, memory_gib: float, capability: int, in_table: str | None
) -> None:
    gpu(name, num_sms, memory_gib, capability)
    found = devices.of(GPU)
    assert (found.num_sms, found.capability) == (num_sms, capability)
    assert found.memory_bytes == int(memory_gib * KIB**3)
    assert (found.l2_bytes, found.shared_bytes) == (48 * KIB**2, 200 * KIB)
    assert found.is_estimate == (in_table is None)
    table = devices.DEVICES.get(in_table or "", found)
    assert found.peak_tflops == table.peak_tflops
    assert found.name == (name if in_table is None else table.name)


@pytest.mark.parametrize(
    ("hip", "capability", "has_triton", "why"),
    [
        (None, 80, True, ""),
        (None, 75, True, "compute capability 7.5"),
        (None, 90, False, "Triton is not installed"),
        ("6.4", 94, True, "ROCm"),
    ],
)
def test_kernels_need_triton_and_an_nvidia_gpu_of_ampere_or_later(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, hip: str, capability: int, *, has_triton: bool, why: str
) -> None:
    gpu("a GPU", 132, 80.0, capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(gemm_kernels, "triton", object() if has_triton else None)
    found = devices.why_no_kernels(GPU)
    assert why in found
    assert bool(why) is bool(found)


def test_the_precision_of_float32_is_read_from_any_switch() -> None:
    assert in_forks(SWITCHES, devices.float32_precision) == SWITCHES


@pytest.mark.slow
def test_a_compiled_function_is_compiled_again_after_the_precision_changes() -> None:
    def add(x: Tensor) -> Tensor:
        return x + (devices.float32_precision() == "tf32")

    def check() -> list[float]:
        compiled = torch.compile(add, backend="eager", fullgraph=True)
        before = compiled(torch.zeros(1)).item()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return [before, compiled(torch.zeros(1)).item()]

    assert in_forks([""], check) == {"": "[0.0, 1.0]"}
