"""One name, three roots; the YAML is the signature; the docstring has its headings."""

from __future__ import annotations

import inspect
import re
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


def test_every_technique_and_nothing_that_cannot_be_had_is_a_lazy_name() -> None:
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
    assert STUB.read_text(encoding="utf-8") == stub(), "write it anew: make stubs"
