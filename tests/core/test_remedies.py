"""A remedy is an override in a recipe and Python in a plain Trainer, and what it is for is then gone."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable

import pytest

from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.config import composition
from lightning_eff.core import rules
from lightning_eff.core.errors import ConfigError, ConflictError, ConflictWarning
from lightning_eff.core.library_rules import LIBRARY_RULES
from lightning_eff.core.remedies import format_remedies, keep_overrides, override_as_python
from lightning_eff.core.rules import RuleFinding
from lightning_eff.core.technique import Verdict
from lightning_eff.run import build_trainer
from tests.support.models import Net, make_loader, make_trainer

OVERRIDE = re.compile(
    r"(?<![\w(])[~+]?(callbacks|monitors|optimizer|precision|scheduler|strategy|trainer)[.=]"
)
COMPILED = "callbacks=[gradient_checkpointing,torch_compile]"
POLICY = "callbacks.gradient_checkpointing.policy"
SIZE = "callbacks.gradient_accumulation.global_batch_size"
REFUSED = [
    "optimizer=in_backward",
    "optimizer=in_backward trainer.accumulate_grad_batches=2",
    f"optimizer=in_backward +callbacks=gradient_accumulation {SIZE}=32",
    "optimizer=in_backward +callbacks=micro_batch",
    "optimizer=in_backward precision=fp16_mixed",
    f"callbacks=[gradient_checkpointing] {POLICY}=budget",
    f"{COMPILED} {POLICY}=selective",
    f"{COMPILED} callbacks.torch_compile.target=forward",
    f"{COMPILED} callbacks.torch_compile.mode=reduce-overhead",
    "callbacks=[triton_gemm,torch_compile]",
    "callbacks=[micro_batch,torch_compile]",
    "callbacks=[micro_batch] strategy=fsdp2",
    "strategy=fsdp2",
    "optimizer=schedule_free",
    "optimizer=cpu_offload strategy=fsdp2",
    "+callbacks=peft_adapter precision=frozen_int8 strategy=fsdp2",
    "callbacks=[peft_adapter,triton_gemm] precision=frozen_int8",
]
"""Overrides of `baseline` that meet a rule."""


@functools.cache
def findings(overrides: str) -> list[RuleFinding]:
    """Judge a recipe as `plan` does."""
    words = ["trainer.accelerator=cpu", "trainer.devices=1", *overrides.split()]
    trainer = build_trainer(composition.compose_recipe("baseline", words).values)
    return rules.check_rules(rules.trainer_components(trainer), rules.run_facts(trainer))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if index % 4 == 0 else [pytest.mark.slow])
        for index, case in enumerate(REFUSED)
    ],
)
def test_each_remedy_removes_what_it_is_for(case: str) -> None:
    found = findings(case)
    assert found, "the case meets no rule any more"
    tried, before = 0, {(each.technique, each.rule.name) for each in found}
    for finding in found:
        for remedy in finding.rule.remedies[:3]:
            if not OVERRIDE.match(remedy):
                continue  # a command for the machine
            left = findings(f"{case} {remedy}")
            names = {(each.technique, each.rule.name) for each in left}
            assert (finding.technique, finding.rule.name) not in names, remedy
            refusing = [each for each in left if each.rule.verdict is Verdict.REFUSED]
            rejected = {(each.technique, each.rule.name) for each in refusing}
            assert rejected <= before, f"{remedy} is rejected in turn"
            tried += 1
    assert tried


@pytest.mark.parametrize("cases", [[], pytest.param(REFUSED, marks=pytest.mark.slow)])
def test_no_override_is_left_in_a_plain_trainer(cases: list[str]) -> None:
    """Of rules about classes of others, and of those that the cases meet."""
    found = [finding.rule for case in cases for finding in findings(case)]
    found += [rule for facts in LIBRARY_RULES.values() for rule in (*facts.needs, *facts.excludes)]
    for remedy in {remedy for rule in found for remedy in rule.remedies}:
        python = override_as_python(remedy)
        assert not OVERRIDE.search(python), python
        if OVERRIDE.match(remedy) and not python.startswith(("remove ", "no ", "leave out ")):
            ast.parse(python.replace("in place of that method", ""))


@pytest.mark.parametrize(
    ("remedy", "python"),
    [
        (
            "optimizer.max_parameter_norm=1.0 in place of that method",
            "partial(InBackward, max_parameter_norm=1.0) in place of that method",
        ),
        (
            "callbacks.peft_adapter.method=lora callbacks.peft_adapter.options={use_dora: true}",
            "PeftAdapter(method=\"lora\", options={'use_dora': True})",
        ),
        ("~callbacks.gradient_accumulation", "remove GradientAccumulation"),
        ("strategy.checkpoints=full", 'FSDP2(checkpoints="full")'),
        ("optimizer=adamw", "OptimizerChoice(optimizer=partial(torch.optim.AdamW, lr=...))"),
        ("precision=tf32", 'AutoPrecision(precision="32-true", tf32=True)'),
        ("callbacks.peft_adapter.base_checkpoint={a:x", 'PeftAdapter(base_checkpoint="{a:x")'),
        ('callbacks.peft_adapter.r="\\x1b[31m"', 'PeftAdapter(r="\\u001b[31m")'),  # from a checkpoint, say
        ("pip install 'lightning-eff[qlora]'", "pip install 'lightning-eff[qlora]'"),
    ],
)
def test_an_override_in_python(remedy: str, python: str) -> None:
    assert override_as_python(remedy) == python
    assert override_as_python(python) == python
    assert format_remedies(f"no\n  try: {remedy}") == f"no\n  try: {python}"
    with keep_overrides():
        assert format_remedies(f"no\n  try: {remedy}") == f"no\n  try: {remedy}"


def test_a_plain_trainer_is_told_python(net: Callable[..., Net]) -> None:
    with pytest.raises(ConfigError, match=r'(?m)^  try: MicroBatch\(micro_batch_size="auto"\)$'):
        MicroBatch(micro_batch_size=4, find=True)
    model = net()
    model.automatic_optimization = False
    with pytest.raises(ConflictError, match=r"(?m)^  try: remove MicroBatch$"):
        make_trainer(callbacks=[MicroBatch()]).fit(model, make_loader())
    assert "try: Trainer(devices=2)" in str(ConflictWarning("no\n  try: trainer.devices=2"))
