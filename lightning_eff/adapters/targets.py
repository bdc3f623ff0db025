"""The layers that get an adapter: resolve a config's targets in a model, and check them.

PEFT ignores a name that matches no layer as long as another one does; here each name must match. The word
`all-linear` may be one of several names.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_eff.adapters.methods import ALL_LINEAR, NOT_LINEAR, name_of_method, peft_rejects
from lightning_eff.adapters.module_tree import check_module_names, outermost, tied_parameters
from lightning_eff.core.errors import ConfigError, Remedy, list_remedy

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_NAMES = 12
"""Names of layers in a remedy."""
ADAPTED_CONVOLUTIONS: dict[str, tuple[type[nn.Module], ...]] = {
    "lora": CONVOLUTIONS,
    "hira": CONVOLUTIONS,
    "loha": (nn.Conv1d, nn.Conv2d),
    "lokr": (nn.Conv1d, nn.Conv2d),
    "ia3": (nn.Conv2d, nn.Conv3d),
    "hra": (nn.Conv2d,),
    "oft": (nn.Conv2d,),
}
"""By method. Other methods adapt none; `ln_tuning` trains any layer in full."""


def resolve_targets(model: nn.Module, config: PeftConfig) -> dict[str, nn.Module]:
    """Replace a config's targets, in place, by names in a model, and return the layers by name.

    Raises:
        ConfigError: A name matches nothing, or a layer cannot have an adapter.
    """
    fields: Any = config
    modules = {name: module for name, module in model.named_modules() if name}
    check_module_names("modules_to_save", _names(config, "modules_to_save"), modules)
    _replace_all_linear(model, config, modules)
    check_module_names("target_modules", _names(config, "target_modules"), modules)
    check_module_names("options.exclude_modules", _names(config, "exclude_modules"), modules)
    try:
        layers = {
            name: module for name, module in modules.items() if check_target_module_exists(config, name)
        }
    except re.error as error:
        raise peft_rejects(error, "target_modules", fields.target_modules) from error
    _reject_tied_copies(model, config, layers)
    _check_indices(config, modules)
    _check_patterns(config, layers)
    for name, layer in layers.items():
        if any(isinstance(parameter, UninitializedParameter) for parameter in layer.parameters()):
            allowed = f"layers with a known size: {name} is lazy; run one batch through it in configure_model"
            raise ConfigError(key="target_modules", value=name, allowed=allowed)
        _check_convolution(name, layer, config)
    _reject_frozen_copies(model, layers)
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


def _replace_all_linear(model: nn.Module, config: PeftConfig, modules: Mapping[str, nn.Module]) -> None:
    """Replace `all-linear` among a config's targets, in place, by names of layers."""
    fields: Any = config
    given = fields.target_modules
    asked: Collection[str] = [given] if isinstance(given, str) else given or ()
    if ALL_LINEAR not in asked:
        return
    ends = [name for name in asked if name != ALL_LINEAR]
    check_module_names("target_modules", ends, modules)
    names = {name for name in modules if any(f".{name}".endswith(f".{end}") for end in ends)}
    fields.target_modules = exact_targets(names | _all_linear(model, config), model)


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
        allowed, remedies = f"names of layers: {reason}", list[Remedy]()
        convolutions = [name for name, layer in model.named_modules() if isinstance(layer, CONVOLUTIONS)]
        if method in ADAPTED_CONVOLUTIONS and 0 < len(ends := ends_of_names(convolutions)) <= MAX_NAMES:
            remedies = [list_remedy("callbacks.peft_adapter", "PeftAdapter", "target_modules", ends)]
        raise ConfigError(key="target_modules", value=ALL_LINEAR, allowed=allowed, remedies=remedies)
    return names


def _check_convolution(name: str, layer: nn.Module, config: Any) -> None:
    """Reject a targeted convolution that PEFT 0.21 adapts wrongly, in silence or with an error about shapes.

    LoRA's own convolutions are neither dilated nor padded as the layer's (`padding_mode`), so that the
    adapter sees other pixels; OFT turns the wrong axes of a kernel, and does not start from the unchanged
    model.
    """
    method = name_of_method(config)
    if not isinstance(layer, CONVOLUTIONS) or method == "ln_tuning":
        return
    is_point = math.prod(layer.kernel_size) == 1
    is_dilated = not is_point and any(step > 1 for step in layer.dilation)
    groups, rank = layer.groups, getattr(config, "r", 0)
    wrong = {
        "": not isinstance(layer, ADAPTED_CONVOLUTIONS.get(method, ())),
        f" with padding_mode={layer.padding_mode!r}": method != "ia3" and layer.padding_mode != "zeros",
        f" with dilation={layer.dilation}": method in ("lora", "hra", "oft") and is_dilated,
        f" with padding={layer.padding!r}, no number": method == "hra" and isinstance(layer.padding, str),
        f" with kernel_size={layer.kernel_size}, other than 1": method == "oft" and not is_point,
        f" with groups={groups}": method in ("hira", "hra", "oft") and groups > 1,
        f" with groups={groups}, which do not divide r={rank}": method == "lora" and rank % groups > 0,
    }
    reasons = [reason for reason, is_wrong in wrong.items() if is_wrong]
    if reasons:
        kind = type(layer).__name__
        allowed = f"layers that PEFT's {method} adapts correctly: {name} is a {kind}{reasons[0]}"
        remedies = [f"{name} in modules_to_save, to train it in full", "another method"]
        raise ConfigError(key="target_modules", value=name, allowed=allowed, remedies=remedies)


