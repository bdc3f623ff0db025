"""PEFT's adapters in any model: a method by name with its own options, put in place around layers.

A layer that gets an adapter becomes the `base_layer` of one of PEFT's; all other names stay. The model itself
is not wrapped, so a LightningModule remains the user's class. What PEFT leaves to its own wrapper is done
here: targets that match nothing are refused one by one, a layer that a model holds under two names is
replaced under both, PyTorch's fused encoder layer, which would go around adapters in evaluation, is switched
off where there are some, and adapters of a model on the meta device get their initial values all the same.

Why not `get_peft_model`: it renames every key of the model, and its model is no LightningModule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Generator, Iterable
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

from lightning_eff.adapters.methods import QUANTIZED, resolve
from lightning_eff.adapters.options import OWN, blamed, sentence
from lightning_eff.adapters.quantized import is_quantized, mark_of
from lightning_eff.core.errors import ConfigError

ADAPTER = "default"
"""PEFT's own name for the first adapter of a model."""


def of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model that are adapters or have some, outermost, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        if not inside and _has_adapters(module):
            found[name] = module
    return found


def wrapped(model: nn.Module) -> dict[str, nn.Module]:
    """Return what adapters were put around, and modules that are trained themselves, outermost, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        kinds: tuple[type, ...] = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        if not inside and isinstance(module, kinds):
            found[name] = module
    return found


def _has_adapters(module: nn.Module) -> bool:
    return isinstance(module, (BaseTunerLayer, PeftModel))


def config_of(model: nn.Module) -> PeftConfig | None:
    """Return the config that a model's adapters were made with; None without any."""
    there = getattr(model, "peft_config", None)
    wrapped = next((m for m in model.modules() if isinstance(m, PeftModel)), None)
    known = there if isinstance(there, dict) else wrapped.peft_config if wrapped is not None else {}
    present = known.get(ADAPTER)
    return present if isinstance(present, PeftConfig) else None


def inject(model: nn.Module, config: PeftConfig, *, upcast: bool) -> dict[str, nn.Module]:
    """Put adapters into a model, in place, and freeze all else.

    Args:
        model: Any module; one that has these adapters already is left as it is.
        config: From `configure`; a copy of it stays with the model, as `peft_config`.
        upcast: Keep adapters of half-precision layers in float32.

    Returns:
        The new layers by name; empty where there was nothing to do.

    Raises:
        ConfigError: No layer is meant, or one that the method cannot adapt, or the model has other adapters.
    """
    if of(model):
        _refuse_others(model, config)
        return {}
    config = dataclasses.replace(config)
    if isinstance(config, PromptLearningConfig):
        return _prompt(model, config)
    if config.peft_type is None:
        text = "a config without a method"
        raise TypeError(text)
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(config.peft_type)]
    meant = resolve(model, config, tuner)
    _refuse_codes(meant, config)
    with without_noise(), as_any_module(model), _marked(model), _stand_ins(meant.values()) as absent:
        try:
            made = tuner(model, config, adapter_name=ADAPTER)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise blamed(error, config) from error
    _refuse_state_outside(made, config)
    adapted = of(model)
    _freeze_divisors(model, config)
    _replace_everywhere(model)
    if upcast:
        cast_adapter_dtype(model, ADAPTER)
    if absent:
        _keep_initial_values(adapted, config)
    return adapted


def _freeze_divisors(model: nn.Module, config: PeftConfig) -> None:
    """Have AdaLoRA divide by the rank; PEFT 0.21 trains it where a layer is in float64, say."""
    for name, parameter in model.named_parameters():
        if config.peft_type == PeftType.ADALORA and ".ranknum." in name:
            parameter.requires_grad = False


def _refuse_others(model: nn.Module, config: PeftConfig) -> None:
    """Refuse to put other adapters into a model than those that it has."""
    present = config_of(model)
    skipped = {*OWN, "total_step", "rank_pattern", "feedforward_modules", "task_type", "peft_version"}
    if present is not None and present.peft_type == config.peft_type:
        ours, theirs = config.to_dict(), present.to_dict()
        other = [key for key in ours if key not in skipped and ours[key] != theirs.get(key)]
        if not other:
            return
        raise ConfigError(
            key=f"options.{other[0]}",
            value=ours[other[0]],
            allowed=f"{theirs.get(other[0])!r}, with which the model is adapted already",
        )
    has = getattr(present, "peft_type", None)
    has = getattr(has, "value", "made by something else").lower()
    value = getattr(config.peft_type, "value", "").lower()
    raise ConfigError(key="method", value=value, allowed=f"a model without adapters; it has some, {has}")


def _refuse_codes(meant: dict[str, nn.Module], config: PeftConfig) -> None:
    """Refuse a method that computes with weights as they lie there, which are codes in a quantized layer."""
    method = getattr(config.peft_type, "value", "").lower()
    low = [name for name, layer in meant.items() if is_quantized(layer)]
    if low and method not in QUANTIZED:
        allowed = f"a method for quantized layers, such as {low[0]}: {', '.join(QUANTIZED)}"
        raise ConfigError(key="method", value=method, allowed=allowed, remedies=["precision=frozen_bf16"])


@contextmanager
def without_noise() -> Generator[None]:
    """Leave out what PEFT 0.21 says about what it sets right itself, or does to transformers 5.23."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


@contextmanager
def as_any_module(model: nn.Module) -> Generator[None]:
    """Hide attributes that PEFT reads as those of a Hugging Face model: its config, and Lightning's mesh."""
    own = {} if isinstance(model, PreTrainedModel) else model.__dict__
    hidden = {name: own.pop(name) for name in ("config", "_device_mesh") if name in own}
    try:
        yield
    finally:
        own.update(hidden)


