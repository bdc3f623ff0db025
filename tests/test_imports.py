"""Imports run one way, and importing the package loads nothing heavy and does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_run_one_way() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_importing_the_package_and_its_dir_load_neither_torch_nor_lightning_nor_hydra() -> None:
    program = (
        "import sys, lightning_eff; dir(lightning_eff); "
        "assert not {'torch', 'lightning', 'hydra', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_importing_every_module_writes_nothing(tmp_path: Path) -> None:
    names = [
        str(file.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for file in sorted((ROOT / "lightning_eff").rglob("*.py"))
        if file.name not in ("__init__.py", "__main__.py")
    ]
    program = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:lightning_eff", "-c", program],
        check=True,
        cwd=tmp_path,
    )
    assert list(tmp_path.iterdir()) == []
