"""Put PEFT's adapters around layers of any model, in place, with PEFT's configs, targets and tuner.

`callbacks/peft_adapter` calls `make_config` and `inject_adapters`. A layer that gets an adapter becomes the
`base_layer` of a PEFT layer; all other names stay the same. The model itself is not wrapped, so a
LightningModule keeps its class. An error of PEFT is reported with PEFT's text and the setting at fault. If
PEFT would adapt a model wrongly or without effect, the model is rejected before any change.

Unlike in PEFT, a layer that a model has under two names is replaced under both names. The fused inference
path of PyTorch's encoder layer, which bypasses adapters, is switched off.

Why not `get_peft_model`: this function renames every key of the model, and a PeftModel is not a
LightningModule. PEFT's tuner, which merges adapters, is kept as the model's attribute `peft_tuner`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftType, PromptLearningConfig
from peft.functional import cast_adapter_dtype
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_eff.adapters.layers import (
    bitsandbytes_flag,
    check_module_names,
    is_quantized,
    outermost,
    tied_parameters,
)
from lightning_eff.adapters.lora_linear import add_in_place
from lightning_eff.core.arguments import check_value
from lightning_eff.core.errors import ConfigError, Remedy, suggest_name

ALL_LINEAR = "all-linear"
Targets = str | Collection[str] | None

OWN_LOOP = {"adalora", "adaption_prompt", "boft", "frod", "poly", "shadow", "unilora", "xlora"}
"""Methods that need PEFT's own wrapper or training loop; `boft` needs a CUDA extension."""
CONFIGS = {
    kind.value.lower(): config
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if kind.value.lower() not in OWN_LOOP and not issubclass(config, PromptLearningConfig)
}
"""For each method that only changes layers: PEFT's config class."""
NOT_LINEAR = ("ln_tuning", "trainable_tokens")
"""Methods that adapt layers other than linear layers."""
FOR_QUANTIZED = (
    *("beft", "fourierft", "gralora", "hira", "ia3", "lily", "lora", "oft", "pvera", "randlora", "road"),
    "vera",
)
"""Methods that dequantize the base weight or ignore it; other methods would read the codes as weights."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ADAPTED_CONVOLUTIONS: dict[str, tuple[tuple[type[nn.Module], ...], set[str]]] = {
    "lora": (CONVOLUTIONS, {"kernel_size", "padding"}),
    "hira": (CONVOLUTIONS, {"kernel_size", "padding", "dilation"}),
    "loha": ((nn.Conv1d, nn.Conv2d), {"kernel_size", "padding", "dilation", "groups"}),
    "lokr": ((nn.Conv1d, nn.Conv2d), {"kernel_size", "padding", "dilation", "groups"}),
    "ia3": ((nn.Conv2d, nn.Conv3d), {"kernel_size", "padding", "dilation", "groups", "padding_mode"}),
    "hra": ((nn.Conv2d,), {"kernel_size"}),
    "oft": ((nn.Conv2d,), {"padding"}),
}
"""For each method, the convolutions that PEFT 0.21 adapts, and the settings that PEFT handles correctly.

