"""The kernels in Triton's interpreter: the tests of *in_interpreter.py, in a separate process."""

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
        reason="the interpreter of Triton 3.6 does not support NumPy 2.4",
    ),
]


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_pass_their_tests_in_the_interpreter(which: str) -> None:
    words = ["-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=short", "-m", which]
    files = [f"tests/kernels/{name}in_interpreter.py" for name in ("", "rows_")]
    done = in_interpreter("-m", "pytest", *words, *files)
    assert done.returncode == 0, done.stdout[-5000:]
