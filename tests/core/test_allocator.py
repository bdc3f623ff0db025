"""Memory that the CPU holds, and the history of allocations that CUDA alone records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff.core import allocator

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_cpus_resident_pages_are_held() -> None:
    allocator.empty_cache(CPU)  # otherwise the block may lie on pages that an earlier test left resident
    before = allocator.held_bytes(CPU)
    block = torch.empty(64 * MIB, dtype=torch.uint8)
    # Other pages may come and go; counting virtual or shared ones is off by more than 16 MiB.
    assert abs(allocator.held_bytes(CPU) - before) < 16 * MIB, "no page of it has been touched"
    block.fill_(1)
    assert 48 * MIB < allocator.held_bytes(CPU) - before < 80 * MIB


def test_history_and_snapshot_are_cudas_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda *a, **k: calls.append((*a, k)))
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    path = tmp_path / "memory_snapshot.pickle"
    allocator.record_history(CPU, is_on=True)
    assert not allocator.write_snapshot(CPU, path)
    assert calls == []
    device = torch.device("cuda")
    allocator.record_history(device, is_on=True)
    allocator.record_history(device, is_on=False)
    assert allocator.write_snapshot(device, path)
    limit = {"max_entries": allocator.HISTORY}
    assert calls == [("all", limit), (None, limit), str(path)]
