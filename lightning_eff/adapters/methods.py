"""PEFT's methods: their names, their options, and what they cannot be combined with.

Method and options are checked as soon as they are set, before a model exists: the method's name, each
option's name and type, and values that PEFT's config classes reject.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from lightning_eff.core.arguments import accepts, describe
from lightning_eff.core.errors import ConfigError, suggest_name
from lightning_eff.core.technique import PLACES_STATE, Rule, Verdict

ALL_LINEAR = "all-linear"
Targets = str | Collection[str] | None

PROMPTS = ("p_tuning", "prefix_tuning", "prompt_tuning")
"""Methods that prepend virtual tokens to a Hugging Face model's inputs, in PEFT's wrapper around it."""
NEEDS_OWN_LOOP = (
    *("adaption_prompt", "cartridge", "cpt", "multitask_prompt_tuning", "poly", "shadow", "xlora"),
    *("frod", "unilora"),
)
"""Methods that need more than layers: arguments in each call, a wrapped model, or tensors outside layers."""
COMPILES_EXTENSION = ("boft",)
"""Methods whose layers compile a CUDA extension when they are created."""
NOT_LINEAR = ("ln_tuning", "trainable_tokens")
"""Methods for other layers than linear ones."""
FOR_QUANTIZED = (
    *("adalora", "beft", "fourierft", "gralora", "hira", "ia3", "lily", "lora", "oft", "pvera", "randlora"),
    *("road", "vera"),
)
"""Methods that leave the base weight to its layer, or dequantize it; others would read codes as values."""
IDENTITY_OPTIONS: dict[str, dict[str, Any]] = {"fourierft": {"init_weights": True}}
"""Defaults that differ from PEFT's, so that the first step starts from the unchanged model."""
LORA_VARIANTS = {"dora": "use_dora", "rslora": "use_rslora", "qalora": "use_qalora"}
"""Options of LoRA that papers name as methods."""
SCALES = ("lora_alpha", "alpha")
"""Options that multiply an adapter's output."""
OTHER_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
"""Other libraries' names of PEFT's options."""
ARGUMENTS = {"target_modules", "modules_to_save"}
"""Config fields that are parameters of `PeftAdapter`."""
RESERVED = ARGUMENTS | {"peft_type", "inference_mode", "base_model_name_or_path"}
"""Config fields that are not options: the arguments, and what PEFT sets itself."""
MAX_FIELDS_SHOWN = 16


