"""Show what a recipe would switch on, who asked for it and what cannot work together; trains nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lightning_eff.config import composition
from lightning_eff.config.overrides import parse_overrides, recipe_and_overrides
from lightning_eff.config.recipes import Chain, RecipePath, listed_options, read_chain
from lightning_eff.core.catalog import MULTI_CHOICE_GROUPS
from lightning_eff.core.errors import EXIT_OK, PRE_RUN_ERRORS, ConfigError, UsageError, root_cause_line
from lightning_eff.core.text import text_table

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_eff.planner.advice import Advice
    from lightning_eff.planner.advised_recipe import Compose
    from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
    from lightning_eff.planner.linear_layers import LinearLayers
    from lightning_eff.report.sharding_table import ShardingTable

USAGE = """lightning-eff plan RECIPE [overrides] [options]

  lightning-eff plan lm                                     what will be on, why, and the memory of a step
  lightning-eff plan lm device=rtx4090                      on another device: h100, h200, a100, b200, cpu
  lightning-eff plan lm '+callbacks=gradient_checkpointing' with overrides, as train takes them
  lightning-eff plan lm '+callbacks=triton_gemm'          and who would compute which linear layers here
  lightning-eff plan lm '+callbacks=triton_gemm' device=h200
                                                            or there
  lightning-eff plan zero3_offload                          and what each of 1 to 1,024 devices would keep
  lightning-eff plan lm strategy=ddp trainer.devices=8 trainer.accelerator=cpu
                                                            the same of copies, on a machine without 8 GPUs

Exit code 5 when a combination is refused, 3 when this machine lacks something; each with a remedy.

