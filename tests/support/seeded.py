"""Put a fault into a copy of the package, and run the tests that must find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

PACKAGE = ROOT / "lightning_eff"


def occurs_once(file: str, there: str) -> bool:
    return (PACKAGE / file).read_text().count(there) == 1


def run_with_fault(
    folder: Path, file: str, there: str, instead: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy of the repository in which one text is replaced by another."""
    for name in ("lightning_eff", "tests", "conf", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "lightning_eff" / file
    path.write_text(path.read_text().replace(there, instead))
    environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
