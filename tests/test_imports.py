"""Imports run one way."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent


def test_imports_run_one_way() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@functools.cache
def imports() -> list[tuple[str, str]]:
    """Return which module of the package imports which, without the package's own name."""
    graph = grimp.build_graph("lightning_eff", cache_dir=None)
    pairs = ((a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a))
    return [(a.removeprefix("lightning_eff."), b.removeprefix("lightning_eff.")) for a, b in pairs]


def test_a_private_folder_is_its_own_techniques() -> None:
    users: dict[str, set[str]] = {}
    for importer, imported in imports():
        folder = re.match(r"\w+\._\w+", imported)
        if folder is not None and not importer.startswith(folder[0]):
            users.setdefault(folder[0], set()).add(importer)
    assert "strategy._zero_config" in users
    for folder, found in users.items():
        slot, _, private = folder.partition(".")
        if slot != "commands":  # there, what verbs share: cli.py has the parser of all
            assert all(user.startswith(f"{slot}.") for user in found), folder
            public = {user for user in found if "._" not in user}
            assert len(public) <= 1 or private == "_shared", (folder, public)


def test_models_and_data_import_nothing_of_the_suite_and_it_imports_none_of_them() -> None:
    trained = ("models", "data")
    crossing = [
        pair
        for pair in imports()
        if (pair[0].split(".")[0] in trained) is not (pair[1].split(".")[0] in trained)
    ]
    assert crossing == []


def test_no_test_imports_another_one_nor_conftest() -> None:
    """What tests share lies in tests/support/; a program in a test may import the module that it lies in."""
    for file in sorted((ROOT / "tests").rglob("*.py")):
        own = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        named = re.findall(r"\bfrom tests import\b|\btests(?:\.\w+)+", file.read_text())
        assert {name for name in named if not name.startswith(("tests.support", own))} == set(), file
