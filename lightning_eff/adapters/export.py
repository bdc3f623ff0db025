"""Write a model's adapters in PEFT's own format, or merged into its weights, for use without lightning_eff.

PEFT writes its format itself. Our adapters are around layers of any module; here they are removed, PEFT puts
its own around the same layers of the same base, gets the values and saves them. Names are relative to the
Hugging Face model if the module has one and no other state, so that `PeftModel.from_pretrained` accepts that
model; else they are relative to the module.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft import PeftModel, get_peft_model
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import ModulesToSaveWrapper
from safetensors.torch import save_model
from torch import nn
from transformers import PreTrainedModel

from lightning_eff.adapters.base_fingerprint import split_state
from lightning_eff.adapters.inject import (
    ADAPTER_NAME,
    adapted_layers,
    hidden_attributes,
    ignore_peft_warnings,
    peft_config_of,
    replace_modules,
    wrapped_layers,
)
from lightning_eff.adapters.methods import name_of_method, upstream_message
from lightning_eff.adapters.module_tree import outermost, plain_name, tied_parameters, untie
from lightning_eff.adapters.quantized import is_quantized
from lightning_eff.adapters.targets import exact_targets
from lightning_eff.core.errors import ConfigError

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write a model's adapters as PEFT does; the model has PEFT's own adapters afterwards.

    Args:
        model: With adapters.
        folder: Gets `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ConfigError: Trained tokens belong to an embedding with a tied weight.
    """
    peft_model = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if peft_model is None:
        for name, layer in wrapped_layers(model).items():
            has_tokens = any(isinstance(module, TrainableTokensLayer) for module in layer.modules())
            if has_tokens and tied_parameters(model, layer):
                allowed = f"true here: {name.removeprefix(_exported_part(model)[0])} has a tied weight, "
                allowed += "and PEFT trains tokens in both layers or none"
                raise ConfigError(key="--merge", value=False, allowed=allowed, remedies=["--merge"])
        peft_model = _with_peft_adapters(model)
    with ignore_peft_warnings():
        peft_model.save_pretrained(str(folder))


def merge_adapters(model: nn.Module) -> list[str]:
    """Merge adapters into their layers, which become the model's own again.

    An adapted layer with a tied weight gets a weight of its own.

    Returns:
        The names of weights that were one before, and are several now.

    Raises:
        ConfigError: The method cannot be merged, or the base is quantized.
    """
    method = name_of_method(peft_config_of(model))
    if any(is_quantized(module) for module in model.modules()):
        allowed = "a base that is not quantized: its few bits would round the adapter away"
        remedies = [
            "without --merge, then merge with PEFT into the original base:",
            "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), DIR).merge_and_unload()",
        ]
        raise ConfigError(key="--merge", value=method, allowed=allowed, remedies=remedies)
    if any(isinstance(module, PeftModel) for module in model.modules()):
        allowed = f"adapters of layers: {method} adds virtual tokens, which belong to no weight"
        raise ConfigError(key="--merge", value=method, allowed=allowed, remedies=["without --merge"])
    before = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    try:
        _remove_adapters(model, merge=True)
    except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
        allowed = f"a method that PEFT can merge; {upstream_message(error)}"
        raise ConfigError(
            key="--merge", value=method, allowed=allowed, remedies=["without --merge"]
        ) from error
    tied: dict[int, list[str]] = {}
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        if name in after:
            tied.setdefault(id(parameter), []).append(name)
    return [n for names in tied.values() for n in names if len({id(after[m]) for m in names}) > 1]


