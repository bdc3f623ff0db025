"""The wheel, built from the sdist, carries conf/ and recipes/, and runs a recipe without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.command_line import TINY

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_configs_types_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"lightning_eff/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")} <= names
    configs = {f"lightning_eff/{file.relative_to(ROOT)}" for file in (ROOT / "conf").rglob("*.yaml")}
    data = [file for ending in ("yaml", "j2") for file in (ROOT / "lightning_eff").rglob(f"*.{ending}")]
    assert {file.suffix for file in data} == {".yaml", ".j2"}
    assert configs | {f"{file.relative_to(ROOT)}" for file in data} <= names
    assert "lightning_eff/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "conf/", "recipes/", "benchmarks/")) for name in names)


def test_installed_wheel_trains_a_recipe_from_any_folder(
    wheel: Path, text_cache: Path, tmp_path: Path
) -> None:
    # A path file adds this environment's dependencies; the package itself comes only from the wheel.
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python3*/site-packages")
    outer = next(path for path in sys.path if path.endswith("site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)],
        check=True,
    )
    (site / "zz_outer.pth").write_text(f"{outer}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = environment / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    located = subprocess.run(
        [python, "-c", "import lightning_eff; print(lightning_eff.__file__)"],
        cwd=elsewhere, check=True, capture_output=True, text=True, env=environ,
    )  # fmt: skip
    assert located.stdout.startswith(str(site))
    overrides = [*TINY, f"data.source_dir={text_cache}", "data.vocab_size=300"]
    done = subprocess.run(
        [python, "-m", "lightning_eff", "train", "lm", *overrides],
        cwd=elsewhere, capture_output=True, text=True, env=environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(elsewhere.glob("outputs/lm/*/report.html"))
