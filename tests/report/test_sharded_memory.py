"""The arithmetic beside what rank 0 of four really holds and sends; the other three are not there."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.report.sharded_memory import FullySharded
from lightning_eff.report.weights import Model, OptimizerState
from lightning_eff.strategy._zero.memory_arithmetic import Zero
from tests.support.one_of_four import DEVICES, Net

ROOT = Path(__file__).parents[2]
ADAM = OptimizerState({"hidden": 8.0, "matrix": 8.0, "vector": 8.0})


FSDP2: list[dict[str, Any]] = [
    {"by": "fsdp2", "reshard": reshard, "bf16": bf16, "micro_batches": micro_batches}
    for reshard, bf16, micro_batches in ((True, False, 1), (True, True, 2), (False, False, 2))
]
ZERO: list[dict[str, Any]] = [
    {"by": "zero", "stage": 1, "bf16": False, "micro_batches": 2},
    {"by": "zero", "stage": 2, "bf16": True, "micro_batches": 2},
    {"by": "zero", "stage": 3, "bf16": True, "micro_batches": 2},
    {"by": "zero", "stage": 3, "bf16": False, "micro_batches": 1, "reuse": 60_000},
    {"by": "zero", "stage": 3, "bf16": False, "micro_batches": 1, "reuse": 0},
]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """Return what was seen of each case, FSDP2's first, from one process for all."""
    cases = [*FSDP2, *(ZERO if find_spec("deepspeed") else [])]
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.one_of_four"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def model() -> Model:
    net = Net()
    return Model.of(net, net.blocks)


NUM_TENSORS = 16
STEPS = 4 * NUM_TENSORS
"""Bytes of AdamW's counts of steps, one a tensor, which the arithmetic leaves out."""


def test_fsdp2_holds_and_sends_what_is_counted(seen: list[dict[str, Any]]) -> None:
    for case, found in zip(FSDP2, seen[: len(FSDP2)], strict=True):
        scheme = FullySharded(compute_itemsize=2 if case["bf16"] else None, reshard=case["reshard"])
        share = scheme.share(model(), ADAM, DEVICES, case["micro_batches"])
        assert found == {
            "weights": share.weights,
            "state": share.optimizer + STEPS,
            "sent": share.sent,
        }, case


def test_zero_holds_and_sends_what_is_counted(seen: list[dict[str, Any]]) -> None:
    """Stages 1 and 2 pad all weights together, to eight elements: less than 64 bytes are not counted."""
    pytest.importorskip("deepspeed")
    for case, found in zip(ZERO, seen[len(FSDP2) :], strict=True):
        values: dict[str, Any] = found["scheme"]
        scheme = Zero(**values | {"not_counted": tuple(values["not_counted"])})
        share = scheme.share(model(), ADAM, DEVICES, case["micro_batches"])
        whole = sum(w.numel for w in model().weights if w.numel <= scheme.persistent) * scheme.itemsize
        weights = share.weights - (whole if scheme.stage == 3 else 0)
        slack = 0 if scheme.stage == 3 else 64
        assert found["weights"] == pytest.approx(weights, abs=slack), case
        assert found["state"] + found["own"] == pytest.approx(share.optimizer, abs=slack + STEPS), case
        assert found["sent"] == pytest.approx(share.sent, abs=slack * case["micro_batches"]), case
