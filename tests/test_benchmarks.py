"""Published figures are what their command gives, where the versions are those that it ran with."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"
PUBLISHED = json.loads((FOLDER / "live_bytes.json").read_text())


@pytest.mark.parametrize("policy", ["plain", "full"])
def test_live_bytes_are_those_of_the_table(policy: str) -> None:
    if torch.__version__ != PUBLISHED["versions"]["torch"]:
        pytest.skip("another torch may keep other tensors")
    script = runpy.run_path(str(FOLDER / "live_bytes.py"))
    peaks = script["measure"](script["POLICIES"][policy], 1, fake=True, fused=True)
    (row,) = [row for row in PUBLISHED["rows"] if (row["batch_size"], row["policy"]) == (1, policy)]
    assert peaks == row["phases"]
    shown = f"| 1 | {policy} | {peaks['forward'] / 1e6:.1f} | {peaks['backward'] / 1e6:.1f} |"
    assert shown in (FOLDER / "live_bytes.md").read_text()
