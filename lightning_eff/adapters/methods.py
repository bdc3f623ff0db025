"""PEFT's methods: which are supported, and their configs.

PEFT's config classes and layers check their values; here their errors become ours. Names and types of options
are checked as soon as they are set, before a model exists: PEFT would find a wrong type only in a layer.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from lightning_eff.core.arguments import check_value
from lightning_eff.core.errors import ConfigError, Remedy, suggest_name

ALL_LINEAR = "all-linear"
Targets = str | Collection[str] | None

CONFIGS = {kind.value.lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
"""PEFT's config class of each method."""
OWN_LOOP = "a method that only changes layers; this one needs PEFT's own wrapper or training loop"
UNSUPPORTED = {
    **dict.fromkeys(("adalora", "adaption_prompt", "cartridge", "cpt", "multitask_prompt_tuning"), OWN_LOOP),
    **dict.fromkeys(("p_tuning", "poly", "prefix_tuning", "prompt_tuning"), OWN_LOOP),
    **dict.fromkeys(("frod", "shadow", "unilora", "xlora"), OWN_LOOP),
    "boft": "a method without compiled code, for example oft: PEFT builds a CUDA extension for it",
}
"""Methods of PEFT that cannot be used here, and what is expected instead."""
NOT_LINEAR = ("ln_tuning", "trainable_tokens")
"""Methods for other layers than linear ones."""
FOR_QUANTIZED = (
    *("beft", "fourierft", "gralora", "hira", "ia3", "lily", "lora", "oft", "pvera", "randlora", "road"),
    "vera",
)
"""Methods that leave the base weight to its layer, or dequantize it; others would read codes as values."""
IDENTITY_OPTIONS: dict[str, dict[str, Any]] = {"fourierft": {"init_weights": True}}
"""Defaults that differ from PEFT's, so that the first step starts from the unchanged model."""
HEAD_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""Tasks for which PEFT's own wrapper trains the head too, which it finds by its name."""
ARGUMENTS = {"target_modules", "modules_to_save"}
"""Config fields that are parameters of `PeftAdapter`."""
RESERVED = ARGUMENTS | {"peft_type", "peft_version", "inference_mode", "base_model_name_or_path"}
"""Config fields that are not options: the arguments, and what PEFT sets itself."""
FREE_FIELDS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("exclude_modules", "feedforward_modules", "layers_pattern", "layers_to_transform", "modules_to_save"),
    *(
        "target_modules",
        "target_parameters",
        "rank_pattern",
    ),  # the keys and shapes of the state dict show them
    *("ephemeral_gpu_offload", "lora_dropout", "module_dropout", "rank_dropout", "runtime_config"),
}
"""Fields of a method's config that may change when training is resumed; so may those of initial values."""


def method_names() -> list[str]:
    """Return the supported methods, by PEFT's names."""
    return sorted(CONFIGS.keys() - UNSUPPORTED.keys())


def name_of_method(config: PeftConfig | None) -> str:
    """Return the name of a config's method, in lower case; empty without one."""
    return str(getattr(getattr(config, "peft_type", None), "value", "")).lower()


def settings_of(config: PeftConfig | None) -> dict[str, Any]:
    """Return the fields of a method's config that decide what its adapters compute, in plain types."""
    settings = {
        key: value
        for key, value in (config.to_dict() if config is not None else {}).items()
        if key not in FREE_FIELDS and not key.startswith("init")
        if isinstance(value, (str, int, float, bool, dict, list))
    }
    return json.loads(json.dumps(settings, default=str))  # enums and keys become strings


def method_error(config: PeftConfig, allowed: str, *remedies: Remedy) -> ConfigError:
    """Return the error of a method that cannot be used with a model."""
    return ConfigError(key="method", value=name_of_method(config), allowed=allowed, remedies=remedies)


def peft_rejects(error: Exception, key: str, value: object) -> ConfigError:
    """Return an error of PEFT's as one of the setting that led to it."""
    allowed = f"what PEFT accepts; PEFT rejects it: {' '.join(str(error).split())}"
    return ConfigError(key=key, value=value, allowed=allowed)


def make_config(
    method: str, options: Mapping[str, Any], targets: Targets, modules_to_save: Sequence[str] | None
) -> PeftConfig:
    """Make a method's config, by PEFT's names; `targets` and the rest are as in `PeftAdapter`.

    Raises:
        ConfigError: PEFT has no such method, or the method has no such option or value.

    Example:
        >>> make_config("lora", {"r": 4}, "all-linear", None).r
        4
        >>> make_config("lora", {"lora_alfa": 4}, "all-linear", None)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: options.lora_alfa=4: expected a field of LoraConfig; ...
    """
    if method not in method_names():
        allowed = f"one of PEFT's methods; {suggest_name(method, method_names())}"
        raise ConfigError(key="method", value=method, allowed=UNSUPPORTED.get(method, allowed))
    if targets is None and "target_parameters" not in options:
        raise ConfigError(key="target_modules", value=None, allowed="all-linear, or names of layers")
    kind = CONFIGS[method]
    _check_options(kind, options)
    saved = [modules_to_save] if isinstance(modules_to_save, str) else modules_to_save
    arguments: dict[str, Any] = {"modules_to_save": list(saved)} if saved else {}
    arguments["target_modules"] = targets if targets is None or isinstance(targets, str) else list(targets)
    if method == "ia3":
        arguments["feedforward_modules"] = []  # PEFT has defaults for Hugging Face architectures only
    try:
        return kind(**arguments | IDENTITY_OPTIONS.get(method, {}) | dict(options))
    except (ValueError, TypeError) as error:
        raise peft_rejects(error, "options", dict(options)) from error


def _check_options(kind: type[PeftConfig], options: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(kind) if field.init} - RESERVED
    hints = typing.get_type_hints(kind)
    for name, value in options.items():
        key = f"options.{name}"
        if name in ARGUMENTS:
            allowed = f"no such option: pass {name} to PeftAdapter itself, not inside options"
        elif name not in known:
            allowed = f"a field of {kind.__name__}; {suggest_name(name, known)}"
        elif name == "task_type" and value in HEAD_TASKS:
            allowed = "no task with a head: name the head that is to be trained in modules_to_save"
        elif name in ("lora_alpha", "alpha") and value == 0:
            allowed = "a number other than 0: it multiplies the adapter's output"
        else:
            check_value(key, value, hints[name])
            continue
        raise ConfigError(key, value, allowed=allowed)
