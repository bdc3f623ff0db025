"""The layers that get an adapter: resolve a config's targets in a model, and check them.

PEFT ignores a name that matches no layer as long as another one does; here each name must match.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_eff.adapters.methods import ALL_LINEAR, NOT_LINEAR, name_of_method, peft_rejects
from lightning_eff.adapters.module_tree import check_module_names, tied_parameters
from lightning_eff.core.errors import ConfigError


def resolve_targets(model: nn.Module, config: PeftConfig) -> dict[str, nn.Module]:
    """Replace a config's targets, in place, by names in a model, and return the layers by name.

    Raises:
        ConfigError: A name matches nothing, or a layer cannot have an adapter.
    """
    fields: Any = config
    modules = {name: module for name, module in model.named_modules() if name}
    check_module_names("modules_to_save", _names(config, "modules_to_save"), modules)
    if fields.target_modules == ALL_LINEAR:
        fields.target_modules = _all_linear(model, config)
    check_module_names("target_modules", _names(config, "target_modules"), modules)
    check_module_names("options.exclude_modules", _names(config, "exclude_modules"), modules)
    _reject_tied_copies(model, config, modules)
    try:
        layers = {
            name: module for name, module in modules.items() if check_target_module_exists(config, name)
        }
    except re.error as error:
        raise peft_rejects(error, "target_modules", fields.target_modules) from error
    for name, layer in layers.items():
        if any(isinstance(parameter, UninitializedParameter) for parameter in layer.parameters()):
            allowed = f"layers with a known size: {name} is lazy; run one batch through it in configure_model"
            raise ConfigError(key="target_modules", value=name, allowed=allowed)
    return layers


def exact_targets(names: Collection[str], model: nn.Module) -> str | set[str]:
    """Return targets that match these layers only: PEFT also matches a name with the ends of other names.

    Example:
        >>> stem = nn.ModuleDict({"proj": nn.Conv1d(1, 1, 1)})
        >>> model = nn.ModuleDict({"proj": nn.Linear(1, 1), "stem": stem})
        >>> exact_targets(["proj"], model), exact_targets(["stem.proj"], model)
        ('(?:proj)', {'stem.proj'})
    """
    others = [name for name, _ in model.named_modules() if name not in names]
    if any(other.endswith(f".{name}") for other in others for name in names):
        return f"(?:{'|'.join(map(re.escape, sorted(names)))})"
    return set(names)


def _names(config: PeftConfig, key: str) -> Collection[str]:
    """Return the names in a config's field, which may also hold a regular expression."""
    value = getattr(config, key, None)
    return () if value is None or isinstance(value, str) else value


def _all_linear(model: nn.Module, config: PeftConfig) -> str | set[str]:
    """Return all linear layers, without heads of Hugging Face models and layers that are never called."""
    method = name_of_method(config)
    heads = {part.get_output_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)}
    names = {
        name
        for name, layer in model.named_modules()
        if name
        and isinstance(layer, (nn.Linear, Conv1D))
        # nn.MultiheadAttention reads the weight of its out_proj, a subclass, and never calls the layer
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
        and layer not in heads
    }
    if method in NOT_LINEAR or not names:
        reason = (
            f"{method} is not for linear layers" if names else f"{type(model).__name__} has no linear layer"
        )
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=f"names of layers: {reason}")
    return exact_targets(names, model)


def _reject_tied_copies(model: nn.Module, config: PeftConfig, modules: Mapping[str, nn.Module]) -> None:
    """Reject `modules_to_save` with a tied weight: only the copy would be trained."""
    if getattr(config, "ensure_weight_tying", False) and isinstance(model, PreTrainedModel):
        return  # PEFT ties the copies itself
    saved = _names(config, "modules_to_save")
    for name, module in modules.items():
        if not any(f".{name}".endswith(f".{end}") for end in saved):
            continue
        for key, tied_to in tied_parameters(model, module).items():
            allowed = f"untied modules: {name}.{key} is tied to {tied_to}, and only a copy would be trained"
            remedies = [f"{name} in target_modules: an adapter leaves the tied weight unchanged"]
            remedies += ["model.tie_word_embeddings=false, or two weights in a model of your own"]
            raise ConfigError(key="modules_to_save", value=name, allowed=allowed, remedies=remedies)
