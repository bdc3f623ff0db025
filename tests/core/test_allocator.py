"""The allocator of each kind of device: which of its numbers is read, and what it is told."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.core import allocator

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Replace PyTorch's functions by ones that answer with fixed numbers; record each call."""
    made: list[tuple[str, Any]] = []

    def answer(module: Any, name: str, value: Any) -> None:
        monkeypatch.setattr(module, name, lambda device=None: made.append((name, device)) or value)

    answer(torch.accelerator, "memory_reserved", 900)
    answer(torch.accelerator, "empty_cache", None)
    answer(torch.accelerator, "get_memory_info", (111, 2000))
    answer(torch.accelerator, "reset_peak_memory_stats", None)
    answer(torch.accelerator, "max_memory_allocated", 700)
    answer(torch.mps, "driver_allocated_memory", 90)
    answer(torch.mps, "recommended_max_memory", 300)
    answer(torch.mps, "empty_cache", None)
    return made


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_cuda_and_xpu_answer_through_the_accelerator(kind: str, calls: list[tuple[str, Any]]) -> None:
    device = torch.device(kind, 1)
    assert allocator.has_cache(device)
    assert allocator.held_bytes(device) == 900
    assert allocator.total_bytes(device) == 2000
    assert allocator.peak_bytes(device) == 700
    allocator.reset_peak(device)
    allocator.empty_cache(device)
    names = ["memory_reserved", "get_memory_info", "max_memory_allocated", "reset_peak_memory_stats"]
    assert calls == [*((name, device) for name in names), ("empty_cache", None)]


def test_mps_answers_through_its_own_module(calls: list[tuple[str, Any]]) -> None:
    device = torch.device("mps")
    assert allocator.has_cache(device)
    assert allocator.held_bytes(device) == 90
    assert allocator.total_bytes(device) == 300
    calls.clear()
    allocator.empty_cache(device)
    allocator.reset_peak(device)
    assert allocator.peak_bytes(device) is None
    assert calls == [("empty_cache", None)], "it keeps no peak, so none is reset"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_cpus_resident_pages_are_held() -> None:
    allocator.empty_cache(CPU)  # otherwise the block may lie on pages that an earlier test left resident
    before = allocator.held_bytes(CPU)
    block = torch.empty(64 * MIB, dtype=torch.uint8)
    # Other pages may come and go; counting virtual or shared ones is off by more than 16 MiB.
    assert abs(allocator.held_bytes(CPU) - before) < 16 * MIB, "no page of it has been touched"
    block.fill_(1)
    assert 48 * MIB < allocator.held_bytes(CPU) - before < 80 * MIB


def test_without_proc_nothing_is_known_to_be_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(allocator, "Path", lambda _: tmp_path / "none")
    assert allocator.held_bytes(CPU) == 0


def test_the_cpu_has_the_machines_memory_and_keeps_no_peak(calls: list[tuple[str, Any]]) -> None:
    assert allocator.total_bytes(CPU) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 0
    allocator.reset_peak(CPU)
    assert allocator.peak_bytes(CPU) is None
    assert calls == []


def test_another_c_library_has_nothing_to_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[], object] = allocator._glibc.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda _: object())
        assert find() is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        assert find() is None
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    assert not allocator.has_cache(CPU)
    allocator.empty_cache(CPU)
    assert not allocator.has_cache(torch.device("meta"))