PEFT's LoRA ignores dilation and `padding_mode`, so the adapter would read different pixels than the base
layer. PEFT cannot merge the LoRA of a convolution with groups. OFT rotates the wrong axes of a kernel larger
than 1, and so changes the model's output at the start. Methods that are not listed adapt no convolutions.
`ln_tuning` needs no entry, because it trains all targeted layers in full.
"""
DEFAULTS: dict[str, dict[str, Any]] = {
    "fourierft": {"init_weights": True},  # so that the adapter changes nothing at first
    "ia3": {"feedforward_modules": []},  # PEFT has defaults only for Hugging Face architectures
}
"""Defaults that differ from PEFT's."""
HEAD_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""Tasks whose head is trained only by PEFT's own wrapper."""
ARGUMENTS = {"target_modules", "modules_to_save"}
"""Config fields that are parameters of `PeftAdapter`."""
RESERVED = ARGUMENTS | {"peft_type", "peft_version", "inference_mode", "base_model_name_or_path"}
"""Config fields that are not options: parameters of `PeftAdapter`, and fields that PEFT sets itself."""
FREE_FIELDS = RESERVED - {"peft_type"} | {
    *("auto_mapping", "revision", "task_type", "runtime_config", "ephemeral_gpu_offload"),
    *("lora_dropout", "module_dropout", "rank_dropout"),
    "fan_in_fan_out",  # PEFT sets this field to fit the layers
    # A change of these fields is visible in the keys and shapes of the state dict.
    *("exclude_modules", "feedforward_modules", "layers_pattern", "layers_to_transform"),
    *("target_parameters", "rank_pattern"),
}
"""Fields of a method's config that may differ in a resumed run."""
ADAPTER_NAME = "default"
"""PEFT's own name for the first adapter of a model."""
TUNER = "peft_tuner"
"""Key of PEFT's tuner in the model's `__dict__`; as a submodule, the tuner would contain its own parent."""
WRAPPERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)
PEFT_ERRORS = (ValueError, TypeError, RuntimeError, ZeroDivisionError)


def make_config(
    method: str, options: Mapping[str, Any], targets: Targets, modules_to_save: Sequence[str] | None
) -> PeftConfig:
    """Build a method's config; the arguments are as in `PeftAdapter`.

    Raises:
        ConfigError: PEFT has no method of this name, or an option or its value does not fit the method.

    Example:
        >>> make_config("lora", {"r": 4}, "all-linear", None).r
        4
        >>> make_config("lora", {"lora_alfa": 4}, "all-linear", None)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: options.lora_alfa=4: expected a field of LoraConfig; ...
    """
    if method not in CONFIGS:
        allowed = f"one of PEFT's methods that only change layers; {suggest_name(method, CONFIGS)}"
        raise ConfigError(key="method", value=method, allowed=allowed)
    if targets is None and "target_parameters" not in options:
        raise ConfigError(key="target_modules", value=None, allowed="all-linear, or names of layers")
    kind = CONFIGS[method]
    _check_options(kind, options)
    saved = [modules_to_save] if isinstance(modules_to_save, str) else modules_to_save
    arguments: dict[str, Any] = {"modules_to_save": list(saved)} if saved else {}
    arguments["target_modules"] = targets if targets is None or isinstance(targets, str) else list(targets)
    # The user's options come last, so that they override the defaults.
    try:
        return kind(**arguments | DEFAULTS.get(method, {}) | dict(options))
    except (ValueError, TypeError) as error:
        raise peft_rejects(error, "options", dict(options)) from error


def _check_options(kind: type[PeftConfig], options: Mapping[str, Any]) -> None:
    """Check names and types of options now, because PEFT reports a wrong type only when it builds a layer."""
    known = {field.name for field in dataclasses.fields(kind) if field.init} - RESERVED
    hints = typing.get_type_hints(kind)
    for name, value in options.items():
        key = f"options.{name}"
        if name in ARGUMENTS:
            allowed = f"no such option: pass {name} to PeftAdapter itself, not inside options"
        elif name not in known:
            allowed = f"a field of {kind.__name__}; {suggest_name(name, known)}"
        elif name == "task_type" and value in HEAD_TASKS:
            allowed = "no task with a head: name the head to train in modules_to_save"
        elif name in ("lora_alpha", "alpha") and value == 0:
            allowed = "a number other than 0: it multiplies the adapter's output"
        else:
            check_value(key, value, hints[name])
            continue
        raise ConfigError(key, value, allowed=allowed)


def name_of_method(config: PeftConfig | None) -> str:
    """Return the name of a config's method in lower case; return an empty text if there is no config."""
    return str(getattr(getattr(config, "peft_type", None), "value", "")).lower()


def settings_of(config: PeftConfig | None) -> dict[str, Any]:
    """Return the fields of a config that decide what its adapters compute, in plain types."""
    settings = {
        key: value
        for key, value in (config.to_dict() if config is not None else {}).items()
        if key not in FREE_FIELDS and not key.startswith("init")
        if isinstance(value, (str, int, float, bool, dict, list))
    }
    return json.loads(json.dumps(settings, default=str))  # enums and keys become strings


