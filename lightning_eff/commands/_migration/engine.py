"""Turn the keys of another tool's file into overrides of a recipe, by the tool's table.

`migrate` uses `Migration`. The functions at the end convert several keys at once, or a key without a plain
value. A row of the table names such a function and the key's entry in `parts`, as in
`convert: batches.per_device`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_eff.commands._migration.tables import (
    Row,
    Table,
    filled,
    flatten,
    number,
    read_file,
    read_table,
)
from lightning_eff.config.recipes import RecipeLoader, RecipePath
from lightning_eff.config.strict_yaml import is_file, read_yaml
from lightning_eff.config.validate import RUN_KEYS
from lightning_eff.core.catalog import CONF, MULTI_CHOICE_GROUPS

AUTO = "auto"
"""Value in a DeepSpeed config that leaves a setting to the Trainer."""
OFF = (None, False, "", "no", "none", "false", [], {})
ONE_OPTION_GROUPS = ("optimizer", "scheduler", "precision", "strategy")
ACCUMULATION = "callbacks.gradient_accumulation"
CHECKPOINT = "monitors.model_checkpoint"


@dataclass(frozen=True)
class Given:
    """A key with its value in the file, or with the tool's default if the file lacks the key."""

    key: str
    value: Any
    is_default: bool = False


@dataclass(frozen=True)
class Setting:
    """An override, and the key from which it was made."""

    given: Given
    word: str
    is_of_option: bool
    """Whether the override sets a parameter of an option that the same row chooses."""