options:
  --config-dir DIR        a folder of your own with groups and recipes, or a package of options: pkg://NAME
  --advice                try techniques that save memory, and the largest micro-batch that fits (a minute)
  --json                  print the rows as JSON on the standard output
  --debug                 whole tracebacks"""

BY_GROUP = {"callbacks/optimizer_choice": "optimizer"}
"""What a recipe makes of a group of another name."""


@dataclass
class PlanRow:
    """One technique of a plan.

    Args:
        technique: Its name.
        asked: Constructor arguments that differ from their defaults.
        will_be: `on`, `adjusted`, `warned` or `REFUSED`.
        why: What was found, empty when nothing speaks against it.
        set_by: The override or the recipe that asks for it.
        remedies: What to type instead.
    """

    technique: str
    asked: dict[str, Any]
    will_be: str
    set_by: str
    why: list[str] = field(default_factory=list[str])
    remedies: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class _Looks:
    """What else was found out about a recipe.

    Args:
        expected: The peak of a step.
        layers: Who computes which linear layers.
        division: What each of many devices would keep.
        advice: What would save memory; None where nobody asked.
        devices: How many the run has.
    """

    expected: MemoryForecast
    layers: LinearLayers
    division: ShardingTable
    advice: Advice | None
    devices: int

    @classmethod
    def at(cls, values: dict[str, Any], trainer: pl.Trainer, device: str, compose: Compose | None) -> _Looks:
        """Look; with `compose`, which takes more words, for advice too."""
        from lightning_eff.planner.sharding import sharding_table_of

        division = sharding_table_of(values, trainer)
        expected = replace(_expected(values, trainer, device), unsharded=bool(division.shares))
        passing = None if expected.peak is None else expected.peak.passing_bytes
        division = replace(division, passing_bytes=passing if division.shares else None)
        with redirect_stdout(sys.stderr):
            advice = _advice(compose, expected.room) if compose is not None else None
        layers = _layers(values, trainer, device)
        return cls(expected, layers, division, advice, trainer.world_size)

    def texts(self) -> list[str]:
        """Return what there is to say."""
        advice = [str(self.advice)] if self.advice is not None else []
        room = self.expected.room
        shared = self.devices in self.division.shares
        verdict = [self.division.verdict(self.devices, room.free_bytes, room.name)] if shared else []
        return [
            str(self.expected),
            *advice,
            *(str(each) for each in (self.layers, self.division) if each.about),
            *verdict,
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        found: dict[str, Any] = {"layers": [asdict(row) for row in self.layers.rows]}
        found |= {"layers_about": self.layers.about, "division": self.division.rows()}
        found |= {"division_about": self.division.about, "division_assumed": self.division.assumed}
        found |= {"peak": self.expected.as_dict()}
        return found | ({"advice": self.advice.as_dict()} if self.advice is not None else {})


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="lightning-eff plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--advice", action="store_true")
    parser.add_argument("--debug", action="store_true")
    parser.error = _usage_error  # pyright: ignore[reportAttributeAccessIssue]
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    given, words = _parse(arguments)
    device, words = _named_device(words)
    recipe, overrides = recipe_and_overrides("plan", words)
    place = RecipePath.of(given.config_dir)
    values = composition.compose_recipe(recipe, overrides, place).values
    from lightning_eff.run import build_trainer

    def again(words: Sequence[str]) -> dict[str, Any]:
        return composition.compose_recipe(recipe, [*overrides, *words], place).values

    with redirect_stdout(sys.stderr):  # DeepSpeed speaks on the standard output, where JSON may be wanted
        trainer = build_trainer(values)
    chain, _ = read_chain(recipe, place)
    rows, findings = _judge(trainer, lambda group, name: _set_by(chain, overrides, group, name))
    if not given.json:
        sys.stdout.write(f"{_text(rows)}\n\n")
        sys.stdout.flush()
    looks = _Looks.at(values, trainer, device, again if given.advice else None)
    if given.json:
        found = {"recipe": recipe, "rows": [asdict(row) for row in rows]} | looks.as_dict()
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write("\n\n".join(looks.texts()) + "\n")
    from lightning_eff.core.rules import raise_rejected

    raise_rejected(findings)
    error = looks.expected.prediction.error
    if isinstance(error, PRE_RUN_ERRORS):
        raise error  # `train` would say the same
    return EXIT_OK


def _usage_error(message: str) -> None:
    text = f"plan: {message}"
    raise UsageError(text)


def _named_device(words: Sequence[str]) -> tuple[str, list[str]]:
    """Take `device=NAME`, which is no override, out of what was typed."""
    names = [word.partition("=")[2] for word in words if word.startswith("device=")]
    if len(names) > 1:
        text = f"plan: expected one device, not {len(names)}: {', '.join(names)}"
        raise UsageError(text)
    rest = [word for word in words if not word.startswith("device=")]
    if not names:
        return "", rest
    from lightning_eff.report.tile_explanation import known_device

    return known_device("device=", names[0]), rest


def _expected(values: dict[str, Any], trainer: pl.Trainer, device: str) -> MemoryForecast:
    """Predict the peak of a step on a device."""
    from lightning_eff.planner.device_memory import DeviceMemory, MemoryForecast
    from lightning_eff.planner.dry_run import dry_run, resolve_precision

    room = DeviceMemory.of(device, trainer.strategy.root_device)
    return MemoryForecast(dry_run(resolve_precision(values, room)), room)


def _advice(compose: Compose, room: DeviceMemory) -> Advice:
    """Try techniques on a recipe."""
    from lightning_eff.planner.advice import Advice, advise
    from lightning_eff.planner.advised_recipe import AdvisedRecipe

    sys.stderr.write(" looking for advice, for about a minute at most\n")
    recipe = AdvisedRecipe.of(compose, room)
    return Advice(reason="the data gives no batch") if recipe is None else advise(recipe)


def _layers(values: dict[str, Any], trainer: pl.Trainer, device: str) -> LinearLayers:
    """Look at the layers that a technique takes, in a model without memory; one that fails stops nothing."""
    from lightning_eff.core.rules import trainer_components
    from lightning_eff.core.technique import name_of
    from lightning_eff.planner import linear_layers
    from lightning_eff.run import model_without_memory

    takers = [
        each for each in trainer_components(trainer) if isinstance(each, linear_layers.ReplacesLinearLayers)
    ]
    if not takers:
        return linear_layers.LinearLayers()
    try:
        model = model_without_memory(values)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        reason = root_cause_line(error).removeprefix("error: ").splitlines()[0]
        return linear_layers.LinearLayers(
            f"linear layers: the model cannot be built without memory: {reason}"
        )
    where = linear_layers.LayerTarget.of(device, trainer.strategy.root_device, str(trainer.precision))
    name = name_of(takers[0])
    try:
        return linear_layers.describe_layers(
            takers[0], name, model, where, linear_layers.InputRows.of(values)
        )
    except ConfigError as error:
        raise error.under(name.replace("/", ".")) from error


def _judge(trainer: pl.Trainer, set_by: Any) -> tuple[list[PlanRow], list[Any]]:
    """Compare the facts of a Trainer's techniques."""
    from lightning_eff.core import rules
    from lightning_eff.core.technique import Technique, config_of, constructor_defaults, name_of

    objects = rules.trainer_components(trainer)
    findings = rules.check_rules(objects, rules.run_facts(trainer))
    rows: dict[str, PlanRow] = {}
    for each in objects:
        if isinstance(each, Technique) and not isinstance(each, type):
            name = name_of(each)
            group, _, short = BY_GROUP.get(name, name).partition("/")
            arguments = {k: v for k, v in config_of(each).items() if v != constructor_defaults(each).get(k)}
            rows[name] = PlanRow(name, arguments, "on", set_by(group, short))
    for finding in findings:
        row = rows.setdefault(finding.technique, PlanRow(finding.technique, {}, "on", ""))
        verdict = finding.rule.verdict.value
        row.will_be = _worst(row.will_be, "REFUSED" if verdict == "refused" else verdict)
        row.why.append(str(finding).splitlines()[0].partition(" ")[2])
        row.remedies += finding.rule.remedies[:3]
    return list(rows.values()), findings


def _worst(one: str, other: str) -> str:
    return max(one, other, key=["on", "fine", "adjusted", "warned", "REFUSED"].index)


def _text(rows: Iterable[PlanRow]) -> str:
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
    return text_table(["technique", "asked", "will be", "set by", "why"], table)


def _set_by(chain: Chain, overrides: Sequence[str], group: str, name: str) -> str:
    """Return who lists a group's option, a recipe or an override, and the overrides that change it."""
    many = group in MULTI_CHOICE_GROUPS
    listing = ((each, listed_options(defaults, group)) for each, defaults in chain)
    setters = [f"recipe {next((each for each, o in listing if o and (not many or name in o)), chain[0][0])}"]
    for item in parse_overrides(overrides):
        path, _, rest = str(item.key_or_group).partition(".")
        if path != group:
            continue
        if not rest and (not many or name in str(item.value())):
            setters = [str(item.input_line)]
        elif rest and (not many or rest.partition(".")[0] == name):
            setters.append(str(item.input_line))
    return ", ".join(setters)