def method_names() -> list[str]:
    """Return the supported methods, by PEFT's names.

    Example:
        >>> {"lora", "ia3", "vera", "oft", "loha", "lokr", "prefix_tuning"} <= set(method_names())
        True
    """
    known = {kind.value.lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    return sorted(known - {*NEEDS_OWN_LOOP, *COMPILES_EXTENSION})


def name_of_method(config: PeftConfig | None) -> str:
    """Return the name of a config's method, in lower case; empty without one."""
    return str(getattr(getattr(config, "peft_type", None), "value", "")).lower()


def method_error(config: PeftConfig, allowed: str, *remedies: str) -> ConfigError:
    """Return the error of a method that cannot be used with a model."""
    return ConfigError(key="method", value=name_of_method(config), allowed=allowed, remedies=remedies)


def config_class(method: str) -> type[PeftConfig]:
    """Return the class of a method's config.

    Raises:
        ConfigError: PEFT has no such method, or it is not supported here.
    """
    if method in method_names():
        return {kind.value.lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}[method]
    remedies: list[str] = []
    if method in NEEDS_OWN_LOOP:
        allowed = "a method that only changes layers; this one needs PEFT's own wrapper or training loop"
    elif method in COMPILES_EXTENSION:
        allowed = (
            "a method without compiled code: PEFT builds a CUDA extension for it, outside the run folder"
        )
        remedies = ["callbacks.peft_adapter.method=oft"]
    elif method in LORA_VARIANTS:
        allowed = f"one of PEFT's methods; {method} is an option of lora"
        option = f"callbacks.peft_adapter.options={{{LORA_VARIANTS[method]}: true}}"
        remedies = [f"callbacks.peft_adapter.method=lora {option}"]
    else:
        allowed = f"one of PEFT's methods; {suggest_name(method, method_names())}"
    raise ConfigError(key="method", value=method, allowed=allowed, remedies=remedies)


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
    kind = config_class(method)
    if not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        allowed = f"fields of {kind.__name__} by name"
        remedies = ["callbacks.peft_adapter.options={r: 8}"]
        raise ConfigError(key="options", value=options, allowed=allowed, remedies=remedies)
    fields = _check_options(kind, options)
    saved = [modules_to_save] if isinstance(modules_to_save, str) else modules_to_save
    arguments: dict[str, Any] = {"modules_to_save": list(saved)} if saved else {}
    if method not in PROMPTS:
        is_one = targets is None or isinstance(targets, str)
        arguments["target_modules"] = targets if is_one else list(targets or ())
    elif targets not in (None, ALL_LINEAR):
        allowed = f"null: {method} trains virtual tokens, which belong to no layer"
        raise ConfigError(key="target_modules", value=targets, allowed=allowed)
    if method == "ia3" and targets is not None and "feedforward_modules" not in options:
        arguments["feedforward_modules"] = []  # PEFT has defaults for Hugging Face architectures only
    for key, value in arguments.items():
        if key not in fields:
            raise ConfigError(key=key, value=value, allowed=f"null: {kind.__name__} has no such field")
    try:
        return kind(**arguments, **IDENTITY_OPTIONS.get(method, {}) | dict(options))
    except (ValueError, TypeError) as error:
        allowed = f"options that PEFT accepts; {upstream_message(error)}"
        raise ConfigError(key="options", value=dict(options), allowed=allowed) from error


def _check_options(kind: type[PeftConfig], options: Mapping[str, Any]) -> set[str]:
    """Check the names and the types of options of a method; return the names of all fields of its config."""
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    hints = typing.get_type_hints(kind)
    for key, value in options.items():
        if key in ARGUMENTS:
            allowed = f"no such option: pass {key} to PeftAdapter itself, not inside options"
        elif key in RESERVED:
            allowed = f"no such option: PEFT sets {key} itself"
        elif key not in fields:
            suggestion = suggest_name(key, fields - RESERVED)
            if OTHER_NAMES.get(key) in fields:
                suggestion = f"did you mean {OTHER_NAMES[key]!r}?"
            elif not suggestion.startswith("did you mean"):  # the method's own fields first, in PEFT's order
                own = [name for name in vars(kind)["__annotations__"] if name in fields - RESERVED]
                suggestion = f"it has: {', '.join(own[:MAX_FIELDS_SHOWN])}, ..."
            allowed = f"a field of {kind.__name__}; {suggestion}"
        else:
            if not accepts(hints[key], value):
                allowed = describe(hints[key])
            elif key in SCALES and value == 0:
                allowed = "a number other than 0: it multiplies the adapter's output"
            else:
                continue
        raise ConfigError(key=f"options.{key}", value=value, allowed=allowed)
    return fields


def upstream_message(error: Exception) -> str:
    """Return PEFT's message in one line, for the end of ours."""
    return f"PEFT rejects it: {' '.join(str(error).split())}"


def option_at_fault(error: Exception, config: PeftConfig) -> ConfigError:
    """Return PEFT's rejection of a config as an error of the option that it names, else of the targets."""
    text = str(error).lower()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in RESERVED or value == field.default or value is None:
            continue
        names = {field.name, field.name.rpartition("_")[2]}  # lora_dropout: PEFT's message has `dropout`
        is_named = any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)
        if is_named or (isinstance(error, ZeroDivisionError) and value == 0):
            allowed = f"a value that PEFT accepts; {upstream_message(error)}"
            return ConfigError(key=f"options.{field.name}", value=value, allowed=allowed)
    allowed = f"layers that PEFT can adapt; {upstream_message(error)}"
    return ConfigError(key="target_modules", value=shown_targets(config), allowed=allowed)


def shown_targets(config: PeftConfig) -> Any:
    """Return a config's target modules for a message, in order."""
    targets = getattr(config, "target_modules", None)
    return sorted(targets) if isinstance(targets, (set, list)) else targets


def method_rules(method: str) -> tuple[Rule, ...]:
    """Return what a method cannot be combined with, or only with a warning.

    Example:
        >>> [rule.name for rule in method_rules("adalora")][-1]
        'run/manual_optimization'
    """
    finetuning = Rule(
        name="lightning/BaseFinetuning",
        reason="it unfreezes layers that the adapters keep frozen",
        remedies=("remove it",),
    )
    reason = "the strategy writes checkpoints itself, and they include the frozen base"
    names = [rule.name for rule in PLACES_STATE if rule.name.startswith("lightning/")]  # ours omit it
    full_checkpoints = [Rule(name=name, reason=reason, verdict=Verdict.WARNED) for name in names]
    if method != "adalora":
        return (finetuning, *full_checkpoints)
    lora = "callbacks.peft_adapter.method=lora"
    reasons = {
        "run/scaler": ("ranks are allocated by gradients, which a scaler multiplies", "precision=auto"),
        "optimizer/in_backward": ("ranks are allocated by gradients, which it frees", "optimizer=adamw"),
        "strategy/deepspeed_zero": ("ranks are allocated by gradients, which it stores elsewhere", lora),
        "strategy/fsdp2": ("ranks are allocated by full tensors, which it shards", lora),
        "run/manual_optimization": ("ranks are allocated per optimizer step, which the module does", lora),
    }
    own = [Rule(name=name, reason=why, remedies=(remedy,)) for name, (why, remedy) in reasons.items()]
    return (finetuning, *full_checkpoints, *own)
