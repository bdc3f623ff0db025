"""PEFT's methods: their configs, and what they cannot be combined with.

PEFT's config classes and layers check their values; here their errors become ours. Names and types of options
are checked as soon as they are set, before a model exists: PEFT would find a wrong type only in a layer.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from lightning_eff.core.arguments import check_value
from lightning_eff.core.errors import ConfigError, suggest_name
from lightning_eff.core.technique import PLACES_STATE, Rule, Verdict

ALL_LINEAR = "all-linear"
Targets = str | Collection[str] | None

CONFIGS = {kind.value.lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
"""PEFT's config class of each method."""
OWN_LOOP = "a method that only changes layers; this one needs PEFT's own wrapper or training loop"
UNSUPPORTED = {
    **dict.fromkeys(("adaption_prompt", "cartridge", "cpt", "multitask_prompt_tuning", "poly"), OWN_LOOP),
    **dict.fromkeys(("frod", "shadow", "unilora", "xlora"), OWN_LOOP),
    "boft": "a method without compiled code, for example oft: PEFT builds a CUDA extension for it",
}
"""Methods of PEFT that cannot be used here, and what is expected instead."""
PROMPTS = ("p_tuning", "prefix_tuning", "prompt_tuning")
"""Methods that prepend virtual tokens to a Hugging Face model's inputs, in PEFT's wrapper around it."""
NOT_LINEAR = ("ln_tuning", "trainable_tokens")
"""Methods for other layers than linear ones."""
FOR_QUANTIZED = (
    *("adalora", "beft", "fourierft", "gralora", "hira", "ia3", "lily", "lora", "oft", "pvera", "randlora"),
    *("road", "vera"),
)
"""Methods that leave the base weight to its layer, or dequantize it; others would read codes as values."""
IDENTITY_OPTIONS: dict[str, dict[str, Any]] = {"fourierft": {"init_weights": True}}
"""Defaults that differ from PEFT's, so that the first step starts from the unchanged model."""
ARGUMENTS = {"target_modules", "modules_to_save"}
"""Config fields that are parameters of `PeftAdapter`."""
RESERVED = ARGUMENTS | {"peft_type", "peft_version", "inference_mode", "base_model_name_or_path"}
"""Config fields that are not options: the arguments, and what PEFT sets itself."""


def method_names() -> list[str]:
    """Return the supported methods, by PEFT's names.

    Example:
        >>> {"lora", "ia3", "vera", "oft", "loha", "lokr", "prefix_tuning"} <= set(method_names())
        True
    """
    return sorted(CONFIGS.keys() - UNSUPPORTED.keys())


def name_of_method(config: PeftConfig | None) -> str:
    """Return the name of a config's method, in lower case; empty without one."""
    return str(getattr(getattr(config, "peft_type", None), "value", "")).lower()


def method_error(config: PeftConfig, allowed: str, *remedies: str) -> ConfigError:
    """Return the error of a method that cannot be used with a model."""
    return ConfigError(key="method", value=name_of_method(config), allowed=allowed, remedies=remedies)


def make_config(
    method: str, options: Mapping[str, Any], targets: Targets, modules_to_save: Sequence[str] | None
) -> PeftConfig:
    """Make a method's config.

    Args:
        method: PEFT's name of it, in lower case.
        options: Fields of the method's config, by PEFT's names.
        targets: Names of layers or the ends of names, a regular expression for full names, `all-linear`, or
            None for PEFT's choice for a Hugging Face architecture.
        modules_to_save: Names, or ends of names, of modules that are trained in full.

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
    kind = CONFIGS[method]
    fields = _check_options(kind, options)
    saved = [modules_to_save] if isinstance(modules_to_save, str) else modules_to_save
    arguments: dict[str, Any] = {"modules_to_save": list(saved)} if saved else {}
    if method not in PROMPTS or targets not in (None, ALL_LINEAR):
        is_one = targets is None or isinstance(targets, str)
        arguments["target_modules"] = targets if is_one else list(targets or ())
    if method == "ia3" and targets is not None and "feedforward_modules" not in options:
        arguments["feedforward_modules"] = []  # PEFT has defaults for Hugging Face architectures only
    for key, value in arguments.items():
        if key not in fields:
            raise ConfigError(key=key, value=value, allowed=f"null: {kind.__name__} has no such field")
    try:
        return kind(**arguments, **IDENTITY_OPTIONS.get(method, {}) | dict(options))
    except (ValueError, TypeError) as error:
        raise peft_rejects(error, "options", dict(options)) from error


def _check_options(kind: type[PeftConfig], options: Mapping[str, Any]) -> set[str]:
    """Check the names and the types of a method's options; return the names of its config's fields."""
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    hints = typing.get_type_hints(kind)
    for name, value in options.items():
        key = f"options.{name}"
        if name in ARGUMENTS:
            allowed = f"no such option: pass {name} to PeftAdapter itself, not inside options"
        elif name not in fields - RESERVED:
            allowed = f"a field of {kind.__name__}; {suggest_name(name, fields - RESERVED)}"
        elif name in ("lora_alpha", "alpha") and value == 0:
            allowed = "a number other than 0: it multiplies the adapter's output"
        else:
            check_value(key, value, hints[name])
            continue
        raise ConfigError(key, value, allowed=allowed)
    return fields


def peft_rejects(error: Exception, key: str, value: object) -> ConfigError:
    """Return an error of PEFT's as one of the setting that led to it."""
    allowed = f"what PEFT accepts; PEFT rejects it: {' '.join(str(error).split())}"
    return ConfigError(key=key, value=value, allowed=allowed)


def peft_rejects_config(config: PeftConfig, error: Exception) -> ConfigError:
    """Return an error of PEFT's layers as one of a config's options, or without any of its targets."""
    given = {
        field.name: value
        for field in dataclasses.fields(config)
        if field.name not in RESERVED and field.default is not dataclasses.MISSING
        if (value := getattr(config, field.name)) != field.default
    }
    targets = getattr(config, "target_modules", None)
    shown = sorted(targets) if isinstance(targets, (set, list)) else targets
    return peft_rejects(error, "options", given) if given else peft_rejects(error, "target_modules", shown)


def method_rules(method: str) -> tuple[Rule, ...]:
    """Return what a method cannot be combined with, or only with a warning.

    Example:
        >>> [rule.name for rule in method_rules("adalora")][-1]
        'run/manual_optimization'
    """
    reason = "it unfreezes layers that the adapters keep frozen"
    finetuning = Rule(name="lightning/BaseFinetuning", reason=reason, remedies=("remove it",))
    reason = "the strategy writes checkpoints itself, and they include the frozen base"
    names = [rule.name for rule in PLACES_STATE if rule.name.startswith("lightning/")]  # ours omit it
    full_checkpoints = [Rule(name=name, reason=reason, verdict=Verdict.WARNED) for name in names]
    lora = "callbacks.peft_adapter.method=lora"
    reasons = {
        "run/scaler": ("ranks are allocated by gradients, which a scaler multiplies", "precision=auto"),
        "optimizer/in_backward": ("ranks are allocated by gradients, which it frees", "optimizer=adamw"),
        "strategy/deepspeed_zero": ("ranks are allocated by gradients, which it stores elsewhere", lora),
        "strategy/fsdp2": ("ranks are allocated by full tensors, which it shards", lora),
        "run/manual_optimization": ("ranks are allocated per optimizer step, which the module does", lora),
    }
    own = [Rule(name=name, reason=why, remedies=(remedy,)) for name, (why, remedy) in reasons.items()]
    return (finetuning, *full_checkpoints, *(own if method == "adalora" else ()))