def method_error(config: PeftConfig, allowed: str, *remedies: Remedy) -> ConfigError:
    """Return an error about a method that does not suit a model."""
    return ConfigError(key="method", value=name_of_method(config), allowed=allowed, remedies=remedies)


def peft_rejects(error: Exception, key: str, value: object) -> ConfigError:
    """Turn an error of PEFT into a ConfigError that names the setting at fault."""
    allowed = f"what PEFT accepts; PEFT rejects it: {' '.join(str(error).split())}"
    return ConfigError(key=key, value=value, allowed=allowed)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost adapted layers, by name."""
    return outermost(model, lambda module: isinstance(module, BaseTunerLayer))


def wrapped_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost adapted layers and `modules_to_save`, by name."""
    return outermost(model, lambda module: isinstance(module, WRAPPERS))


def peft_config_of(model: nn.Module) -> PeftConfig | None:
    """Return the config of a model's adapters; None if the model has no adapters."""
    configs = getattr(model, "peft_config", None)
    config = configs.get(ADAPTER_NAME) if isinstance(configs, dict) else None
    return config if isinstance(config, PeftConfig) else None


def inject_adapters(
    model: nn.Module, config: PeftConfig, *, upcast: bool, on_meta: bool = False
) -> dict[str, nn.Module]:
    """Put adapters into a model, in place, and freeze all other parameters.

    Args:
        model: Any module; a module that has these adapters already is left unchanged.
        config: The result of `make_config`; the model keeps a copy as `peft_config`.
        upcast: Keep adapters of half-precision layers in float32.
        on_meta: Accept parameters on the meta device, whose layers can be inspected but not trained.

    Returns:
        The new layers by name; empty if the model already had these adapters.

    Raises:
        ConfigError: No layer is targeted, the method cannot adapt a layer, or the model has other adapters.
    """
    if adapted_layers(model):
        present = peft_config_of(model)
        # With the same settings a second call does nothing, since a Trainer may set up a model repeatedly.
        if settings_of(present) != settings_of(config):
            there = name_of_method(present) or "an unknown method"
            raise method_error(config, f"a model without other adapters: this one has {there}")
        return {}
    # Use a copy, because PEFT changes the config, for example the targets.
    config = dataclasses.replace(config)
    _check_model(model, config, on_meta=on_meta)
    try:
        with plain_module(model):
            # The tuner's constructor replaces layers of the model, and freezes all other parameters.
            tuner_class = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(config.peft_type)]
            tuner: BaseTuner = tuner_class(model, config, adapter_name=ADAPTER_NAME)
    except PEFT_ERRORS as error:
        raise peft_rejects(error, "method", name_of_method(config)) from error
    names = [name for name, _ in (*tuner.named_parameters(), *tuner.named_buffers())]
    outside = [name for name in names if not name.startswith("model.")]
    if outside:  # tensors of the tuner itself: neither optimizer nor checkpoint would include them
        raise method_error(config, f"a method whose tensors are all in layers, unlike {outside[0]}")
    # PEFT has replaced layers under their first names only.
    _replace_all_names(model)
    add_in_place(model)
    if upcast:
        cast_adapter_dtype(model, ADAPTER_NAME)
    model.__dict__[TUNER] = tuner
    return adapted_layers(model)


