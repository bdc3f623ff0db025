"""Put PEFT's adapters around layers of any model, in place.

A layer that gets an adapter becomes the `base_layer` of a PEFT layer; all other names stay. The model itself
is not wrapped, so a LightningModule keeps its class. What PEFT does in its wrapper, or not at all, is done
here: a layer that a model has under two names is replaced under both, and the fused path of PyTorch's encoder
layer, which bypasses adapters in evaluation, is switched off.

Why not `get_peft_model`: it renames each key of the model, and the PeftModel is no LightningModule. Its inner
part, the tuner, stays reachable as the model's `peft_tuner`: it merges adapters.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from peft import PeftConfig, PeftType
from peft.functional import cast_adapter_dtype
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from lightning_eff.adapters.lora_linear import add_in_place
from lightning_eff.adapters.methods import FOR_QUANTIZED, method_error, name_of_method, settings_of
from lightning_eff.adapters.module_tree import outermost
from lightning_eff.adapters.quantized import bitsandbytes_flag, is_quantized
from lightning_eff.adapters.targets import resolve_targets
from lightning_eff.core.errors import Remedy

ADAPTER_NAME = "default"
"""PEFT's own name for the first adapter of a model."""
TUNER = "peft_tuner"
"""Attribute of a model with adapters; in its `__dict__`, since PEFT's tuner has the model as a module."""
WRAPPERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)
PEFT_ERRORS = (ValueError, TypeError, RuntimeError, ZeroDivisionError)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost adapted layers, by name."""
    return outermost(model, lambda _, module: isinstance(module, BaseTunerLayer))


def wrapped_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost adapted layers and `modules_to_save`, by name."""
    return outermost(model, lambda _, module: isinstance(module, WRAPPERS))


def peft_config_of(model: nn.Module) -> PeftConfig | None:
    """Return the config that a model's adapters were made with; None without adapters."""
    configs = getattr(model, "peft_config", None)
    config = configs.get(ADAPTER_NAME) if isinstance(configs, dict) else None
    return config if isinstance(config, PeftConfig) else None


def inject_adapters(
    model: nn.Module, config: PeftConfig, *, upcast: bool, on_meta: bool = False
) -> dict[str, nn.Module]:
    """Put adapters into a model, in place, and freeze all other parameters.

    Args:
        model: Any module; one that has these adapters already is left as it is.
        config: From `make_config`; a copy of it stays with the model, as `peft_config`.
        upcast: Keep adapters of half-precision layers in float32.
        on_meta: Accept parameters on the meta device, whose layers can be inspected but not trained.

    Returns:
        The new layers by name; empty if the model had its adapters.

    Raises:
        ConfigError: No layer is targeted, or the method cannot adapt one, or the model has other adapters.
    """
    if adapted_layers(model):
        present = peft_config_of(model)
        if settings_of(present) != settings_of(config):
            there = name_of_method(present) or "an unknown method"
            raise method_error(config, f"a model without other adapters: this one has some, of {there}")
        return {}
    config = dataclasses.replace(config)
    valueless = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if valueless and not on_meta:
        # Materializing calls `reset_parameters`, which draws random values for lora_B, zero at the start.
        raise method_error(config, f"a model with values: {valueless[0]} is on the meta device")
    targets = resolve_targets(model, config)
    quantized = next((name for name, layer in targets.items() if is_quantized(layer)), None)
    if quantized is not None and name_of_method(config) not in FOR_QUANTIZED:
        allowed = f"a method for quantized layers such as {quantized}: {', '.join(FOR_QUANTIZED)}"
        frozen = Remedy("precision=frozen_bf16", 'QuantizedBase(quant_type="bf16")')
        raise method_error(config, allowed, frozen)
    try:
        with plain_module(model):
            tuner_class = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(config.peft_type)]
            tuner: BaseTuner = tuner_class(model, config, adapter_name=ADAPTER_NAME)
    except PEFT_ERRORS as error:
        reason = " ".join(str(error).split())
        raise method_error(config, f"a config that PEFT accepts; PEFT rejects it: {reason}") from error
    names = [name for name, _ in (*tuner.named_parameters(), *tuner.named_buffers())]
    outside = [name for name in names if not name.startswith("model.")]
    if outside:  # no optimizer and no checkpoint would include them
        raise method_error(config, f"a method whose tensors are all in layers, unlike {outside[0]}")
    _replace_all_names(model)
    add_in_place(model)
    if upcast:
        cast_adapter_dtype(model, ADAPTER_NAME)
    model.__dict__[TUNER] = tuner
    return adapted_layers(model)


@contextmanager
def ignore_peft_warnings() -> Generator[None]:
    """Ignore warnings about options that PEFT 0.21 corrects itself, and its calls of transformers 5.23."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


@contextmanager
def plain_module(model: nn.Module) -> Generator[None]:
    """Show PEFT a model without the attributes that it takes for a Hugging Face model's.

    Those are `config`, and Lightning's device mesh. The flags of quantized layers, by which PEFT chooses its
    own layers, are set as transformers sets them.
    """
    attributes = {} if isinstance(model, PreTrainedModel) else model.__dict__
    hidden = {name: attributes.pop(name) for name in ("config", "_device_mesh") if name in attributes}
    flags = {flag for layer in model.modules() if (flag := bitsandbytes_flag(layer)) is not None}
    new = [flag for flag in flags if not hasattr(model, flag)]
    for flag in new:
        setattr(model, flag, True)
    try:
        with ignore_peft_warnings():
            yield
    finally:
        for flag in new:
            delattr(model, flag)
        attributes.update(hidden)


def _replace_all_names(model: nn.Module) -> None:
    """Put an adapted layer under all names that the model has for it, and in the path of evaluation too."""
    new: dict[nn.Module, nn.Module] = {}
    for layer in wrapped_layers(model).values():
        inner = getattr(layer, "base_layer", getattr(layer, "original_module", None))
        if isinstance(inner, nn.Module):
            new[inner] = layer
    replace_modules(model, new)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and adapted_layers(module):
            # torch 2.13's fused inference path reads the base weights and calls no layer; 0 switches it off.
            module.activation_relu_or_gelu = 0


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules under all names that a model has for them, except inside of PEFT's wrappers."""
    for parent in list(model.modules()):
        for name, child in list(parent.__dict__["_modules"].items()):  # named_children skips second names
            if child in new and not isinstance(parent, WRAPPERS):
                setattr(parent, name, new[child])
