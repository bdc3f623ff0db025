"""One name, three roots; the YAML is the signature; the docstring has its headings."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_eff
from lightning_eff.core import catalog
from tests.support.stubs import STUB, stub
from tests.support.techniques import PACKAGE, ROOT, TECHNIQUES, class_of, yaml_of

TRAINED = [f"{f}/{file.stem}" for f in ("models", "data") for file in sorted((PACKAGE / f).glob("[a-z]*.py"))]


def test_there_are_techniques() -> None:
    assert {"callbacks/empty_cache", "precision/auto", "monitors/efficiency_report"} <= set(TECHNIQUES)


@pytest.mark.parametrize("name", [*TECHNIQUES, *TRAINED, "launch/ray"])
def test_yaml_is_the_signature_which_is_keyword_only_typed_and_small(name: str) -> None:
    folder, _, stem = name.partition("/")
    assert (ROOT / "tests" / folder / f"test_{stem}.py").is_file()
    written: dict[str, Any] = yaml.safe_load(yaml_of(name).read_text())
    parameters = dict(inspect.signature(class_of(name)).parameters)
    if folder in ("scheduler", "optimizer") and name != "optimizer/module":  # a callback
        assert written["_partial_"] is True
        parameters.pop(next(iter(parameters)))
    assert [key for key in written if not key.startswith("_")] == list(parameters)
    assert [key for key, _, meaning in catalog.yaml_parameters(yaml_of(name)) if not meaning] == []
    assert len(parameters) <= 8
    for key, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation is not inspect.Parameter.empty
        value = written[key]
        if value == "???":
            assert parameter.default is inspect.Parameter.empty, key
        elif not (isinstance(value, str) and value.startswith("${")):
            default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            assert value == default, key


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_is_called_like_its_module_whose_docstring_has_its_headings(name: str) -> None:
    folder, _, stem = name.partition("/")
    assert class_of(name).__name__.lower() in (stem.replace("_", ""), f"{stem}{folder}")
    text = catalog.module_docstring(PACKAGE / f"{name}.py")
    headings = ["Saves", "Costs", "When not", "Conflicts", "Source"]
    assert re.findall(rf"^({'|'.join(headings)}):", text, re.MULTILINE) == headings


WITH_REQUIRED_ARGUMENT = {
    "callbacks/gradient_accumulation",
    "callbacks/optimizer_choice",
    "scheduler/warmup_decay",
}
MADE_ALONE = [n for n in TECHNIQUES if n not in WITH_REQUIRED_ARGUMENT and not n.startswith("optimizer/")]


@pytest.mark.parametrize("name", MADE_ALONE)
def test_constructor_keeps_its_arguments_under_their_names(name: str) -> None:
    written = {k: v for k, v in yaml.safe_load(yaml_of(name).read_text()).items() if not k.startswith("_")}
    technique = class_of(name)(**written)
    kept = {key: getattr(technique, f"given_{key}", getattr(technique, key)) for key in written}
    assert kept == written


def test_every_option_is_of_the_suite_a_preset_or_of_a_library() -> None:
    for file in sorted((ROOT / "conf").glob("*/*.yaml")):
        written = yaml.safe_load(file.read_text())
        target = str(written.get("_target_", ""))
        preset = "defaults" in written
        switch = file.read_text().startswith("# @package _global_")
        assert target or preset or switch or file.parent.name == "trainer", file
        if target.startswith("lightning_eff"):
            assert target.rpartition(".")[0].rpartition(".")[2] == file.stem


def test_the_lazy_names_are_exactly_the_techniques_and_public_functions() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EmptyCash'"):
        _ = lightning_eff.EmptyCash
    functions = list(lightning_eff.PUBLIC)
    expected = ["__version__", *functions, *(class_of(name).__name__ for name in TECHNIQUES)]
    assert sorted(dir(lightning_eff)) == sorted(expected)
    names: dict[str, Any] = {}
    exec("from lightning_eff import *", names)
    assert all(names[class_of(name).__name__] is class_of(name) for name in TECHNIQUES)
    assert names.keys() - {"__builtins__"} == set(expected) - {"__version__"}


def test_the_stub_has_the_names_that_can_be_imported() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "write it again: make stubs"


LOUD = '''"""Say hello.

