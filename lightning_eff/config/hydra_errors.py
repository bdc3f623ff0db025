"""Explain a composition error in one or two lines: the key or option at fault and the nearest name.

Hydra's advice to append a misspelt key with `+` is left out. If an override fails because it uses another
tool's word, the error shows the equivalent override from `habits.yaml`. If an option of the user has the name
of such a word, no error occurs. `recipes.py` and `composition.py` call this module.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException

from lightning_eff.config.strict_yaml import YamlDocument
from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS, RECIPES, parameter_keys
from lightning_eff.core.errors import ConfigError, EnvironmentLacksError, UsageError, suggest_name

AMBIGUOUS = "Ambiguous value for argument '"
NO_NAME = "Config group override must be a string or a list"
"""`AMBIGUOUS` and `NO_NAME` start Hydra 1.3's errors for `callbacks=a,b` and for `precision=16`."""

PLUGINS = {
    "hydra/launcher/submitit": ("slurm", "launcher for SLURM"),
    "hydra/launcher/joblib": ("joblib", "launcher for several runs at once"),
    "hydra/sweeper/optuna": ("optuna", "sweeper that searches with Optuna"),
}
"""For each option of a Hydra plugin: the extra of `lightning-eff` that installs it, and a description."""


def missing_file(
    error: MissingConfigException, recipes: Sequence[str], documents: Mapping[str, YamlDocument]
) -> UsageError | EnvironmentLacksError:
    """Return the error for a missing option or base recipe, with the nearest name.

    `documents` are the files that were read, by recipe or option. The missing name comes from one of these
    files or from an override.
    """
    wanted = str(error.missing_cfg_file)
    for begin, (extra, about) in PLUGINS.items():
        if wanted.startswith(begin):
            text = f"{wanted}: hydra's {about} is missing\n  try: pip install 'lightning-eff[{extra}]'"
            return EnvironmentLacksError(text)
    group, _, option = wanted.rpartition("/")
    # Match the whole name, so that `lm` does not match `lm_large`.
    named = re.compile(rf"(?<![\w.]){re.escape(option)}(?![\w.])")
    listing = (each for each in documents.values() if named.search(_defaults(each)))
    where = next((f"{each.file}: " for each in listing), "")
    if not group:
        return UsageError(f"{where}{wanted}: no such recipe; {suggest_name(wanted, recipes)}")
    options = error.options or [file.stem for file in (CONF / group).glob("*.yaml")]
    text = f"{where}{group}={option}: no such option; {suggest_name(option, options)}"
    # A name with a dot is probably a class, such as my_project.Net.
    text += f"\n  try: {group}._target_={option}" if "." in option else ""
    return UsageError(text)


def _defaults(document: YamlDocument) -> str:
    return str(document.content.get("defaults", "")) if isinstance(document.content, dict) else ""


def composition_error(error: Exception, documents: Mapping[str, YamlDocument]) -> str:
    """Return the error text for a composition error of Hydra 1.3 that is not about a missing file."""
    # Hydra raises an AssertionError if the name of a group is not a string.
    if isinstance(error, (RecursionError, AssertionError)):
        own = [str(each.file) for each in documents.values() if not {CONF, RECIPES} & {*each.file.parents}]
        what = "nested too deep, or defaults that never end or have no name"
        return f"{what}, in {' or '.join(own) or 'the config'}"
    cause = error.__cause__
    first = next(iter(str(error).splitlines() or str(cause or "").splitlines()), type(error).__name__)
    if first.startswith(AMBIGUOUS):
        word, _, value = first.removeprefix(AMBIGUOUS).rstrip("'").partition("=")
        key = word.lstrip("+")
        is_list = key in MULTI_CHOICE_GROUPS
        tries = [f"{word}=[{value}]"] if is_list else []
        tries.append(f"-m {key}={value}  # one run for each")
        kind = "several options of a group are a list" if is_list else "several values are a sweep"
        return "\n".join([f"{key}={value}: {kind}", *(f"  try: {each}" for each in tries)])
    if first.startswith("Could not override '"):
        key = first.split("'")[1]
        if key in TOP_LEVEL:
            return f"{key}: this recipe does not have it\n  try: +{key}=..."
        paths = [path for path in parameter_keys() if path.endswith(f".{key}")]
        known = suggest_name(key.partition(".")[0], TOP_LEVEL)
        hint = f"did you mean {' or '.join(paths[:3])}?" if paths else known
        return f"{key}: no such key; {hint}"
    reason = f" ({str(cause).strip().splitlines()[0]})" if str(error) and str(cause or "").strip() else ""
    return f"{first}{reason}"


def with_habits(error: UsageError | ConfigError, overrides: Sequence[Override]) -> UsageError | ConfigError:
    """Append to an error the overrides that replace those listed in `habits.yaml`."""
    text = str(error)
    meant = {str(item.input_line): _meant_by(item, text) for item in overrides}
    habits = {line: words for line, words in meant.items() if words}
    if not habits:
        return error
    reason = text.partition("\n")[0].partition(";")[0]
    if NO_NAME in reason:
        reason = f"{next(iter(habits))}: no such option"
    # Show one line per combination of alternatives.
    tries = [f"  try: {' '.join(words)}" for words in itertools.product(*habits.values())]
    return UsageError("\n".join([reason, *tries]))


def _meant_by(item: Override, text: str) -> Sequence[str]:
    """Return the equivalents of an override if its key is unknown or the error is about the override."""
    key = str(item.key_or_group)
    is_unknown = key not in TOP_LEVEL and "/" not in key and "." not in key
    # An error's text begins with the key, or with the start of the key's path.
    begins = [
        f"{path}{sign}" for path in itertools.accumulate(key.split("."), "{}.{}".format) for sign in ":="
    ]
    if item.is_delete() or not (is_unknown or text.startswith((NO_NAME, *begins))):
        return ()
    return proposals(key, item.get_value_string())


def read_habits() -> dict[str, tuple[str, ...]]:
    """Read habits.yaml; return, for each key (or `key=value`) of another tool, possible replacements."""
    text = Path(__file__).with_name("habits.yaml").read_text(encoding="utf-8")
    rows: dict[str, str] = yaml.safe_load(text)
    return {
        word: tuple(text.replace("{key}", word) for text in meaning.split(" | "))
        for meaning, words in rows.items()
        for word in words.split()
    }


def proposals(key: str, value: str) -> Sequence[str]:
    """Return the overrides that may replace `key=value`; empty if `habits.yaml` does not contain the key.

    If there are several overrides, the right choice depends on the recipe's model.

    Example:
        >>> proposals("batch_size", "8"), proposals("trainer.precision", "bf16-mixed"), proposals("sed", "1")
        (('data.batch_size=8',), ('precision=bf16_mixed',), ())
    """
    habits = read_habits()
    row = habits.get(f"{key}={value.lower()}") or habits.get(key) or ()
    found = tuple(text.replace("{}", value) for text in row)
    if len(found) == 1:
        # The proposal itself may be in `habits.yaml`, for example trainer.strategy=zero2.
        return proposals(*found[0].split("=", 1)) or found
    return found