def save_full_model(model: nn.Module, folder: Path) -> None:
    """Write a model without adapters: a folder that transformers loads if it is made of one of its models.

    Args:
        model: Tied weights are written once; a config that ties weights that differ is changed.
        folder: Gets `model.safetensors`, and for a Hugging Face model its config and tokenizer.
    """
    _, part = _exported_part(model)
    if not isinstance(part, PreTrainedModel):
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    own: Any = part
    pairs = own.get_expanded_tied_weights_keys(all_submodels=True)
    if any(part.get_parameter(target) is not part.get_parameter(source) for target, source in pairs.items()):
        # transformers 5.23 has one flag for all tied weights: those that are still tied become copies
        for name in pairs:
            untie(part, part.get_submodule(name.rpartition(".")[0]))
        models: list[Any] = [module for module in part.modules() if isinstance(module, PreTrainedModel)]
        for config in (c for m in models for c in (m.config, m.config.get_text_config())):
            config.tie_word_embeddings = False
        for submodel in models:
            submodel.all_tied_weights_keys = {}
    part.save_pretrained(str(folder))
    origin = str(part.name_or_path or "")  # a folder, or the name of a model in the local cache
    is_folder = bool(origin) and Path(origin).expanduser().is_dir()
    is_cached = bool(origin) and not is_folder and origin.count("/") <= 1
    for name in TOKENIZER_FILES:
        source: Any = Path(origin).expanduser() / name if is_folder else None
        source = try_to_load_from_cache(origin, name) if is_cached else source
        if isinstance(source, (str, Path)) and Path(source).is_file() and not (folder / name).exists():
            shutil.copyfile(source, folder / name)


def _exported_part(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the Hugging Face model that holds all of a module's state, with its prefix; else the module."""
    found = outermost(model, lambda _, module: isinstance(module, PreTrainedModel))
    name = next(iter(found), "")
    has_all = name and len(found) == 1 and all(key.startswith(f"{name}.") for key in model.state_dict())
    return (f"{name}.", found[name]) if has_all else ("", model)


def _with_peft_adapters(model: nn.Module) -> PeftModel:
    """Replace a model's adapters by PEFT's own with the same values."""
    present = peft_config_of(model)
    if present is None:
        text = "a model without adapters"
        raise TypeError(text)
    prefix, part = _exported_part(model)
    _, rest = split_state(model)
    layers = [name.removeprefix(prefix) for name in adapted_layers(model)]
    # The same layers, named from inside the part.
    config: Any = dataclasses.replace(present)
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        targets = getattr(config, key, None)
        if isinstance(targets, (list, set, tuple)):
            setattr(config, key, sorted(str(name).removeprefix(prefix) for name in targets))
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, key, None)
        if isinstance(pattern, Mapping):
            relative = {str(name).removeprefix(prefix): value for name, value in pattern.items()}
            # AdaLoRA's unused ranks are zeros in tensors of full rank, which its pattern would cut off
            setattr(config, key, None if config.peft_type == "ADALORA" else relative)
    _remove_adapters(model, merge=False)
    if isinstance(getattr(config, "target_modules", None), str):
        config.target_modules = exact_targets(layers, part)
    # Some initializations change the base, and the values come from ours: any plain one will do.
    names = {field.name for field in dataclasses.fields(config)} & {"init_lora_weights", "init_weights"}
    initial = {name: getattr(config, name) for name in names}
    for name in initial:
        setattr(config, name, True)
    with hidden_attributes(part), ignore_peft_warnings():
        peft_model: Any = get_peft_model(part, config, adapter_name=ADAPTER_NAME)
    values = {f"base_model.model.{name.removeprefix(prefix)}": value for name, value in rest.items()}
    unexpected = peft_model.load_state_dict(values, strict=False).unexpected_keys
    if unexpected:
        text = f"PEFT puts adapters around other layers than ours: it has no {unexpected[0]}"
        raise RuntimeError(text)
    for name, value in initial.items():
        setattr(peft_model.peft_config[ADAPTER_NAME], name, value)
    return peft_model


@torch.no_grad()
def _remove_adapters(model: nn.Module, *, merge: bool) -> None:
    """Put a model's own layers back in place of adapted ones, merged with their adapters or unchanged."""
    wrappers: list[Any] = list(wrapped_layers(model).values())
    new: dict[nn.Module, nn.Module] = {}
    for layer in wrappers if merge else ():
        untie(model, layer)
    for layer in wrappers:
        if isinstance(layer, ModulesToSaveWrapper):
            new[layer] = layer.modules_to_save[ADAPTER_NAME] if merge else layer.original_module
        elif hasattr(layer, "unload_and_optionally_merge_module"):
            new[layer] = layer.unload_and_optionally_merge_module(
                merge=merge, safe_merge=True, adapter_names=None
            )
        else:
            if merge:
                layer.merge(safe_merge=True)
            new[layer] = layer.get_base_layer()
    replace_modules(model, new)
    model.__dict__.pop("peft_config", None)