@dataclass
class Migration:
    """The overrides found so far, and the keys without a counterpart."""

    table: Table
    folder: Path
    recipe: str = ""
    settings: dict[str, Setting] = field(default_factory=dict[str, Setting])
    """The override of each changed setting; `callbacks.NAME` stands for an option that is added or
    removed."""
    parts: dict[str, dict[str, Given]] = field(default_factory=dict[str, dict[str, Given]])
    """Values for the conversion functions, by function and part."""
    lacking: list[tuple[Given, str]] = field(default_factory=list[tuple[Given, str]])
    """Keys without a counterpart, each with the reason."""
    same: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    batches_per_step: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # defaults of the tool's variant

    def add(self, content: Mapping[str, Any], table: Table, prefix: str = "") -> None:
        """Look up all keys of a file; another file contains or names this file under the key `prefix`."""
        flat = flatten(content, table)
        order = {key: index for index, key in enumerate(table.rows)}
        left_to_us: list[str] = []
        if not prefix and any(key in flat for key in table.variant.get("keys", ())):
            self.defaults = table.variant["defaults"]
        # Look keys up in the order of the table, because later rows win.
        for key in sorted(flat, key=lambda key: order.get(key, len(order))):
            value, found = flat[key], table.find(key)
            if value == AUTO and not (found and isinstance(found[0].ours, Mapping) and AUTO in found[0].ours):
                left_to_us.append(key)
            elif found is not None and value is not None:
                self._look_up(Given(f"{prefix}{key}", value), *found)
            elif value not in (None, {}, []):
                self.unknown.append(f"{prefix}{key}")
        if not prefix:
            self._add_defaults(flat, table)
            self.notes += [f"left to the recipe (auto): {', '.join(left_to_us)}"] if left_to_us else []

    def _add_defaults(self, flat: Mapping[str, Any], table: Table) -> None:
        """Look up the keys that the file lacks, if the tool's default differs from the recipe's value."""
        for key, row in table.rows.items():
            conditions = [] if isinstance(row.always, bool) else row.always.split()
            applies = row.always is True or any(flat.get(other) not in OFF for other in conditions)
            if flat.get(key) is None and (applies or key in self.defaults):
                default = Given(key, self.defaults.get(key, row.default), is_default=True)
                self._look_up(default, row, key.rpartition(".")[2])

    def _look_up(self, given: Given, row: Row, name: str) -> None:
        if any(other.value is True and given.key.startswith(f"{other.key}.") for other, _ in self.lacking):
            return  # an argument of a class without a counterpart
        usual = self.defaults.get(given.key, row.default)
        is_default = usual is not None and usual in (given.value, number(given.value))
        if is_default and not given.is_default and not row.always:
            return  # the tool's default, which the recipe has too
        given = replace(given, is_default=given.is_default or is_default)
        if row.needs and self.word(_target(row.needs)) != row.needs:
            self.lack(given, f"has an effect only with {row.needs}")
        elif row.convert:
            function, _, part = row.convert.partition(".")
            parts = self.parts.setdefault(function, {})
            old, parts[part] = parts.get(part, given), given
            if not old.is_default and old.value != given.value:
                self.lack(old, f"{given.key} sets {given.value}")
        elif isinstance(row.ours, Mapping):
            self._by_value(given, row, row.ours)
        elif row.ours:
            self.set(given, row.ours, name)
        elif given.value not in OFF and row.same:
            self.same.append(given.key)
        elif given.value not in OFF:
            self.lack(given, row.lacks)

    def _by_value(self, given: Given, row: Row, ours: Mapping[str, str]) -> None:
        """Set the overrides for a value, or for each value in a list or a string of several words."""
        values: Any = given.value
        if not isinstance(values, list):
            is_one = "*" in ours or isinstance(values, Mapping)
            # Some tools separate the values of a string by commas, others by spaces.
            values = [values] if is_one else str(values).replace(",", " ").split()
        for value in values:
            text = str(value).lower()
            text = text.rpartition(".")[2] if given.key.endswith("class_path") else text
            others = "" if text in OFF else ours.get("*", f"!{row.lacks or 'no such choice'}")
            words = ours.get(text, others)
            if words.startswith("!"):
                self.lack(replace(given, value=value), words[1:].strip())
            elif words:
                self.set(replace(given, value=value), words)

    def set(self, given: Given, words: str, name: str = "") -> None:
        """Set space-separated overrides; a value that does not fit is recorded as having no counterpart."""
        name = name.replace(".init_args.", ".").replace("class_path", "_target_")  # names of LightningCLI
        if name and not all(part.isidentifier() for part in name.split(".")):
            self.lack(given, "expected the name of an argument")
            return
        options = [word.partition("=")[0] for word in words.split()]
        settings: list[Setting] = []
        for word in words.split():
            is_of_option = ".init_args." in given.key or word.partition(".")[0] in options
            try:
                settings.append(Setting(given, filled(word, given.value, name), is_of_option))
            except ValueError as error:
                self.lack(given, str(error))
                return
        for setting in settings:
            if not self._put(setting):
                return  # the rest belongs to an option that is not chosen

    def lack(self, given: Given, reason: str) -> None:
        """Record that a key has no counterpart."""
        self.lacking.append((given, reason))

    def word(self, target: str) -> str:
        """Return the override of a key, or an empty string."""
        return self.settings[target].word if target in self.settings else ""

    def _put(self, setting: Setting) -> bool:
        """Store a setting unless an earlier setting has priority; return whether the setting is stored.

        A key of the file has priority over a default. If two keys of the file set the same option, the later
        row of the table wins.
        """
        target = _target(setting.word)
        old = self.settings.get(target)
        if old is not None and old.word != setting.word:
            # Neither a removal nor a default replaces an earlier setting.
            if setting.word.startswith("~") or (setting.given.is_default and not old.given.is_default):
                return False
            is_choice = "." not in target and target not in RUN_KEYS
            if is_choice and not old.given.is_default:
                self.lack(old.given, f"{setting.given.key} sets {setting.word}")
            for key in [key for key in self.settings if is_choice and key.startswith(f"{target}.")]:
                if self.settings[key].is_of_option:  # a parameter of the replaced option
                    del self.settings[key]
        self.settings[target] = setting
        return True

    def settle(self) -> None:
        """Convert the parts, choose the recipe, and drop settings that are already set or never read."""
        for convert in CONVERSIONS:
            if parts := self.parts.get(convert.__name__):
                convert(self, parts)
        chosen = self.settings.pop("recipe", None)
        self.recipe = chosen.word.partition("=")[2] if chosen else self.table.recipe
        chain = RecipeLoader(self.recipe, RecipePath()).read_chain()
        listed = {name: {*chain.options(name)} or {""} for name in (*MULTI_CHOICE_GROUPS, *ONE_OPTION_GROUPS)}
        for target, setting in list(self.settings.items()):
            group, _, option = target.partition(".")
            # Hydra rejects adding an option that is listed, and removing an option that is not listed.
            is_listed = option in listed.get(group, ())
            reason = "" if setting.is_of_option else self._unread(target, listed)
            if reason or setting.word.startswith("+" if is_listed else "~"):
                del self.settings[target]
            if reason and not setting.given.is_default:
                self.lack(setting.given, reason)

    def _unread(self, target: str, listed: Mapping[str, set[str]]) -> str:
        """Return why the chosen options do not read a key, or an empty string."""
        group, *rest = target.split(".")
        if group in MULTI_CHOICE_GROUPS and len(rest) > 1:
            word = self.word(f"{group}.{rest[0]}")
            is_chosen = word.startswith("+") or (not word and rest[0] in listed[group])
            return "" if is_chosen else f"has an effect only with +{group}={rest[0]}"
        if group in ONE_OPTION_GROUPS and rest:
            # A single-option group lists one option or an empty string.
            option = self.word(group).partition("=")[2] or max(listed[group])
            return "" if rest[0] in _keys(group, option) else f"{group}={option} has no {rest[0]}"
        return ""


def _target(word: str) -> str:
    """Return the setting that an override changes: `+callbacks=x` and `~callbacks.x` change `callbacks.x`."""
    key, _, value = word.lstrip("+~").partition("=")
    return f"{key}.{value}" if word.startswith("+") else key