def _reject_tied_copies(model: nn.Module, config: Any, layers: Mapping[str, nn.Module]) -> None:
    """Reject modules to save and tokens to train of a tied weight: only a copy would be trained."""
    is_hugging_face = isinstance(model, PreTrainedModel)  # then PEFT ties trained tokens itself
    trained: dict[str, Collection[str]] = {}
    if not (is_hugging_face and getattr(config, "ensure_weight_tying", False)):
        trained["modules_to_save"] = _names(config, "modules_to_save")
    tokens = getattr(config, "trainable_token_indices", None)
    if tokens and not is_hugging_face:
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        names = [name for name, module in model.named_modules() if module is embedding] or ["embed_tokens"]
        trained["options.trainable_token_indices"] = tokens if isinstance(tokens, dict) else names
    if name_of_method(config) == "trainable_tokens" and not is_hugging_face:
        trained["target_modules"] = layers.keys()
    for name, module in model.named_modules():
        for setting, ends in trained.items():
            if not any(f".{name}".endswith(f".{end}") for end in ends):
                continue
            for key, tied_to in tied_parameters(model, module).items():
                allowed = (
                    f"untied modules: {name}.{key} is tied to {tied_to}, and only a copy would be trained"
                )
                adapted = f"{name} in target_modules: an adapter leaves the tied weight unchanged"
                untied = Remedy(
                    "model.tie_word_embeddings=false, or two weights in a model of your own",
                    "tie_word_embeddings=False of the model, or two weights in a model of your own",
                )
                remedies = [untied] if setting == "target_modules" else [adapted, untied]
                raise ConfigError(key=setting, value=name, allowed=allowed, remedies=remedies)


def _check_indices(config: Any, modules: Mapping[str, nn.Module]) -> None:
    """Check that each of `layers_to_transform` selects a layer; PEFT ignores the others."""
    indices = getattr(config, "layers_to_transform", None)
    targets = config.target_modules
    # PEFT adapts a layer that the targets name in full, or by a pattern, whatever its index is
    by_ends = [] if isinstance(targets, str) else [name for name in modules if name not in (targets or ())]

    def is_index(index: int) -> bool:
        one = dataclasses.replace(config, layers_to_transform=index)
        return any(check_target_module_exists(one, name) for name in by_ends)

    for index in indices if isinstance(indices, list) else [] if indices is None else [indices]:
        if not is_index(index):
            numbers = {int(part) for name in by_ends for part in name.split(".") if part.isdecimal()}
            found = ", ".join(str(number) for number in sorted(numbers) if is_index(number))
            allowed = f"indices of blocks, with ends of names in target_modules; found {found or 'none'}"
            raise ConfigError(key="options.layers_to_transform", value=index, allowed=allowed)


def _check_patterns(config: Any, layers: Iterable[str]) -> None:
    """Check that each pattern of an option for some layers matches a layer; PEFT ignores the others."""
    if getattr(config, "target_parameters", None):
        return  # whose names the patterns may match
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option, None) or ():
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in layers):  # as PEFT matches it
                allowed = "names, ends of names or patterns of targeted layers"
                raise ConfigError(key=f"options.{option}", value=pattern, allowed=allowed)


def _reject_frozen_copies(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Reject layers of a target or momentum network: a frozen copy, equal to a network that is trained."""
    targets = set(layers.values())
    networks = {name: part for name, part in model.named_modules() if not targets.isdisjoint(part.modules())}
    values = {name: dict(part.named_parameters()) for name, part in networks.items()}
    trained = {name for name in networks if any(p.requires_grad for p in values[name].values())}
    copies: dict[str, str] = {}
    for name in outermost(model, lambda name, _: name in networks and name not in trained):
        for other in sorted(trained):
            if values[other].keys() == values[name].keys() and all(
                not p.is_meta and p.dtype == values[other][key].dtype and torch.equal(p, values[other][key])
                for key, p in values[name].items()
            ):
                copies[name] = other
    if copies:
        found = ", ".join(f"{name} is a frozen copy of {other}" for name, other in copies.items())
        pattern = "|".join(f"{name}.*" for name in copies)
        network = next(iter(copies.values()))
        remedies = [
            Remedy(
                f"callbacks.peft_adapter.options.exclude_modules={pattern}",
                f"PeftAdapter(options={{'exclude_modules': {pattern!r}}})",
            ),
            f"adapt({network}) before it is copied, if adapters are averaged too",
            "requires_grad_(True) on the copy, to train its adapters",
        ]
        allowed = f"layers that are trained; {found}"
        raise ConfigError(key="target_modules", value=[*copies], allowed=allowed, remedies=remedies)


def ends_of_names(names: Iterable[str]) -> list[str]:
    """Return the shortest ends of module names that say what a module is: from the last word on.

    Example:
        >>> ends_of_names(["layer1.0.conv1", "layer1.1.conv1", "layer1.0.down.0"])
        ['conv1', 'down.0']
    """
    ends: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        start = len(parts) - 1
        while start > 0 and parts[start].isdigit():
            start -= 1
        ends[".".join(parts[start:])] = None
    return list(ends)
