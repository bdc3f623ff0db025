"""Put PEFT's adapters around layers of any model, in place.

A layer that gets an adapter becomes the `base_layer` of a PEFT layer; all other names stay. The model itself
is not wrapped, so a LightningModule keeps its class. What PEFT does in its wrapper, or not at all, is done
here: a layer that a model has under two names is replaced under both, the fused path of PyTorch's encoder
layer, which bypasses adapters in evaluation, is switched off, and adapters of a model on the meta device keep
their initial values.

Why not `get_peft_model`: it renames each key of the model, and the PeftModel is no LightningModule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftType, PromptLearningConfig, get_peft_model
from peft.functional import cast_adapter_dtype
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from lightning_eff.adapters.methods import (
    FOR_QUANTIZED,
    RESERVED,
    method_error,
    name_of_method,
    option_at_fault,
    upstream_message,
)
from lightning_eff.adapters.module_tree import outermost
from lightning_eff.adapters.quantized import bitsandbytes_flag, is_quantized
from lightning_eff.adapters.targets import resolve_targets
from lightning_eff.core.errors import ConfigError

ADAPTER_NAME = "default"
"""PEFT's own name for the first adapter of a model."""
WRAPPERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost adapted layers, or the PeftModel around a part, by name."""
    return outermost(model, lambda _, module: isinstance(module, (BaseTunerLayer, PeftModel)))


def wrapped_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost adapted layers and `modules_to_save`, by name."""
    return outermost(model, lambda _, module: isinstance(module, WRAPPERS))


def peft_config_of(model: nn.Module) -> PeftConfig | None:
    """Return the config that a model's adapters were made with; None without adapters."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        wrapper = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
        configs = wrapper.peft_config if wrapper is not None else {}
    config = configs.get(ADAPTER_NAME)
    return config if isinstance(config, PeftConfig) else None


def inject_adapters(model: nn.Module, config: PeftConfig, *, upcast: bool) -> dict[str, nn.Module]:
    """Put adapters into a model, in place, and freeze all other parameters.

    Args:
        model: Any module; one that has these adapters already is left as it is.
        config: From `make_config`; a copy of it stays with the model, as `peft_config`.
        upcast: Keep adapters of half-precision layers in float32.

    Returns:
        The new layers by name; empty if the model had its adapters.

    Raises:
        ConfigError: No layer is targeted, or the method cannot adapt one, or the model has other adapters.
    """
    if adapted_layers(model):
        _reject_other_adapters(model, config)
        return {}
    config = dataclasses.replace(config)
    if isinstance(config, PromptLearningConfig):
        return _wrap_for_prompts(model, config)
    tuner_class = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(config.peft_type)]
    targets = resolve_targets(model, config, tuner_class)
    quantized = next((name for name, layer in targets.items() if is_quantized(layer)), None)
    if quantized is not None and name_of_method(config) not in FOR_QUANTIZED:
        allowed = f"a method for quantized layers such as {quantized}: {', '.join(FOR_QUANTIZED)}"
        raise method_error(config, allowed, "precision=frozen_bf16")
    with ignore_peft_warnings(), hidden_attributes(model), _prepared(model, targets.values()) as is_meta:
        try:
            tuner = tuner_class(model, config, adapter_name=ADAPTER_NAME)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise option_at_fault(error, config) from error
    outside = [
        n for n, _ in (*tuner.named_parameters(), *tuner.named_buffers()) if not n.startswith("model.")
    ]
    if outside:  # no optimizer and no checkpoint would include them
        allowed = f"a method whose tensors are all in layers; this one keeps {outside[0]} outside the model"
        raise method_error(config, allowed)
    # PEFT 0.21 gives the rank that AdaLoRA divides by a gradient if the layer is in float64.
    for rank in (p for name, p in model.named_parameters() if ".ranknum." in name):
        rank.requires_grad = False
    _replace_all_names(model)
    if upcast:
        cast_adapter_dtype(model, ADAPTER_NAME)
    layers = adapted_layers(model)
    if is_meta:
        _keep_initial_values(layers, config)
    return layers


@contextmanager
def ignore_peft_warnings() -> Generator[None]:
    """Ignore warnings about options that PEFT 0.21 corrects itself, and its calls of transformers 5.23."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


@contextmanager
def hidden_attributes(model: nn.Module) -> Generator[None]:
    """Hide attributes that PEFT reads as a Hugging Face model's: `config`, and Lightning's device mesh."""
    attributes = {} if isinstance(model, PreTrainedModel) else model.__dict__
    hidden = {name: attributes.pop(name) for name in ("config", "_device_mesh") if name in attributes}
    try:
        yield
    finally:
        attributes.update(hidden)


