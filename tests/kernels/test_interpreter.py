"""The kernels in Triton's interpreter, against float64: generated cases in a process of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_eff.kernels.table import TILES
from tests.support.processes import in_interpreter

PARTS = ("swiglu", "silu", "relu", "gelu_tanh", "gradient", "sums", "saves")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")


def interpreted(path: Path, *, cases: int, seed: int = 0) -> dict[str, Any]:
    words = ["--cases", str(cases), "--seed", str(seed), "--json", str(path)]
    done = in_interpreter("-m", "tests.support.interpreted", *words)
    assert path.exists(), done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return interpreted(tmp_path_factory.mktemp("interpreter") / "results.json", cases=1000)


def test_a_thousand_cases_are_within_t4(results: dict[str, Any]) -> None:
    """Error at most (K + 2) u |A||B| + eps |D|, none where operands are small integers, no byte beyond."""
    assert results["cases"] == 1000
    assert results["failures"] == []


def test_all_rows_formats_and_kinds_were_among_them(results: dict[str, Any]) -> None:
    for name in [
        *map(str, TILES),
        "gemm",
        "integers",
        "special",
        "torch.bfloat16",
        "torch.float8_e4m3fn",
        *PARTS,
    ]:
        assert results["seen"][name] >= 30, name


def test_the_bound_is_no_wider_than_needed(results: dict[str, Any]) -> None:
    """A fault would not hide below it: correct kernels come close to it where a result is rounded."""
    assert 0.1 < results["worst"]["float32"] < 0.6
    assert 0.4 < results["worst"]["float16"] < 0.8
    assert 0.8 < results["worst"]["bfloat16"] <= 1.0


@pytest.mark.slow
def test_four_thousand_more(tmp_path: Path) -> None:
    results = interpreted(tmp_path / "results.json", cases=4000, seed=1)
    assert results["failures"] == []
