"""The table of many devices: what it shows, and what it reads from a config."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.planner.sharding import ShardingTable, micro_batches_per_step
from lightning_eff.report.sharding import DeviceShare

SHARES = {1: DeviceShare(weights=4096), 4: DeviceShare(weights=1024, host=1.6)}


def test_a_verdict_includes_activations_if_they_are_known() -> None:
    table = ShardingTable("", SHARES, passing_bytes=2048)
    assert table.verdict(4, 4096, "X") == "each of 4 devices needs about 3.0 KiB: fits on X, 1.0 KiB left"
    assert table.verdict(1, 4096, "X").endswith(": does not fit on X, 2.0 KiB short")
    unknown = ShardingTable("", SHARES)
    assert unknown.verdict(4, 4096, "X").startswith("each of 4 devices needs (without activations) 1.0 KiB")
    assert "assumed: activations are not counted" in str(unknown)
    assert unknown.rows()[1]["host_bytes"] == 2
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
