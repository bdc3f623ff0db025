"""Write adapters in PEFT's format, or a model with merged adapters, for use without lightning_eff.

The command `export` calls this module. PEFT collects the tensors, writes the config and merges the adapters.
This module restores the names that the tensors have in the model without adapters. If a LightningModule's
only state is a Hugging Face model, names are relative to that model, so that `PeftModel.from_pretrained`
accepts the files. Otherwise names are relative to the LightningModule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig, get_peft_model_state_dict
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file, save_model
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from lightning_eff.adapters.inject import (
    ADAPTER_NAME,
    PEFT_ERRORS,
    TUNER,
    adapted_layers,
    exact_targets,
    name_of_method,
    peft_config_of,
    peft_rejects,
    plain_module,
    replace_modules,
    wrapped_layers,
)
from lightning_eff.adapters.layers import is_quantized, outermost, plain_name, untie
from lightning_eff.core.errors import ConfigError

IN_PEFT_MODEL = "base_model.model."
"""Prefix of a model's names in PEFT's wrapper, and therefore in PEFT's files."""


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` as PEFT does."""
    prefix, part = _exported_part(model)
    config = _exported_config(model, prefix, part)
    # PEFT's function expects a PeftModel, but reads only its names and config.
    wrapper: Any = nn.Module()
    wrapper.base_model, wrapper.peft_config = model.__dict__[TUNER], {ADAPTER_NAME: config}
    state = get_peft_model_state_dict(wrapper, save_embedding_layers=False)
    tensors = {
        name.replace(f"{IN_PEFT_MODEL}{prefix}", IN_PEFT_MODEL, 1): value.detach().clone().contiguous()
        for name, value in state.items()
    }
    config.inference_mode = True
    kind = {"base_model_class": type(part).__name__, "parent_library": type(part).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=kind if config.task_type is None else None)
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


def merge_adapters(model: nn.Module) -> list[str]:
    """Merge adapters into their layers, which become plain layers again; return the names of untied weights.

    An adapted layer with a tied weight gets a separate weight, so this weight is no longer tied.

    Raises:
        ConfigError: The method or a layer cannot be merged, or the base is quantized.
    """
    method = name_of_method(peft_config_of(model))
    if any(is_quantized(module) for module in model.modules()):
        allowed = "a base that is not quantized: its few bits would round the adapter away"
        remedies = [
            "without --merge, then merge with PEFT into the original base:",
            "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), DIR).merge_and_unload()",
        ]
        raise ConfigError(key="--merge", value=method, allowed=allowed, remedies=remedies)
    for name, layer in adapted_layers(model).items():
        base: Any = layer
        base = base.get_base_layer()
        # A merge writes into `weight`, but weight norm computes this tensor again in each forward pass.
        is_computed = hasattr(base, "weight") and "weight" not in dict(base.named_parameters(recurse=False))
        if is_computed or getattr(base, "max_norm", None) is not None:
            allowed = f"layers whose weight is their own: {name} computes or rescales its weight when called"
            raise ConfigError(key="--merge", value=method, allowed=allowed, remedies=["without --merge"])
    # Collect all names, to find weights that were tied before the merge and are not tied afterwards.
    before = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    wrappers = wrapped_layers(model)
    # A merge adds to a weight in place, so a tied weight would also change under its other name.
    for layer in wrappers.values():
        untie(model, layer)
    tuner: Any = model.__dict__[TUNER]
    try:
        with plain_module(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`")  # untied above
            tuner.merge_and_unload(safe_merge=True)
    except (*PEFT_ERRORS, AttributeError) as error:  # for example a Conv3d whose kernel starts with 1 x 1
        raise peft_rejects(error, "--merge", method) from error
    # PEFT replaces a layer under its first name only, so replace the layer under its other names too.
    replace_modules(model, {layer: model.get_submodule(name) for name, layer in wrappers.items()})
    del model.__dict__[TUNER]
    tied: dict[int, list[str]] = {}
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        if name in after:
            tied.setdefault(id(parameter), []).append(name)
    return [n for names in tied.values() for n in names if len({id(after[m]) for m in names}) > 1]


def save_full_model(model: nn.Module, folder: Path) -> None:
    """Write a model without adapters as safetensors, and store each tied weight once.

    For a Hugging Face model, also write the tokenizer and the config, which is corrected for untied weights.
    """
    _, part = _exported_part(model)
    if not isinstance(part, PreTrainedModel):
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    own: Any = part
    pairs = own.get_expanded_tied_weights_keys(all_submodels=True)
    if any(part.get_parameter(target) is not part.get_parameter(source) for target, source in pairs.items()):
        # transformers 5.23 has one flag for all tied weights, so also untie the weights that are still tied.
        for name in pairs:
            untie(part, part.get_submodule(name.rpartition(".")[0]))
        models: list[Any] = [module for module in part.modules() if isinstance(module, PreTrainedModel)]
        for config in (c for m in models for c in (m.config, m.config.get_text_config())):
            config.tie_word_embeddings = False
        for submodel in models:
            submodel.all_tied_weights_keys = {}
    part.save_pretrained(str(folder))
    if part.name_or_path:  # a folder, or a model's name in the local cache
        with contextlib.suppress(OSError, ValueError):  # the model has no tokenizer
            tokenizer = AutoTokenizer.from_pretrained(part.name_or_path, local_files_only=True)
            tokenizer.save_pretrained(str(folder))


def _exported_part(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the name prefix and the model to export: a Hugging Face model that has all state, or `model`."""
    found = outermost(model, lambda module: isinstance(module, PreTrainedModel))
    name = next(iter(found), "")
    has_all = name and len(found) == 1 and all(key.startswith(f"{name}.") for key in model.state_dict())
    return (f"{name}.", found[name]) if has_all else ("", model)


def _exported_config(model: nn.Module, prefix: str, part: nn.Module) -> PeftConfig:
    """Return the config of a model's adapters, with layer names relative to the exported part."""
    present: Any = peft_config_of(model)
    config: Any = dataclasses.replace(present)
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        names = getattr(config, key, None)
        if isinstance(names, (list, set, tuple)):
            setattr(config, key, sorted(str(name).removeprefix(prefix) for name in names))
    # A regular expression for names in the full model may not fit the exported part, so list the layers.
    if isinstance(getattr(config, "target_modules", None), str):
        layers = [name.removeprefix(prefix) for name in adapted_layers(model)]
        config.target_modules = exact_targets(layers, part)
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, key, None)
        if isinstance(pattern, Mapping):
            relative = {str(name).removeprefix(prefix): value for name, value in pattern.items()}
            setattr(config, key, relative)
    config.base_model_name_or_path = part.__dict__.get("name_or_path") or None
    return config
