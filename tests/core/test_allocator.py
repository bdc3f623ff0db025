"""The bytes of memory that this process holds on the CPU."""

from __future__ import annotations

from pathlib import Path

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
