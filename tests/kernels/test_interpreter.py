"""The kernels in Triton's interpreter, against float64: generated cases in a process of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_eff.kernels.tile_configs import CONFIGS
from tests.support.processes import in_interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")


@pytest.mark.parametrize(
    ("cases", "seed"), [(150, 0), pytest.param(5000, 1, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_generated_cases_are_within_t4(cases: int, seed: int, tmp_path: Path) -> None:
    """Error at most (K + 2) u |A||B| + eps |D|, none where operands are small integers, no byte beyond.

    A fault would not hide below the bound: correct kernels come close to it where a result is rounded.
    """
    path = tmp_path / "results.json"
    words = ["--cases", str(cases), "--seed", str(seed), "--json", str(path)]
    done = in_interpreter("-m", "tests.support.interpreted", *words)
    assert path.exists(), done.stderr[-3000:]
    results = json.loads(path.read_text())
    assert results["failures"] == []
    for row in ["gemm", *map(str, CONFIGS)]:
        assert results["seen"][row] >= cases // 20, row
    for kind in ("integers", "special", "torch.bfloat16", "silu", "relu", "gelu_tanh", "pre"):
        assert results["seen"][kind] >= cases // 20, kind
    bounds = {"float32": (0.1, 0.6), "float16": (0.4, 0.8), "bfloat16": (0.8, 1.0)}
    for dtype, (at_least, at_most) in bounds.items():
        assert at_least < results["worst"][dtype] <= at_most, dtype


def test_what_else_the_kernels_compute_there() -> None:
    """Gradients, the operator's counters and compiler, layers that train, candidates of `bench`."""
    words = [
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--tb=short",
        "tests/kernels/in_interpreter.py",
    ]
    done = in_interpreter("-m", "pytest", *words)
    assert done.returncode == 0, done.stdout[-5000:]
