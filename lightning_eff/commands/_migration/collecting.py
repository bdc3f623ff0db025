"""Look up each key of a file in its tool's table: overrides, and what has no counterpart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lightning_eff.commands._migration import reading
from lightning_eff.commands._migration.rows import Row, Table
from lightning_eff.core.errors import UsageError, suggest_name

LEFT_TO_US = "auto"
"""A value by which DeepSpeed and Accelerate leave a setting to the Trainer."""
OFF = (None, False, "", "no", "none", "false", [], {})
CLASS_KEYS = ("_component_", "class_path")
"""Last names of keys whose value is a class, of which the table has the name alone."""
_PLAIN = re.compile(r"[A-Za-z_./][\w./:@+-]*")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal acts on, or cannot show."""
_ZERO_NAME = re.compile(r"zero([123])")


@dataclass(frozen=True)
class Unit:
    """The overrides of one key."""

    key: str
    value: Any
    overrides: tuple[str, ...]
    is_default: bool = False
    """Whether the value is the other tool's default, so that nothing is lost without them."""


@dataclass(frozen=True)
class Finding:
    """A key that becomes nothing, and why."""

    key: str
    value: Any
    reason: str


@dataclass
class Collected:
    """What the keys of a file, and of files that it names, become."""

    folder: Path
    units: list[Unit] = field(default_factory=list[Unit])
    roles: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
    """Key and value of each setting that is computed from several."""
    lacking: list[Finding] = field(default_factory=list[Finding])
    unneeded: list[str] = field(default_factory=list[str])
    unknown: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def add(self, content: Mapping[str, Any], table: Table, prefix: str = "") -> None:
        """Look up the keys of a file; `prefix` names the key that holds or names it."""
        flat = reading.interpolated(reading.flatten(content, table))
        found = {key: reading.find_row(key, table) for key in flat}
        order = list(table)
        for key in sorted(flat, key=lambda key: order.index(key) if key in table else len(order)):
            row = found[key]
            if row is not None:
                self._row(key, row[0], flat[key], prefix, row[1])
            elif flat[key] not in (None, {}, []):
                hint = suggest_name(key, order)
                self.unknown.append((f"{prefix}{key}", hint if hint.startswith("did") else "-"))
        for key, row in table.items():
            if row.decides and key not in flat and not prefix:
                self._row(key, row, row.default, prefix)

    def _row(self, key: str, row: Row, value: Any, prefix: str, rest: str = "") -> None:
        full, is_default = f"{prefix}{key}", value == row.default
        if any(full.startswith(f"{finding.key}.") for finding in self.lacking):
            return  # an argument of a class without a counterpart
        listed = isinstance(row.here, Mapping) and str(value).lower() in row.here
        if (value in (None, LEFT_TO_US) and not listed) or (is_default and not row.decides):
            return
        if row.role == "deepspeed":
            self._deepspeed(full, value)
        elif row.role:
            self.roles.setdefault(row.role, (full, value))
        elif row.kind == "lacks" and value not in OFF:
            self.lacking.append(Finding(full, value, row.note))
        elif row.kind == "unneeded" and value not in OFF:
            self.unneeded.append(full)
        elif isinstance(row.here, Mapping):
            self._by_value(full, row, row.here, value)
        elif row.kind == "override":
            self._unit(full, value, row.here.replace("{key}", rest), is_default=is_default)

    def _by_value(self, key: str, row: Row, here: Mapping[str, str], value: Any) -> None:
        values = value if isinstance(value, list) else str(value).replace(",", " ").split()
        for one in values if row.splits else [value]:
            text = str(one).lower()
            text = text.rpartition(".")[2] if key.endswith(CLASS_KEYS) else text
            pattern = next((each for each in here if each == text), None)
            pattern = pattern or next((each for each in here if fnmatchcase(text, each)), None)
            if pattern is not None:
                self._unit(key, one, here[pattern], is_default=value == row.default)
            elif one not in OFF and text not in OFF:
                self.lacking.append(Finding(key, one, row.others))

    def _unit(self, key: str, value: Any, here: str, *, is_default: bool) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            self.lacking.append(Finding(key, value, "expected a finite number"))
        elif here:
            words = tuple(filled(word, value) for word in here.split())
            self.units.append(Unit(key, value, words, is_default))

    def _deepspeed(self, key: str, value: Any) -> None:
        """Add a DeepSpeed config that is a value, or in a file that the value names."""
        name = str(value)
        if isinstance(value, Mapping):
            self._add_zero({str(name): each for name, each in value.items()}, f"{key}.")
            return
        places = (Path(name), self.folder / name)
        file = next((place for place in places if reading.is_file(place)), None)
        stage = _ZERO_NAME.search(Path(name).stem)
        if file is not None:
            try:
                self._add_zero(reading.read_file(file), f"{key}.")
            except UsageError as error:
                self.lacking.append(Finding(key, value, str(error)))
        elif stage is not None:  # one of those that come with Axolotl
            self._add_zero({"zero_optimization": {"stage": int(stage[1])}}, f"{key}.")
        else:
            self.lacking.append(
                Finding(key, value, "no such file; `lightning-eff migrate` reads it alone, too")
            )

    def _add_zero(self, content: Mapping[str, Any], prefix: str) -> None:
        """Add a DeepSpeed config beside the Trainer's own; how often that logs is not DeepSpeed's to say."""
        own = {key: value for key, value in content.items() if key != "steps_per_print"}
        self.unneeded += [f"{prefix}{key}" for key in content if key not in own]
        self.add(own, reading.SOURCES["deepspeed"].table, prefix)