def _check_model(model: nn.Module, config: PeftConfig, *, on_meta: bool) -> None:
    """Reject models that PEFT would adapt wrongly or without effect; resolve `all-linear` to layers."""
    fields: Any = config
    for name, parameter in model.named_parameters():
        # A later materialization calls `reset_parameters`, which draws random values for lora_B, not zeros.
        if isinstance(parameter, UninitializedParameter) or (parameter.is_meta and not on_meta):
            where = "lazy" if isinstance(parameter, UninitializedParameter) else "on the meta device"
            raise method_error(config, f"a model with values: {name} is {where}")
    modules = {name: module for name, module in model.named_modules() if name}
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        names = getattr(config, key, None) or ()
        if not isinstance(names, str):  # PEFT ignores a name without a layer if another name fits
            check_module_names(key if key in ARGUMENTS else f"options.{key}", names, modules)
    _reject_word_ends(modules, config)
    if str(fields.target_modules).lower() == ALL_LINEAR:  # case-insensitive, as in PEFT
        fields.target_modules = exact_targets(_all_linear(model, config), model)
    try:
        layers = {name: m for name, m in modules.items() if check_target_module_exists(config, name)}
    except re.error as error:
        raise peft_rejects(error, "target_modules", fields.target_modules) from error
    _reject_tied_copies(model, config)
    for name, layer in layers.items():
        if is_quantized(layer) and name_of_method(config) not in FOR_QUANTIZED:
            allowed = f"a method for quantized layers such as {name}: {', '.join(FOR_QUANTIZED)}"
            frozen = Remedy("precision=frozen_bf16", 'QuantizedBase(quant_type="bf16")')
            raise method_error(config, allowed, frozen)
        _check_convolution(name, layer, name_of_method(config))


def _reject_word_ends(modules: Collection[str], config: Any) -> None:
    """Reject names that end another word: for `head`, PEFT would also train a copy of `lm_head`."""
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    for name in modules:
        if name.endswith(saved) and not f".{name}".endswith(tuple(f".{end}" for end in saved)):
            allowed = f"names that PEFT does not mistake for the end of {name}"
            remedies = ["longer names, with the names of the parent modules", f"{name} in the list too"]
            raise ConfigError(key="modules_to_save", value=list(saved), allowed=allowed, remedies=remedies)


def _all_linear(model: nn.Module, config: PeftConfig) -> list[str]:
    """Return all linear layers, except heads of Hugging Face models and layers that are never called.

    PEFT itself looks for a head only if the outermost module is a Hugging Face model.
    """
    heads = {part.get_output_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)}
    names = [
        name
        for name, layer in model.named_modules()
        if name
        and isinstance(layer, (nn.Linear, Conv1D))
        # `out_proj` of nn.MultiheadAttention has this class: its weight is used, but the layer is never
        # called
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
        and layer not in heads
    ]
    method = name_of_method(config)
    if not names or method in NOT_LINEAR:
        reason = f"{method} is not for linear layers" if names else f"{type(model).__name__} has none"
        allowed = f"names of layers instead of all linear ones: {reason}"
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=allowed)
    return names


def exact_targets(names: Collection[str], model: nn.Module) -> str | set[str]:
    """Return targets that match only these layers; in PEFT, `proj` would also match `stem.proj`.

    Example:
        >>> stem = nn.ModuleDict({"proj": nn.Conv1d(1, 1, 1)})
        >>> model = nn.ModuleDict({"proj": nn.Linear(1, 1), "stem": stem})
        >>> exact_targets(["proj"], model), exact_targets(["stem.proj"], model)
        ('(?:proj)', {'stem.proj'})
    """
    others = [name for name, _ in model.named_modules() if name not in names]
    # PEFT compares a pattern with full names, but the entries of a list also with the ends of names.
    if any(other.endswith(f".{name}") for other in others for name in names):
        return f"(?:{'|'.join(map(re.escape, sorted(names)))})"
    return set(names)


def _check_convolution(name: str, layer: nn.Module, method: str) -> None:
    """Reject a targeted convolution that PEFT would adapt wrongly, or would fail to adapt."""
    if not isinstance(layer, CONVOLUTIONS) or method == "ln_tuning":
        return
    unusual = {
        "padding_mode": layer.padding_mode != "zeros",
        "padding": isinstance(layer.padding, str),
        "dilation": max(layer.dilation) > 1,
        "groups": layer.groups > 1,
        "kernel_size": max(layer.kernel_size) > 1,
    }
    kinds, respected = ADAPTED_CONVOLUTIONS.get(method, ((), set[str]()))
    wrong = [key for key, is_set in unusual.items() if is_set and key not in respected]
    if wrong or not isinstance(layer, kinds):
        setting = f" with {wrong[0]}={getattr(layer, wrong[0])!r}" if isinstance(layer, kinds) else ""
        kind = type(layer).__name__
        allowed = f"layers that PEFT's {method} adapts correctly: {name} is a {kind}{setting}"
        remedies = [f"{name} in modules_to_save, to train it in full", "another method"]
        raise ConfigError(key="target_modules", value=name, allowed=allowed, remedies=remedies)


