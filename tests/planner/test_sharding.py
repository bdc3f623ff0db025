"""The table of many devices: what it shows, and what it reads from a config."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.planner.device_memory import CONTEXT_BYTES, DeviceMemory
from lightning_eff.planner.sharding import ShardingTable, micro_batches_per_step
from lightning_eff.report.sharding import DeviceShare

SHARES = {1: DeviceShare(weights=4096), 4: DeviceShare(weights=1024, host=1023.6)}


def test_a_verdict_includes_activations_if_they_are_known_and_a_cpu_has_the_host_s_memory() -> None:
    cpu, gpu = (DeviceMemory("X", 4096 + free, is_cuda=bool(free)) for free in (0, CONTEXT_BYTES))
    table = ShardingTable("", SHARES, passing_bytes=2048)
    needed = "each of 4 devices needs about"
    assert table.verdict(4, gpu) == f"{needed} 3.0 KiB and 1.0 KiB of host memory: fits on X, 1.0 KiB left"
    assert table.verdict(4, cpu) == f"{needed} 4.0 KiB: fits on X, 0 B left"
    assert table.verdict(1, gpu) == "the device needs about 6.0 KiB: does not fit on X, 2.0 KiB short"
    unknown = ShardingTable("", SHARES)
    assert unknown.verdict(4, cpu).startswith("each of 4 devices needs (without activations) 2.0 KiB")
    assert "assumed: activations are not counted" in str(unknown)
    assert unknown.rows()[1]["host_bytes"] == 1024
    assert " on any number of devices: activations 2.0 KiB\n" in str(table)


BATCH = {"data": {"batch_size": 16}}
WINDOW = {"gradient_accumulation": {"global_batch_size": 256}}
BOTH = {"gradient_accumulation": {"global_batch_size": 45}, "micro_batch": {"micro_batch_size": 4}}


@pytest.mark.parametrize(
    ("values", "devices", "expected"),
    [
        ({}, 8, 1),
        ({"trainer": {"accumulate_grad_batches": 3}}, 8, 3),
        (BATCH | {"callbacks": WINDOW}, 4, 4),
        (BATCH | {"callbacks": {"micro_batch": {"micro_batch_size": "auto"}}}, 1, 1),
        (BATCH | {"callbacks": WINDOW}, 3, 6),
        ({"data": {"batch_size": 10}, "callbacks": BOTH}, 2, 9),
        ({"callbacks": {"gradient_accumulation": {"num_batches": 5}}}, 2, 5),
    ],
)
def test_micro_batches_are_read_off_the_config(values: dict[str, Any], devices: int, expected: int) -> None:
    assert micro_batches_per_step(values, devices) == expected
