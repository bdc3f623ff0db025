"""Each remedy removes the conflict that it is stated for, as an override and in Python."""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import pytest
import yaml

from lightning_eff.config import composition
from lightning_eff.core import rules
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS, PACKAGE
from lightning_eff.core.errors import Remedy
from lightning_eff.core.rules import RuleFinding
from lightning_eff.core.technique import Verdict
from lightning_eff.run import build_trainer

SETTING = re.compile(
    r"[~+]?((?:callbacks|monitors|optimizer|precision|scheduler|strategy|trainer|checkpoint_io|model)[\w.]*)"
)
COMPILED = "callbacks=[gradient_checkpointing,torch_compile]"
POLICY = "callbacks.gradient_checkpointing.policy"
REJECTED = [
    "optimizer=in_backward",
    "optimizer=in_backward trainer.accumulate_grad_batches=2",
    "optimizer=in_backward +callbacks=micro_batch",
    "optimizer=in_backward precision=fp16_mixed",
    f"callbacks=[gradient_checkpointing] {POLICY}=budget",
    f"{COMPILED} {POLICY}=selective",
    f"{COMPILED} callbacks.torch_compile.target=forward",
    "callbacks=[triton_gemm,torch_compile]",
    "callbacks=[micro_batch,torch_compile]",
    "callbacks=[micro_batch] strategy=fsdp2",
    "optimizer=schedule_free",
    "optimizer=cpu_offload strategy=fsdp2",
    "+callbacks=peft_adapter precision=frozen_int8 strategy=fsdp2",
    "callbacks=[peft_adapter,triton_gemm] precision=frozen_int8",
]
"""Overrides of `baseline` that meet a rule."""


def class_of(group: str, name: str) -> str:
    """Return the class of an option."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())["_target_"].rpartition(".")[2]


@functools.cache
def findings(overrides: str) -> list[RuleFinding]:
    """Return the findings for a recipe, as `plan` computes them."""
    words = ["trainer.accelerator=cpu", "trainer.devices=1", *overrides.split()]
    trainer = build_trainer(composition.compose_recipe("baseline", words).values)
    return rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if index == 0 else [pytest.mark.slow])
        for index, case in enumerate(REJECTED)
    ],
)
def test_each_remedy_removes_its_conflict(case: str) -> None:
    found = findings(case)
    assert found, "the case meets no rule any more"
    tried, before = 0, {(each.technique, each.rule.name) for each in found}
    for finding in found:
        for remedy in finding.rule.remedies[:3]:
            if not isinstance(remedy, Remedy):
                continue  # a command for the machine
            left = findings(f"{case} {remedy.override}")
            names = {(each.technique, each.rule.name) for each in left}
            assert (finding.technique, finding.rule.name) not in names, remedy
            refusing = [each for each in left if each.rule.verdict is Verdict.REJECTED]
            rejected = {(each.technique, each.rule.name) for each in refusing}
            assert rejected <= before, f"{remedy} is rejected in turn"
            tried += 1
    assert tried


def stated_remedies() -> list[tuple[str, str]]:
    """Return both forms of each `Remedy(...)` in the package that states them as text."""
    found: list[tuple[str, str]] = []
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "Remedy(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Remedy":
                values: list[Any] = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                found += [(values[0], values[1])] if len(values) == 2 else []
    return found


def test_both_forms_set_the_same_parameter_of_the_same_class() -> None:
    stated = stated_remedies()
    assert len(stated) > 40
    for override, python in stated:
        setting = SETTING.search(override)
        assert setting is not None, override
        group, *path = setting[1].split(".")
        if group == "trainer":
            assert f"{path[0]}=" in python, override
        elif override.lstrip().startswith("~"):
            assert class_of(group, path[0]) in python, override
        elif group in MULTI_CHOICE_GROUPS and path:  # a parameter
            assert f"{class_of(group, path[0])}({path[1]}=" in python, override
        elif path:
            assert f"{path[0]}=" in python, override