def _reject_other_adapters(model: nn.Module, config: PeftConfig) -> None:
    """Reject a config that differs from that of the model's adapters."""
    present = peft_config_of(model)
    if present is None or present.peft_type != config.peft_type:
        method = name_of_method(present) or "of an unknown method"
        allowed = f"a model without adapters; this one has some, {method}"
        raise method_error(config, allowed)
    # resolved per model, set by the run, or without effect on the layers
    ignored = {*RESERVED, "total_step", "rank_pattern", "feedforward_modules", "task_type", "peft_version"}
    wanted, existing = config.to_dict(), present.to_dict()
    for key in wanted:
        if key not in ignored and wanted[key] != existing.get(key):
            allowed = f"{existing.get(key)!r}, as in the adapters that the model has"
            raise ConfigError(key=f"options.{key}", value=wanted[key], allowed=allowed)


@contextmanager
def _prepared(model: nn.Module, layers: Iterable[nn.Module]) -> Generator[bool]:
    """Set what PEFT chooses its layers by: flags for quantized layers, and parameters with a device.

    PEFT creates an adapter on its layer's device. Parameters on the meta device are replaced by expanded NaN
    scalars, so that their adapters are real; an adapter that is computed from the weight gets NaN, by which
    `_keep_initial_values` finds it. Yields whether a parameter was on the meta device.
    """
    flags = {flag for layer in model.modules() if (flag := bitsandbytes_flag(layer)) is not None}
    new = [flag for flag in flags if not hasattr(model, flag)]
    for flag in new:  # as transformers sets them
        setattr(model, flag, True)
    held = [
        (module, name, parameter)
        for layer in layers
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, name, meta in held:
        scalar = torch.full((), math.nan, dtype=meta.dtype, device="cpu")
        setattr(module, name, nn.Parameter(scalar.expand(meta.shape), requires_grad=False))
    try:
        with torch.device("cpu") if held else torch.device(torch.get_default_device()):
            yield bool(held)
    finally:
        for module, name, meta in held:
            meta.requires_grad = getattr(module, name).requires_grad
            setattr(module, name, meta)
        for flag in new:
            delattr(model, flag)


def _keep_initial_values(layers: dict[str, nn.Module], config: PeftConfig) -> None:
    """Have adapters reset to the values that they have now when the model is materialized.

    Strategies materialize by `to_empty`, then `reset_parameters` of each module. PEFT's layers have no such
    method, and that of the `nn.Linear` in `lora_B`, which must begin as zero, draws random values.
    """
    for name, layer in layers.items():
        for path, module in layer.named_modules(prefix=name):
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            values = {key: tensor.detach().clone() for key, tensor in own if not tensor.is_meta}
            if any(bool(t.isnan().any()) for t in values.values() if t.is_floating_point()):
                allowed = f"a method whose initial values need no weights: {path} is on the meta device"
                raise method_error(config, allowed)
            if values:
                # a partial and no closure: a deep copy of the model copies its module too
                reset: Any = functools.partial(_reset, module, values)
                module.reset_parameters = reset


@torch.no_grad()
def _reset(module: nn.Module, values: dict[str, Tensor]) -> None:
    for key, value in values.items():
        tensor, full = getattr(module, key), value
        if isinstance(tensor, DTensor):  # a collective of all ranks of the mesh
            full = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
        tensor.copy_(full)
    module.__dict__.pop("reset_parameters", None)


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


def _wrap_for_prompts(model: nn.Module, config: PeftConfig) -> dict[str, nn.Module]:
    """Wrap the one Hugging Face model in a module in a PeftModel, which prepends virtual tokens."""
    found = list(outermost(model, lambda _, module: isinstance(module, PreTrainedModel)))
    if len(found) != 1 or not found[0]:
        allowed = "a method for any layers, for example lora; this one needs exactly one Hugging Face model"
        allowed += f" as a part, and found {len(found)}"
        raise method_error(config, allowed)
    if config.task_type is None:
        allowed = "a task, for example CAUSAL_LM: PEFT forms the inputs by it"
        remedy = "callbacks.peft_adapter.options={task_type: CAUSAL_LM, num_virtual_tokens: 8}"
        raise ConfigError(key="options.task_type", value=None, allowed=allowed, remedies=[remedy])
    model.requires_grad_(requires_grad=False)
    part: Any = model.get_submodule(found[0])
    try:
        with ignore_peft_warnings():
            wrapped = get_peft_model(part, config, adapter_name=ADAPTER_NAME)
    except (ValueError, TypeError, RuntimeError) as error:
        allowed = f"a method that fits the model; {upstream_message(error)}"
        raise method_error(config, allowed) from error
    parent, _, name = found[0].rpartition(".")
    setattr(model.get_submodule(parent), name, wrapped)
    return {found[0]: wrapped}
