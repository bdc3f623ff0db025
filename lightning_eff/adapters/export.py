"""A model's adapters in PEFT's own format, or merged into its weights: files that need nothing of ours.

PEFT writes its own format itself. Our adapters are around layers of any module; here they are taken off, PEFT
puts its own around the same layers of the same base, gets the values and saves them. Names are relative to
the Hugging Face model where the module has one and nothing beside it, so that `PeftModel.from_pretrained`
takes that model, and to the module else.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import ModulesToSaveWrapper
from safetensors.torch import save_model
from torch import nn
from transformers import PreTrainedModel

from lightning_eff.adapters import inject as adapters
from lightning_eff.adapters import quantized, tied
from lightning_eff.adapters.base_fingerprint import plain_name, split
from lightning_eff.adapters.methods import exactly
from lightning_eff.adapters.options import sentence
from lightning_eff.core.errors import ConfigError

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)


def part_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the Hugging Face model that a module is made of, and its name with a dot; else itself."""
    found = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    outermost = [n for n in found if not any(not o or n.startswith(f"{o}.") for o in found if o != n)]
    if len(outermost) != 1 or not outermost[0]:
        return "", model
    prefix = f"{outermost[0]}."
    alone = all(key.startswith(prefix) for key in model.state_dict())
    return (prefix, found[outermost[0]]) if alone else ("", model)


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write a model's adapters as PEFT does; they are PEFT's own afterwards.

    Args:
        model: With adapters.
        folder: Gets `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ConfigError: Tokens are trained of an embedding that shares its weight.
    """
    wrapped = next((part for part in model.modules() if isinstance(part, PeftModel)), None)
    if wrapped is None:
        _refuse_tied_tokens(model)
        wrapped = _as_pefts(model)
    with adapters.without_noise():
        wrapped.save_pretrained(str(folder))


def _refuse_tied_tokens(model: nn.Module) -> None:
    """Refuse trained tokens of an embedding that is the head too: PEFT would change them in both."""
    for name, layer in adapters.wrapped(model).items():
        of_tokens = any(isinstance(part, TrainableTokensLayer) for part in layer.modules())
        if of_tokens and tied.shared(model, layer):
            plain = name.removeprefix(part_of(model)[0])
            allowed = f"a model merged: {plain} shares its weight, and PEFT trains tokens of both or none"
            raise ConfigError(key="--merge", value=False, allowed=allowed, remedies=["--merge"])


def _as_pefts(model: nn.Module) -> PeftModel:
    config = adapters.config_of(model)
    if config is None:
        text = "a model without adapters"
        raise TypeError(text)
    prefix, part = part_of(model)
    _, rest = split(model)
    layers = [name.removeprefix(prefix) for name in adapters.of(model)]
    config = _relative(config, prefix)
    _take_off(model, merge=False)
    if isinstance(getattr(config, "target_modules", None), str):
        config.target_modules = exactly(layers, part)  # pyright: ignore[reportAttributeAccessIssue]
    begins = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if _draws(f.name)}
    for name in begins:
        setattr(config, name, True)  # the values come from ours; some ways to begin change the base
    with adapters.as_any_module(part), adapters.without_noise():
        made: Any = get_peft_model(part, config, adapter_name=adapters.ADAPTER)
    values = {f"base_model.model.{name.removeprefix(prefix)}": value for name, value in rest.items()}
    unexpected = made.load_state_dict(values, strict=False).unexpected_keys
    if unexpected:
        text = f"PEFT puts adapters around other layers than ours: it has no {unexpected[0]}"
        raise RuntimeError(text)
    for name, value in begins.items():
        setattr(made.peft_config[adapters.ADAPTER], name, value)
    return made


def _draws(field: str) -> bool:
    return field in ("init_lora_weights", "init_weights")


def _relative(config: PeftConfig, prefix: str) -> PeftConfig:
    """Return a config that means the same layers, seen from inside a part."""
    config = dataclasses.replace(config)
    fields: Any = config
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        names = getattr(fields, key, None)
        if isinstance(names, (list, set, tuple)):
            setattr(fields, key, sorted(str(name).removeprefix(prefix) for name in names))
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(fields, key, None)
        if isinstance(pattern, Mapping):
            whole = {str(name).removeprefix(prefix): value for name, value in pattern.items()}
            setattr(fields, key, None if config.peft_type == "ADALORA" else whole)  # unused ranks are zero
    return config


@torch.no_grad()
def _take_off(model: nn.Module, *, merge: bool) -> None:
    """Put a model's own layers back in place of adapted ones, merged with their adapters or as they were."""
    if merge:
        for layer in adapters.wrapped(model).values():
            tied.untie(model, layer)
    new = {layer: _own_layer(layer, merge=merge) for layer in adapters.wrapped(model).values()}
    for parent in list(model.modules()):
        for name, child in list(parent.__dict__["_modules"].items()):  # with the second names
            if child in new and parent not in new:
                setattr(parent, name, new[child])
    model.__dict__.pop("peft_config", None)


def _own_layer(layer: Any, *, merge: bool) -> nn.Module:
    if isinstance(layer, ModulesToSaveWrapper):
        whole: Any = layer
        return whole.modules_to_save[adapters.ADAPTER] if merge else whole.original_module
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=merge, safe_merge=True, adapter_names=None)
    if merge:
        layer.merge(safe_merge=True)
    return layer.get_base_layer()


def merge(model: nn.Module) -> list[str]:
    """Merge adapters into the layers that they are around, which are the model's own again.

    An adapted layer that shares its weight with another one gets a weight of its own.

    Returns:
        The names of weights that were one before, and are several now.

    Raises:
        ConfigError: The method cannot be merged, or the base is quantized.
    """
    config = adapters.config_of(model)
    method = str(getattr(getattr(config, "peft_type", ""), "value", "")).lower()
    if any(quantized.is_quantized(part) for part in model.modules()):
        allowed = "an adapter of a base in full precision: in few bits its own digits would be lost"
        remedies = [
            "without --merge, and then PEFT on the base as it was before:",
            "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), DIR).merge_and_unload()",
        ]
        raise ConfigError(key="--merge", value=method, allowed=allowed, remedies=remedies)
    if any(isinstance(part, PeftModel) for part in model.modules()):
        allowed = f"an adapter that is in layers: {method} adds tokens, which no weight can stand for"
        raise ConfigError(key="--merge", value=method, allowed=allowed, remedies=["without --merge"])
    before = {plain_name(name): value for name, value in tied.names_of(model).items()}
    try:
        _take_off(model, merge=True)
    except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
        allowed = f"a method that PEFT can merge; {sentence(error)}"
        remedies = ["without --merge"]
        raise ConfigError(key="--merge", value=method, allowed=allowed, remedies=remedies) from error
    return tied.no_longer(before, tied.names_of(model))


def save_whole(model: nn.Module, folder: Path) -> None:
    """Write a model without adapters: a Hugging Face folder where it is made of one, else one file.

    Args:
        model: Weights that are one are written once; its configuration is changed where it says otherwise.
        folder: Gets `model.safetensors`, and for a Hugging Face model its configuration and tokenizer.
    """
    _, part = part_of(model)
    if not isinstance(part, PreTrainedModel):
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    _say_untied(part)
    part.save_pretrained(str(folder))
    for name in TOKENIZER_FILES:
        source = _beside(str(part.name_or_path or ""), name)
        if source is not None and not (folder / name).exists():
            shutil.copyfile(source, folder / name)


def _say_untied(part: PreTrainedModel) -> None:
    """Have a model's configuration say so if weights are several that it says are one.

    There is one word for all that a model ties, so the others become several too.
    """
    own: Any = part
    pairs = own.get_expanded_tied_weights_keys(all_submodels=True)
    if all(part.get_parameter(one) is part.get_parameter(other) for one, other in pairs.items()):
        return
    for name in pairs:
        tied.untie(part, part.get_submodule(name.rpartition(".")[0]))
    for each in [each for each in part.modules() if isinstance(each, PreTrainedModel)]:
        inner: Any = each
        for config in (inner.config, inner.config.get_text_config()):
            config.tie_word_embeddings = False
        inner.all_tied_weights_keys = {}


def _beside(name_or_path: str, file: str) -> Path | None:
    """Return a file of a model's folder, or of the hub's cache on this machine; nothing is fetched."""
    if not name_or_path:
        return None
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path / file if (path / file).is_file() else None
    found = try_to_load_from_cache(name_or_path, file) if name_or_path.count("/") <= 1 else None
    return Path(found) if isinstance(found, str) else None
