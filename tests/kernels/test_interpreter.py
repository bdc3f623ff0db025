"""The kernels in Triton's interpreter: the tests of *in_interpreter.py, each in a process of its own."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.support.processes import in_interpreter

INSTALLED = {name: Version(version(name)) for name in ("numpy", "triton")} if sys.platform == "linux" else {}
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="Triton runs on Linux"),
    pytest.mark.skipif(
        bool(INSTALLED) and INSTALLED["triton"] < Version("3.7") and INSTALLED["numpy"] >= Version("2.4"),
        reason="the interpreter of Triton 3.6 does not know NumPy 2.4",
    ),
]


@pytest.mark.parametrize(
    ("file", "which"),
    [
        ("in_interpreter", "not slow"),
        pytest.param("in_interpreter", "slow", marks=pytest.mark.slow),
        ("rows_in_interpreter", "not slow"),
        pytest.param("rows_in_interpreter", "slow", marks=pytest.mark.slow),
    ],
)
def test_what_the_kernels_compute_there(file: str, which: str) -> None:
    """Generated cases, gradients, counters and compiler, layers that train; rows of the tiled loss."""
    words = ["-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=short", "-m", which]
    done = in_interpreter("-m", "pytest", *words, f"tests/kernels/{file}.py")
    assert done.returncode == 0, done.stdout[-5000:]