def filled(override: str, value: Any) -> str:
    """Return an override with a value in the place of `{}` or, as a text, of `{s}`.

    Example:
        >>> filled("seed={}", "7"), filled("tags=[{s}]", 7), filled("data.paths=hf://{s}", "a b")
        ('seed=7', 'tags=["7"]', 'data.paths="hf://a b"')
    """
    key, sign, text = override.partition("=")
    if "{s}" in text and not text.startswith("["):
        return f"{key}{sign}{quoted(text.replace('{s}', str(value)))}"
    if "{s}" in text:
        return f"{key}{sign}{text.replace('{s}', quoted(str(value)))}"
    return override.replace("{}", written(value))


def number(value: Any) -> float | None:
    """Return a number that is written as a number or a text, or None; nothing infinite.

    Example:
        >>> number("5e-5"), number(3), number("many"), number(True)
        (5e-05, 3.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def written(value: Any) -> str:
    """Return a value in the grammar of overrides; a text that is a number becomes one.

    Example:
        >>> written("5e-5"), written([0.9, None]), written(True), written("a b"), written({"r": 8})
        ('5e-05', '[0.9,null]', 'true', '"a b"', '{r:8}')
    """
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{quoted(str(key))}:{written(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(written(each) for each in value)}]"
    if isinstance(value, str):
        found = number(value)
        return (
            quoted(value)
            if found is None
            else repr(int(found) if re.fullmatch(r"[+-]?\d+", value) else found)
        )
    return repr(value)


def quoted(text: str) -> str:
    r"""Return a text that stays a text in the grammar of overrides.

    Example:
        >>> quoted("meta-llama/Llama-3"), quoted("8"), quoted('so "x"'), quoted("true")
        ('meta-llama/Llama-3', '"8"', '"so \\"x\\""', '"true"')
        >>> quoted("${oc.env:HOME}")  # a text too, not what OmegaConf makes of it
        '"\\${oc.env:HOME}"'
    """
    is_word = text.lower() in ("null", "true", "false", "nan", "inf")
    if _PLAIN.fullmatch(text) and not is_word and not _NUMBER.fullmatch(text):
        return text
    # A backslash stands for itself, but before a quotation mark and at the end.
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)  # OmegaConf's own escape
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    return f'"{escaped}"'
