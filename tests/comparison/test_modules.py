"""`lightning_eff.compare` on your own module: each trial runs in its own process."""

from __future__ import annotations

from typing import Any

import pytest

import lightning_eff
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.comparison.result_table import FAILED, MEASURED
from tests.support.models import Net, make_loader

CPU = {"accelerator": "cpu", "devices": 1}


def build() -> tuple[Any, Any]:
    return Net(dropout=0.0), make_loader()


@pytest.mark.slow
def test_trials_are_trained_alike_and_compared() -> None:
    trials = {
        "baseline": CPU,
        "parts": CPU | {"callbacks": [MicroBatch(micro_batch_size=2)]},
        "double": CPU | {"precision": "64-true"},
        "wrong": CPU | {"precision": "7"},
    }
    rows = lightning_eff.compare(build, trials, max_steps=8, rounds=1)
    found = {row.technique: row for row in rows}
    assert [found[name].status for name in trials] == [MEASURED, MEASURED, MEASURED, FAILED]
    assert found["parts"].loss_difference == pytest.approx(0.0, abs=1e-5)
    assert found["parts"].peak_bytes is not None
    assert found["double"].peak_ratio is not None
    assert found["double"].peak_ratio > 1.5
    assert "precision" in found["wrong"].reason.lower()
