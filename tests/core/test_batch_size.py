"""Batches and micro-batches of an optimizer step, as a config sets them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.core.batch_size import micro_batches_per_step

BATCH = {"data": {"batch_size": 16}}
WINDOW = {"gradient_accumulation": {"global_batch_size": 256}}
BOTH = {"gradient_accumulation": {"global_batch_size": 45}, "micro_batch": {"micro_batch_size": 4}}


@pytest.mark.parametrize(
    ("values", "devices", "expected"),
    [
        ({"trainer": {"accumulate_grad_batches": 3}}, 8, 3),
        (BATCH | {"callbacks": {"micro_batch": {"micro_batch_size": "auto"}}}, 1, 1),
        (BATCH | {"callbacks": WINDOW}, 3, 6),
        ({"data": {"batch_size": 10}, "callbacks": BOTH}, 2, 9),
        ({"callbacks": {"gradient_accumulation": {"num_batches": 5}}}, 2, 5),
    ],
)
def test_micro_batches_are_read_off_the_config(values: dict[str, Any], devices: int, expected: int) -> None:
    assert micro_batches_per_step(values, devices) == expected
