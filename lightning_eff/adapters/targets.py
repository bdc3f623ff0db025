"""The layers that get an adapter: resolve a config's targets in a model, and check them.

PEFT ignores a name that matches no layer as long as another one does; here each name must match. The words
`all-linear` and `all-conv` may stand beside names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_eff.adapters.convolutions import ADAPTED, check_convolution, why_not_adapted
from lightning_eff.adapters.methods import ALL_CONV, ALL_LINEAR, NOT_LINEAR, name_of_method, peft_rejects
from lightning_eff.adapters.module_tree import check_module_names, tied_parameters
from lightning_eff.core.errors import ConfigError, ConflictWarning
from lightning_eff.core.reach import CONVOLUTIONS, TRANSPOSED


def resolve_targets(model: nn.Module, config: PeftConfig) -> dict[str, nn.Module]:
    """Replace a config's targets, in place, by names in a model, and return the layers by name.

    Raises:
        ConfigError: A name matches nothing, or a layer cannot have an adapter.
    """
    fields: Any = config
    modules = {name: module for name, module in model.named_modules() if name}
    check_module_names("modules_to_save", _names(config, "modules_to_save"), modules)
    _replace_words(model, config, modules)
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
        check_convolution(name, layer, config)
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


def _replace_words(model: nn.Module, config: PeftConfig, modules: Mapping[str, nn.Module]) -> None:
    """Replace `all-linear` and `all-conv` among a config's targets, in place, by names of layers."""
    fields: Any = config
    given = fields.target_modules
    asked: Collection[str] = [given] if isinstance(given, str) else given or ()
    choices = {ALL_LINEAR: _all_linear, ALL_CONV: _all_conv}
    if not any(word in asked for word in choices):
        return
    ends = [name for name in asked if name not in choices]
    check_module_names("target_modules", ends, modules)
    names = {name for name in modules if any(f".{name}".endswith(f".{end}") for end in ends)}
    for word, choose in choices.items():
        names |= choose(model, config) if word in asked else set()
    fields.target_modules = exact_targets(names, model)


def _all_conv(model: nn.Module, config: PeftConfig) -> set[str]:
    """Return all convolutions that the method can adapt; a warning names the others.

    Warns:
        ConflictWarning: Some cannot be adapted, and are not excluded by name.
    """
    method, excluded = name_of_method(config), _names(config, "exclude_modules")
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, CONVOLUTIONS)}
    reasons = {name: why_not_adapted(layer, method, config) for name, layer in found.items()}
    names = {name for name, reason in reasons.items() if not reason}
    left_out = [name for name in found if name not in names]
    left_out = [n for n in left_out if not any(f".{n}".endswith(f".{end}") for end in excluded)]
    about = ", ".join(f"{name}: {reasons[name]}" for name in left_out[:4])
    if not names:
        is_transposed = any(isinstance(layer, TRANSPOSED) for layer in model.modules())
        reason = f"{type(model).__name__} has no convolution{' but transposed ones' * is_transposed}"
        reason += f" that {method} can adapt ({about})" if left_out else ""
        raise ConfigError(key="target_modules", value=ALL_CONV, allowed=f"names of layers: {reason}")
    if left_out:
        count = f"{len(left_out)} of {len(found)} convolutions, which {method} cannot adapt"
        text = f"PeftAdapter: all-conv leaves out {count} ({about}); exclude_modules in options silences this"
        warnings.warn(text, ConflictWarning, stacklevel=2)
    return names


def _all_linear(model: nn.Module, config: PeftConfig) -> set[str]:
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
        has_others = method in ADAPTED and any(isinstance(m, CONVOLUTIONS) for m in model.modules())
        remedies = [f"callbacks.peft_adapter.target_modules={ALL_CONV}"] * has_others
        allowed = f"names of layers: {reason}"
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=allowed, remedies=remedies)
    return names


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