Saves: nothing.
Costs: nothing.
When not: always.
Conflicts: none.
Source: none.
"""

from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Outcome, Try
from lightning_eff.report.advice import Observed, Suggestion


class Loud(Managed):
    """Say hello."""

    lowers = ("activations",)
    try_as = (Try(overrides=("callbacks.loud.times=2",)),)

    def __init__(self, *, times: int = 1) -> None:
        self.times = times

    @staticmethod
    def suggest(run: Observed) -> Suggestion:
        return Suggestion(technique=Loud(times=3), why="it is quiet")

    def outcome(self) -> Outcome:
        return Outcome(did=f"said hello {self.times} times")
'''
ASKED = """
import json, sys
from lightning_eff import Loud
from lightning_eff.cli import main
from lightning_eff.comparison.trial_plan import changes_of, single_technique_trials
from lightning_eff.config.composition import compose_recipe
from lightning_eff.core.catalog import techniques_with
from lightning_eff.planner.advice import candidates

values = compose_recipe("baseline", sys.argv[1:]).values
words = [each.words for each in candidates()]
remedy = techniques_with("suggest")["callbacks/loud"].suggest(None).remedy
found = [single_technique_trials(values)["loud"], changes_of(values, ()), words, remedy]
print(json.dumps(found))
for words in (["ls"], ["train", "baseline", *sys.argv[1:], "--json", "+callbacks=loud"]):
    sys.stdout.flush()
    assert main(words) == 0
"""


def test_a_new_technique_is_its_files_and_nothing_else(tiny: list[str], tmp_path: Path) -> None:
    """`ls`, `compare`, `tune`, advice and report find it in a copy of the package."""
    for name in ("lightning_eff", "conf", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "copy/lightning_eff/callbacks/loud.py").write_text(LOUD)
    text = "# @package callbacks.loud\n_target_: lightning_eff.callbacks.loud.Loud\ntimes: 1  # hellos\n"
    (tmp_path / "copy/conf/callbacks/loud.yaml").write_text(text)
    words = [sys.executable, "-W", "ignore", "-c", ASKED, *tiny]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "copy")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    listed = "\n".join(rest)
    row, changes, candidates, remedy = json.loads(first)
    assert row[0] == "callbacks=[exact_resume,loud]"
    assert "callbacks.loud.times=2" in row
    own = ["+callbacks=loud", "callbacks.loud.times=2"]
    assert own in changes
    assert own in candidates
    assert re.search(r"^ ?callbacks/loud +technique +Say hello\.", listed, re.MULTILINE)
    assert "Loud(times=3)" in remedy, "the report advises it"
    assert "said hello 1 times" in listed, "the report has what it did"


LISTS = {
    "__init__": "functions to import, by the module that has them",
    "commands/_parser": "examples of --help",
    "core/rules": "rules about classes of libraries, which state none themselves",
    "microbatching/lightning_loop": "remedies of what two techniques share",
}
"""Modules outside of techniques that name at least three techniques, with the reason."""


def test_no_module_lists_techniques_without_a_reason() -> None:
    options = {entry.name for entry in catalog.options() if entry.kind == "technique"}
    names = {name.partition("/")[2] for name in options if not name.startswith("monitors/")}
    names -= {"attention", "auto", "float8", "module", "torch"}  # words with other meanings
    found: set[str] = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if path.parts[0] in lightning_eff.TECHNIQUE_FOLDERS:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented
        ]
        if len(names & set(re.findall(r"\w+", "\n".join(texts)))) >= 3:
            found.add(str(path.with_suffix("")))
    assert found == LISTS.keys()
