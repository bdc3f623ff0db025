"""Show what a recipe would switch on, who asked for it and what cannot work together; trains nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_eff import config
from lightning_eff.catalog import MANY
from lightning_eff.errors import EXIT_OK, UsageError
from lightning_eff.measure.tables import text_table
from lightning_eff.overrides import parse_overrides, recipe_and_overrides
from lightning_eff.place import Place, listed_options, recipe_chain

USAGE = """lightning-eff plan RECIPE [overrides] [options]

  lightning-eff plan lm                                     what will be on, why, and who set it
  lightning-eff plan lm '+callbacks=gradient_checkpointing' with overrides, as train takes them

Exit code 5 when a combination is refused, 3 when this machine lacks something; each with a remedy.

options:
  --config-dir DIR        a folder of your own with groups and recipes
  --json                  print the rows as JSON on the standard output
  --debug                 whole tracebacks"""

BY_GROUP = {"callbacks/optimizer_choice": "optimizer"}
"""What a recipe makes of a group of another name."""


@dataclass
class Row:
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


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    parser = argparse.ArgumentParser(prog="lightning-eff plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    parser.error = _usage_error  # pyright: ignore[reportAttributeAccessIssue]
    given, words = parser.parse_known_args(arguments)
    recipe, overrides = recipe_and_overrides("plan", words)
    place = Place.of(given.config_dir)
    sys.path.insert(0, str(Path.cwd()))
    values = config.compose_recipe(recipe, overrides, place).values
    rows, findings = _judge(values, lambda group, name: _set_by(recipe, overrides, place, group, name))
    if given.json:
        sys.stdout.write(
            json.dumps({"recipe": recipe, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
    else:
        sys.stdout.write(_text(rows) + "\n")
    from lightning_eff.plan import raise_refused

    raise_refused(findings)
    return EXIT_OK


def _usage_error(message: str) -> None:
    text = f"plan: {message}"
    raise UsageError(text)


def _judge(values: dict[str, Any], set_by: Any) -> tuple[list[Row], list[Any]]:
    """Build the Trainer with its techniques, and compare their facts."""
    from lightning_eff import plan
    from lightning_eff.facts import Technique, asked, defaults, name_of
    from lightning_eff.run import build_trainer

    trainer = build_trainer(values)
    objects = plan.objects_of(trainer)
    findings = plan.check(objects, plan.run_facts(trainer))
    rows: dict[str, Row] = {}
    for each in objects:
        if isinstance(each, Technique) and not isinstance(each, type):
            name = name_of(each)
            group, _, short = BY_GROUP.get(name, name).partition("/")
            arguments = {k: v for k, v in asked(each).items() if v != defaults(each).get(k)}
            rows[name] = Row(name, arguments, "on", set_by(group, short))
    for finding in findings:
        row = rows.setdefault(finding.technique, Row(finding.technique, {}, "on", ""))
        verdict = finding.rule.verdict.value
        row.will_be = _worst(row.will_be, "REFUSED" if verdict == "refused" else verdict)
        row.why.append(str(finding).splitlines()[0].partition(" ")[2])
        row.remedies += finding.rule.remedies[:3]
    return list(rows.values()), findings


def _worst(one: str, other: str) -> str:
    return max(one, other, key=["on", "fine", "adjusted", "warned", "REFUSED"].index)


def _text(rows: Iterable[Row]) -> str:
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


def _set_by(recipe: str, overrides: Sequence[str], place: Place, group: str, name: str) -> str:
    """Return who lists a group's option, a recipe or an override, and the overrides that change it."""
    many = group in MANY
    chain = recipe_chain(recipe, place)
    listing = ((each, listed_options(defaults, group)) for each, defaults in chain)
    setters = [f"recipe {next((each for each, o in listing if o and (not many or name in o)), recipe)}"]
    for item in parse_overrides(overrides):
        path, _, rest = str(item.key_or_group).partition(".")
        if path != group:
            continue
        if not rest and (not many or name in str(item.value())):
            setters = [str(item.input_line)]
        elif rest and (not many or rest.partition(".")[0] == name):
            setters.append(str(item.input_line))
    return ", ".join(setters)
