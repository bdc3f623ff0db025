"""Show the techniques that a recipe switches on, where they are set and which conflict; train nothing."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipeChain, RecipePath
from lightning_eff.core.catalog import MULTI_CHOICE_GROUPS
from lightning_eff.core.errors import EXIT_OK, ConfigError, suggest_name
from lightning_eff.core.text import (
    UNITS,
    WIDTH,
    line_width,
    parse_bytes,
    print_json,
    text_table,
)
from lightning_eff.launch.job import check_local

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_eff.kernels.devices import Device
    from lightning_eff.planner.advice import Compose
    from lightning_eff.planner.forecast import DeviceMemory
    from lightning_eff.planner.printing import Plan

GROUP_OF = {"callbacks/optimizer_choice": "optimizer"}
"""Recipe group that sets a technique, if the group's name differs from the technique's folder."""
VERDICTS = ("on", "fine", "adjusted", "warned", "REJECTED")
"""Verdicts on a technique, in increasing severity."""


@dataclass
class PlanRow:
    """A technique, its non-default arguments, and the findings of the rules, with remedies."""

    technique: str
    asked: dict[str, Any]
    will_be: str
    set_by: str
    why: list[str] = field(default_factory=list[str])
    remedies: list[str] = field(default_factory=list[str])


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    device, memory_bytes, options.overrides = split_device(options.overrides)
    path = RecipePath.of(options.config_dir)
    composed = compose_recipe(options.recipe, options.overrides, path, writes=False)
    from lightning_eff.config.ckpt_path import find_checkpoint, task_folder, with_base
    from lightning_eff.core.rules import raise_rejected
    from lightning_eff.kernels import devices
    from lightning_eff.planner.forecast import DeviceMemory
    from lightning_eff.run import build_trainer

    def compose(words: Sequence[str]) -> dict[str, Any]:
        words = [*options.overrides, *words]
        return compose_recipe(options.recipe, words, path, writes=False).values

    values = composed.values
    check_local(values, "plan as many trainer.devices as there are workers")
    ckpt_path = find_checkpoint(values, task_folder(values, options.recipe))
    with_base(values, ckpt_path)
    with redirect_stdout(sys.stderr):  # DeepSpeed prints to stdout, which may be JSON
        trainer = build_trainer(values)
    rows, findings = _judge(trainer, composed.chain, options.overrides, device)
    # The table comes before the prediction, which takes seconds.
    if not options.json:
        sys.stdout.write(f"{_format_rows(rows)}\n\n")
        sys.stdout.flush()
    memory = DeviceMemory.of(device or devices.of(trainer.strategy.root_device), memory_bytes=memory_bytes)
    plan = _plan(values, trainer, memory, compose, has_advice=options.advice)
    if options.json:
        print_json({"recipe": options.recipe, "rows": [asdict(row) for row in rows]} | plan.as_dict())
    else:
        width = line_width(WIDTH) or WIDTH
        for line in str(plan).splitlines():
            fits = len(line) <= width  # lines of a table already fit
            wrapped = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False)
            sys.stdout.write(f"{line if fits else wrapped}\n")
    raise_rejected(findings)
    error = plan.forecast.prediction.error
    if error is not None and hasattr(error, "exit_code"):
        raise error  # `train` would raise it too
    return EXIT_OK


def split_device(words: Sequence[str]) -> tuple[Device | None, int | None, list[str]]:
    """Remove `device=NAME` and `device.memory=SIZE`, which look like overrides, from the words.

    Returns:
        The device to plan for, its memory in bytes, and the other words. If a value is None, the run's own
        device or memory applies.

    Raises:
        ConfigError: The name of the device is unknown, or the size cannot be parsed.
    """
    own = dict(word.split("=", 1) for word in words if word.startswith(("device=", "device.memory=")))
    others = [word for word in words if word.partition("=")[0] not in own]
    if not own:
        return None, None, others
    from lightning_eff.kernels import devices

    size, name = own.get("device.memory"), own.get("device", "").lower()
    try:
        memory_bytes = None if size is None else parse_bytes(size)
    except ValueError as error:
        allowed = f"a size above 0 with its unit, one of {', '.join(UNITS)}"
        raise ConfigError(key="device.memory", value=size, allowed=allowed) from error
    if "device" not in own:
        return devices.unknown_gpu(memory_bytes or 0), memory_bytes, others
    names = [*devices.DEVICES, "cpu"]
    if name not in names:
        allowed = f"a name that is known; {suggest_name(name, names)}"
        remedies = ["device.memory=40GiB for any other GPU"]
        raise ConfigError(key="device", value=name, allowed=allowed, remedies=remedies)
    return devices.named(name), memory_bytes, others


def _plan(
    values: dict[str, Any], trainer: pl.Trainer, memory: DeviceMemory, compose: Compose, *, has_advice: bool
) -> Plan:
    """Predict memory and, if requested, the savings of further techniques and the longest sequence."""
    from lightning_eff.planner.advice import Advice, AdvisedRecipe, advise
    from lightning_eff.planner.forecast import forecast
    from lightning_eff.planner.longest import longest_sequence
    from lightning_eff.planner.printing import Plan

    expected = forecast(values, memory, trainer=trainer)
    reason, has_longest = expected.prediction.reason, values["plan_longest"]
    if reason or not (has_advice or has_longest):
        return Plan(expected, Advice(reason=reason) if has_advice else None)
    advice, longest = None, None
    with redirect_stdout(sys.stderr):
        recipe = AdvisedRecipe.of(compose, values, memory)
        if has_advice:
            sys.stderr.write(" simulating techniques, for about a minute at most\n")
            advice = advise(recipe)
        if has_longest:
            sys.stderr.write(" searching for the longest sequence, with a few predictions\n")
            longest = longest_sequence(recipe)
    return Plan(expected, advice, longest)


def _judge(
    trainer: pl.Trainer, chain: RecipeChain, overrides: Sequence[str], gpu: Device | None
) -> tuple[list[PlanRow], list[Any]]:
    """Apply the rules to a Trainer's techniques; return one row per technique, and the findings."""
    from lightning_eff.core import rules
    from lightning_eff.core.machine import gpu_facts
    from lightning_eff.core.technique import Technique, name_of, non_default_config
    from lightning_eff.kernels.devices import AMPERE

    objects = rules.trainer_components(trainer)
    facts = rules.run_facts(trainer)
    if gpu is not None and not gpu.is_cpu:  # facts of the GPU replace this machine's
        here = ("machine/emulated_", "machine/float8", "run/cpu")
        facts = {name: text for name, text in facts.items() if not name.startswith(here)}
        facts |= {"run/cuda": f"device {gpu.name}"} | gpu_facts(gpu.capability)
        if 0 < gpu.capability < AMPERE:
            facts["machine/emulated_bfloat16"] = f"bfloat16 that is emulated on the {gpu.name}"
    findings = rules.check_rules(objects, facts)
    rows: dict[str, PlanRow] = {}
    for technique in objects:
        if isinstance(technique, Technique) and not isinstance(technique, type):
            name = name_of(technique)
            group, _, option = GROUP_OF.get(name, name).partition("/")
            set_by = _set_by(chain, overrides, group, option)
            rows[name] = PlanRow(name, non_default_config(technique), "on", set_by)
    # A finding may be about a part of the Trainer that is not a technique. Such a part gets a row too.
    for finding in findings:
        row = rows.setdefault(finding.technique, PlanRow(finding.technique, {}, "on", ""))
        verdict = finding.rule.verdict.value
        verdict = "REJECTED" if verdict == "rejected" else verdict
        row.will_be = max(row.will_be, verdict, key=VERDICTS.index)
        # The row already shows the technique, which is the first word of the sentence.
        row.why.append(str(finding).splitlines()[0].partition(" ")[2])
        row.remedies += map(str, finding.rule.remedies[:3])
    return list(rows.values()), findings


def _format_rows(rows: Iterable[PlanRow]) -> str:
    table = [
        [
            row.technique,
            ", ".join(f"{key}={value}" for key, value in row.asked.items()) or "defaults",
            row.will_be,
            row.set_by,
            "; ".join(row.why),
        ]
        for row in rows
    ]
    return text_table(["technique", "options", "will be", "set by", "why"], table, width=WIDTH)


def _set_by(chain: RecipeChain, overrides: Sequence[str], group: str, name: str) -> str:
    """Return the recipe or override that chooses an option, and the overrides that change the option."""
    is_many = group in MULTI_CHOICE_GROUPS
    setters = [f"recipe {chain.setter(group, name if is_many else None)}"]
    for item in parse_overrides(overrides):
        path, _, rest = str(item.key_or_group).partition(".")
        if path != group:
            continue
        if not rest and (not is_many or name in str(item.value())):
            setters = [str(item.input_line)]  # replaces the recipe's choice
        elif rest and (not is_many or rest.partition(".")[0] == name):
            setters.append(str(item.input_line))
    return ", ".join(setters)
