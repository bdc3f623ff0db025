"""The table of many devices, and the verdict on one of them."""

from __future__ import annotations

from lightning_eff.planner.forecast import CONTEXT_BYTES, DeviceMemory, MemoryForecast
from lightning_eff.planner.printing import sharding_text, verdict
from lightning_eff.planner.sharding import UNCOUNTED, ShardingTable
from lightning_eff.prediction.predict import Prediction
from lightning_eff.report.sharding import DeviceShare

SHARES = {1: DeviceShare(weights=4096), 4: DeviceShare(weights=1024, host=1023.6)}


def test_a_verdict_counts_activations_if_known_and_for_a_cpu_the_memory_of_the_host() -> None:
    def shown(table: ShardingTable, devices: int, free_bytes: int) -> str:
        """Return the verdict for a GPU with some free memory, for a CPU with none."""
        memory = DeviceMemory("X", 4096 + free_bytes, is_cuda=bool(free_bytes))
        return verdict(MemoryForecast(Prediction(), memory, table), devices)

    table = ShardingTable("", shares=SHARES, passing_bytes=2048)
    needed = "each of 4 devices needs about"
    on_gpu = shown(table, 4, CONTEXT_BYTES)
    assert on_gpu == f"{needed} 3.0 KiB and 1.0 KiB of host memory: fits on X, 1.0 KiB left"
    assert shown(table, 4, 0) == f"{needed} 4.0 KiB: fits on X, 0 B left"
    on_gpu = shown(table, 1, CONTEXT_BYTES)
    assert on_gpu == "the device needs about 6.0 KiB: does not fit on X, 2.0 KiB short"
    unknown = ShardingTable("", shares=SHARES, assumed=(UNCOUNTED,))
    assert shown(unknown, 4, 0).startswith("each of 4 devices needs (without activations) 2.0 KiB")
    assert "assumed: activations are not counted" in sharding_text(unknown)
    assert unknown.rows()[1]["host_bytes"] == 1024
    assert " on any number of devices: activations 2.0 KiB\n" in f"{sharding_text(table)}\n"