def _keys(group: str, option: str) -> set[str]:
    """Return the parameters in an option's YAML and in the YAML of the options that it builds on."""
    content: dict[str, Any] = read_yaml(CONF / group / f"{option}.yaml", expect_mapping=True).content
    bases = [name for name in content.get("defaults", ()) if name != "_self_"]
    return {*content, "_target_"}.union(*(_keys(group, base) for base in bases))


def deepspeed(found: Migration, parts: Mapping[str, Given]) -> None:
    """Add the keys of a DeepSpeed config, which is the value itself or a file that the value names."""
    given = parts["config"]
    found.set(given, "strategy=deepspeed_zero")
    content = given.value
    if not isinstance(content, Mapping):
        places = (Path(str(content)), found.folder / str(content))
        file = next((place for place in places if is_file(place)), None)
        if file is None:
            found.lack(given, "no such file")
            return
        content = read_file(file)
    own = {str(key): value for key, value in content.items() if key != "steps_per_print"}  # Trainer prints
    found.add(own, read_table("deepspeed"), f"{given.key}.")


def batches(found: Migration, parts: Mapping[str, Given]) -> None:
    """Set the batch size and the accumulation: samples per step if known, otherwise batches per step."""
    sizes = {part: _whole(found, given) for part, given in parts.items()}
    batch, ranks = sizes.get("per_device"), sizes.get("processes")
    count = sizes.get("accumulation") or 1
    if batch:
        found.set(parts["per_device"], "data.batch_size={whole}")
    if ranks:
        machines = sizes.get("machines") or 1
        if ranks % machines:
            found.lack(parts["processes"], f"expected a multiple of the {machines} machines")
        nodes = f" trainer.num_nodes={machines}" if machines > 1 else ""
        found.set(parts["processes"], f"trainer.devices={max(1, ranks // machines)}{nodes}")
    given = parts.get("accumulation") or parts.get("per_device")
    # Samples per step are exact, whereas the effect of batches per step depends on the new run's ranks.
    if sizes.get("global"):
        found.set(parts["global"], f"{ACCUMULATION}.global_batch_size={{whole}}")
    elif given and batch and ranks:
        found.set(given, f"{ACCUMULATION}.global_batch_size={batch * count * ranks}")
    elif given:
        found.set(given, f"{ACCUMULATION}.global_batch_size=null {ACCUMULATION}.num_batches={count}")
    found.batches_per_step = count


def evaluation(found: Migration, parts: Mapping[str, Given]) -> None:
    """Set how often validation runs; other tools count optimizer steps, whereas Lightning counts batches."""
    strategy = parts.get("strategy") or parts["steps"]
    # In transformers, `eval_steps` defaults to `logging_steps`, which defaults to 500.
    logged = found.word("trainer.log_every_n_steps").partition("=")[2] or 500
    steps = parts.get("steps") or Given("logging_steps", logged)
    if strategy.value in OFF:
        found.set(strategy, "data.val_fraction=0.0")
    elif (strategy is steps or strategy.value == "steps") and (every := _whole(found, steps)):
        interval = f"trainer.val_check_interval={every * found.batches_per_step}"
        found.set(steps, f"{interval} trainer.check_val_every_n_epoch=null")


def checkpoints(found: Migration, parts: Mapping[str, Given]) -> None:
    """Set which checkpoints are kept: the checkpoint with the best loss, or one every few steps."""
    values = {part: given.value for part, given in parts.items()}
    strategy = values.get("strategy", "steps")
    best = next((parts[part] for part in ("best", "strategy") if values.get(part) in (True, "best")), None)
    if values.get("metric", "loss") not in ("loss", "eval_loss"):
        reason = f"{CHECKPOINT}.monitor=NAME with mode=max or min, a name that the module logs"
        found.lack(parts["metric"], reason)
        best = None
    if strategy in OFF:
        found.set(parts["strategy"], f"~{CHECKPOINT}")
    elif best is not None and found.word("data.val_fraction") == "data.val_fraction=0.0":
        found.lack(best, "without validation no checkpoint is the best")
    elif best is not None:
        found.set(best, f"{CHECKPOINT}.monitor=val_loss {CHECKPOINT}.mode=min")
        if "steps" in parts:
            found.lack(parts["steps"], "the best checkpoint is chosen after each validation")
    elif strategy == "steps" and "steps" in parts:
        found.set(parts["steps"], f"{CHECKPOINT}.every_n_train_steps={{whole}}")


def _whole(found: Migration, given: Given) -> int | None:
    """Return a value as a whole number of at least 1; record that any other value has no counterpart."""
    value = number(given.value)
    if value is None or value != int(value) or value < 1:
        found.lack(given, "expected a whole number of at least 1")
        return None
    return int(value)


CONVERSIONS = (deepspeed, batches, evaluation, checkpoints)
"""Conversion functions in execution order. `deepspeed` is first, because it adds parts for the others."""