def _reject_tied_copies(model: nn.Module, config: Any) -> None:
    """Reject `modules_to_save` and trained tokens whose weight is tied, since only a copy would be trained.

    If the outermost module is a Hugging Face model, PEFT itself ties trained tokens. With
    `ensure_weight_tying`, PEFT also ties `modules_to_save` of a Hugging Face model.
    """
    is_hugging_face = isinstance(model, PreTrainedModel)
    is_tied_by_peft = is_hugging_face and getattr(config, "ensure_weight_tying", False)
    saved = () if is_tied_by_peft else getattr(config, "modules_to_save", None) or ()
    tokens = getattr(config, "trainable_token_indices", None)
    trains_tokens = bool(tokens) or name_of_method(config) == "trainable_tokens"
    for name, module in model.named_modules():
        # PEFT trains a copy of a module in `modules_to_save`, and the copy's weight is no longer tied.
        is_copied = any(f".{name}".endswith(f".{end}") for end in saved)
        is_token_table = trains_tokens and not is_hugging_face and isinstance(module, nn.Embedding)
        tied = tied_parameters(model, module) if is_copied or is_token_table else {}
        for key, tied_to in tied.items():
            allowed = f"untied modules: {name}.{key} is tied to {tied_to}, and only a copy would be trained"
            untied = Remedy(
                "model.tie_word_embeddings=false, or two weights in your own model",
                "tie_word_embeddings=False of the model, or two weights in your own model",
            )
            adapted = f"{name} in target_modules: an adapter leaves the tied weight unchanged"
            setting = "modules_to_save" if is_copied else "options.trainable_token_indices"
            raise ConfigError(key=setting, value=name, allowed=allowed, remedies=[adapted, untied])


@contextmanager
def plain_module(model: nn.Module) -> Generator[None]:
    """Let PEFT treat a model as a plain module, until the context ends.

    PEFT mistakes a model with an attribute `config`, or with Lightning's device mesh, for a Hugging Face
    model, so the two attributes are hidden. The model gets the flags of quantized layers, because PEFT
    chooses its layer classes by these flags. Warnings about options that PEFT 0.21 corrects, and about PEFT's
    calls of transformers, are ignored.
    """
    attributes = {} if isinstance(model, PreTrainedModel) else model.__dict__
    hidden = {name: attributes.pop(name) for name in ("config", "_device_mesh") if name in attributes}
    # PEFT reads these flags from the model, where transformers sets them.
    flags = {flag for layer in model.modules() if (flag := bitsandbytes_flag(layer)) is not None}
    new = [flag for flag in flags if not hasattr(model, flag)]
    for flag in new:
        setattr(model, flag, True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            yield
    finally:
        for flag in new:
            delattr(model, flag)
        attributes.update(hidden)


def _replace_all_names(model: nn.Module) -> None:
    """Put adapted layers under all their names in the model, and make evaluation call these layers."""
    new: dict[nn.Module, nn.Module] = {}
    for layer in wrapped_layers(model).values():
        inner = getattr(layer, "base_layer", getattr(layer, "original_module", None))
        if isinstance(inner, nn.Module):
            new[inner] = layer
    replace_modules(model, new)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and adapted_layers(module):
            # torch 2.13's fused inference path reads the base weights and calls no layers; 0 disables the
            # path.
            module.activation_relu_or_gelu = 0


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules under all their names in a model, except inside PEFT's wrappers."""
    for parent in list(model.modules()):
        for name, child in list(parent.__dict__["_modules"].items()):  # named_children skips second names
            if child in new and not isinstance(parent, WRAPPERS):
                setattr(parent, name, new[child])