@contextmanager
def _marked(model: nn.Module) -> Generator[None]:
    """Say of a model with quantized layers what PEFT asks it, to give them adapters of their own kind."""
    marks = {mark for layer in model.modules() if (mark := mark_of(layer)) is not None}
    new = [mark for mark in marks if not hasattr(model, mark)]
    for mark in new:
        setattr(model, mark, True)
    try:
        yield
    finally:
        for mark in new:
            delattr(model, mark)


@contextmanager
def _stand_ins(layers: Iterable[nn.Module]) -> Generator[bool]:
    """Let layers on the meta device look real, by one number each, so that their adapters become so.

    The number is none: an adapter that is computed from weights shows it, and cannot be made before them.
    """
    held = [
        (part, name, parameter)
        for layer in layers
        for part in layer.modules()
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for part, name, meta in held:
        number = torch.full((), math.nan, dtype=meta.dtype, device="cpu")
        setattr(part, name, nn.Parameter(number.expand(meta.shape), requires_grad=False))
    try:
        with torch.device("cpu") if held else torch.device(torch.get_default_device()):
            yield bool(held)
    finally:
        for part, name, meta in held:
            meta.requires_grad = getattr(part, name).requires_grad
            setattr(part, name, meta)


def _keep_initial_values(adapted: dict[str, nn.Module], config: PeftConfig) -> None:
    """Have adapters come back to these values when the model is materialized, and not to random ones.

    `to_empty` and then `reset_parameters` of each module is how strategies do it; PEFT has no such method of
    its own in a layer, and `nn.Linear`'s would fill the half of LoRA that must begin as zero.
    """
    for name, layer in adapted.items():
        for path, part in layer.named_modules(prefix=name):
            own = {
                key: tensor.detach().clone()
                for key, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
                if not tensor.is_meta
            }
            if any(bool(tensor.isnan().any()) for tensor in own.values() if tensor.is_floating_point()):
                value = getattr(config.peft_type, "value", "").lower()
                allowed = f"a method that needs no weights to begin with: those of {path} are not there yet"
                raise ConfigError(key="method", value=value, allowed=allowed)
            if own:
                reset: Any = functools.partial(_reset, part, own)
                part.reset_parameters = reset


@torch.no_grad()
def _reset(part: nn.Module, values: dict[str, Tensor]) -> None:
    tensors = dict([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])
    for key, value in values.items():
        _copy(tensors[key], value)
    part.__dict__.pop("reset_parameters", None)


def _copy(tensor: Tensor, value: Tensor) -> None:
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(value)


def _refuse_state_outside(tuner: nn.Module, config: PeftConfig) -> None:
    """Refuse a method that keeps tensors beside the model, which no optimizer and no checkpoint finds."""
    tensors = [*tuner.named_parameters(), *tuner.named_buffers()]
    outside = [name for name, _ in tensors if not name.startswith("model.")]
    if outside:
        value = getattr(config.peft_type, "value", "").lower()
        allowed = f"a method that is in the layers alone: this one keeps {outside[0]} beside the model"
        raise ConfigError(key="method", value=value, allowed=allowed)


def _replace_everywhere(model: nn.Module) -> None:
    """Let a layer that a model has under two names have its adapter under both, and in every mode."""
    around = wrapped(model).values()
    insides = [
        (layer, getattr(layer, "base_layer", getattr(layer, "original_module", None))) for layer in around
    ]
    new = {id(inside): layer for layer, inside in insides if isinstance(inside, nn.Module)}
    for parent in list(model.modules()):
        if isinstance(parent, nn.TransformerEncoderLayer) and of(parent):
            # PyTorch's fused inference path reads the base layers' weights and calls no layer.
            parent.activation_relu_or_gelu = 0
        if isinstance(parent, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            continue
        for name, child in list(parent.__dict__["_modules"].items()):  # with the second names
            if id(child) in new:
                setattr(parent, name, new[id(child)])


def _prompt(model: nn.Module, config: PeftConfig) -> dict[str, nn.Module]:
    """Wrap the one Hugging Face model in a module, which is how PEFT puts tokens in front of its inputs."""
    found = [name for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
    outermost = [n for n in found if not any(not o or n.startswith(f"{o}.") for o in found if o != n)]
    method = getattr(config.peft_type, "value", "").lower()
    if len(outermost) != 1 or not outermost[0]:
        allowed = "a method for any layers, lora say: this one needs exactly one Hugging Face model as a part"
        raise ConfigError(key="method", value=method, allowed=f"{allowed}, and found {len(outermost)}")
    if config.task_type is None:
        allowed = "a task, CAUSAL_LM say: PEFT forms the inputs by it"
        remedy = "callbacks.peft_adapter.options={task_type: CAUSAL_LM, num_virtual_tokens: 8}"
        raise ConfigError(key="options.task_type", value=None, allowed=allowed, remedies=[remedy])
    for parameter in model.parameters():
        parameter.requires_grad = False
    part: Any = model.get_submodule(outermost[0])
    try:
        with without_noise():
            wrapped = get_peft_model(part, config, adapter_name=ADAPTER)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(key="method", value=method, allowed=sentence(error)) from error
    parent, _, name = outermost[0].rpartition(".")
    setattr(model.get_submodule(parent), name, wrapped)
    return {outermost[0]: wrapped}
