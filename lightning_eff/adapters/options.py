"""The options of PEFT's methods, which are fields of their configs: names, types and who is to blame."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any

from beartype.door import is_bearable
from peft import PeftConfig

from lightning_eff.core.errors import ConfigError, suggest_name

FACTORS = ("lora_alpha", "alpha")
"""Options that what an adapter computes is multiplied by."""
OTHER_WORDS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
"""What others call an option of PEFT's."""
NUM_NAMED = 16
OWN = {"target_modules", "modules_to_save", "peft_type", "inference_mode", "base_model_name_or_path"}
"""Config fields that are parameters here, or not a user's to set."""


def check_options(kind: type[PeftConfig], options: Mapping[str, Any]) -> set[str]:
    """Refuse options that a method does not have, and values of another type.

    Args:
        kind: The class of the method's config.
        options: Its fields; another type is refused too.

    Returns:
        The names of all fields.

    Raises:
        ConfigError: One of them is wrong.
    """
    if not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        allowed = f"fields of {kind.__name__} by name"
        raise ConfigError(
            key="options", value=options, allowed=allowed, remedies=["callbacks.peft_adapter.options={r: 8}"]
        )
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    hints = typing.get_type_hints(kind)
    for key, value in options.items():
        _check_option(kind, key, value, fields, hints)
    return fields


def _check_option(
    kind: type[PeftConfig], key: str, value: Any, fields: set[str], hints: Mapping[str, Any]
) -> None:
    if key in OWN:
        allowed = f"no option of that name: {key} is a parameter beside them, or set by PEFT"
        raise ConfigError(key=f"options.{key}", value=value, allowed=allowed)
    if key not in fields:
        allowed = f"a field of {kind.__name__}; {_nearest_field(key, kind, fields - OWN)}"
        raise ConfigError(key=f"options.{key}", value=value, allowed=allowed)
    wrong_flag = isinstance(value, bool) and hints[key] in (int, float)
    if wrong_flag or (not is_bearable(value, hints[key]) and not _is_whole(value, hints[key])):
        words = getattr(hints[key], "__name__", "") if isinstance(hints[key], type) else str(hints[key])
        raise ConfigError(key=f"options.{key}", value=value, allowed=words.replace("typing.", ""))
    if key in FACTORS and value == 0:
        allowed = "another number than 0: what is trained is multiplied by it"
        raise ConfigError(key=f"options.{key}", value=value, allowed=allowed)


def _nearest_field(key: str, kind: type[PeftConfig], fields: set[str]) -> str:
    """Name the closest field, or else first what this method itself has, in PEFT's order."""
    close = OTHER_WORDS.get(key, "")
    if close in fields:
        return f"did you mean {close!r}?"
    there = suggest_name(key, fields)
    own = [name for name in vars(kind)["__annotations__"] if name in fields]
    return there if there.startswith("did you mean") else f"there are: {', '.join(own[:NUM_NAMED])}, ..."


def _is_whole(value: Any, hint: Any) -> bool:
    """Accept 8 for 8.0."""
    return isinstance(value, int) and is_bearable(float(value), hint)


def sentence(error: Exception) -> str:
    """Return PEFT's own words as an end of ours."""
    return f"what {type(error).__name__} asks for: {' '.join(str(error).split())}"


def blamed(error: Exception, config: PeftConfig) -> ConfigError:
    """Return PEFT's refusal of a config as ours: of the option that it speaks of, or else of the layers."""
    text = str(error).lower()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in OWN or value == field.default or value is None:
            continue
        names = {field.name, field.name.rpartition("_")[2]}
        spoken = any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)
        if spoken or (isinstance(error, ZeroDivisionError) and value == 0):
            return ConfigError(key=f"options.{field.name}", value=value, allowed=sentence(error))
    return ConfigError(key="target_modules", value=words(config), allowed=sentence(error))


def words(config: PeftConfig) -> Any:
    """Return the targets of a config as they can be shown."""
    targets = getattr(config, "target_modules", None)
    return sorted(targets) if isinstance(targets, (set, list)) else targets
