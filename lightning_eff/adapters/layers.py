"""Find layers of a model by name, by shared weights, or by quantization.

Adapters, `precision/quantized_base` and Float8 use this module. The module imports neither PEFT, whose import
takes seconds, nor bitsandbytes, which is optional. Layers of bitsandbytes are recognized by class name and
package.

A head that is tied to an embedding uses the embedding's weight. An adapter of the head changes only the head,
so a merged or copied head needs a separate weight, which `untie` creates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.core.errors import ConfigError, suggest_name

BITSANDBYTES_FLAGS = {"Linear4bit": "is_loaded_in_4bit", "Linear8bitLt": "is_loaded_in_8bit"}
"""Layer classes of bitsandbytes, and the attribute that transformers sets on a model with such layers."""


def outermost(model: nn.Module, matches: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the modules that match and are not inside another match, by name; the model may match too."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # parents come before their children
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not is_inside and matches(module):
            found[name] = module
    return found


def check_module_names(key: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check that each name in the setting `key` is a known module's name, or the end of such a name.

    Raises:
        ConfigError: A name matches no module.
    """
    modules = list(known)
    for name in names:
        if any(f".{module}".endswith(f".{name}") for module in modules):
            continue
        ends = {module.rpartition(".")[2] for module in modules}
        # Suggest full names for a name with dots, otherwise the last parts of names.
        options = modules if "." in name else {end for end in ends if not end.isdigit()} or modules
        allowed = f"a module's name, or the end of one; {suggest_name(name, options)}"
        raise ConfigError(key=key, value=name, allowed=allowed)


def is_in_module(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module or parameter is in a module with one of these names or name endings.

    Example:
        >>> is_in_module("blocks.0.head.weight", ["head"]), is_in_module("blocks.0.overhead", ["head"])
        (True, False)
    """
    return any(f".{module}." in f".{name}." for module in modules)


def plain_name(name: str) -> str:
    """Return the name that a module or tensor has in the model without adapters.

    Example:
        >>> plain_name("blocks.0.linear.base_layer.weight"), plain_name("head.original_module")
        ('blocks.0.linear.weight', 'head')
    """
    return f"{name}.".replace(".base_layer.", ".").replace(".original_module.", ".").removesuffix(".")


def tied_parameters(model: nn.Module, part: nn.Module) -> dict[str, str]:
    """Map the names of a part's tied parameters to the names of the same parameters in the rest of the model.

    Example:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
        >>> model["head"].weight = model["embedding"].weight
        >>> tied_parameters(model, model["head"])
        {'weight': 'embedding.weight'}
    """
    inside = set(part.modules())
    outside = {
        id(parameter): f"{name}.{key}".strip(".")
        for name, module in model.named_modules()
        if module not in inside
        for key, parameter in module.named_parameters(recurse=False)
    }
    return {name: outside[id(p)] for name, p in part.named_parameters() if id(p) in outside}


@torch.no_grad()
def untie(model: nn.Module, part: nn.Module) -> None:
    """Give a part of a model its own copies of the parameters that are tied to the rest of the model."""
    for name in tied_parameters(model, part):
        parent, _, key = name.rpartition(".")
        parameter = part.get_parameter(name)
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        setattr(part.get_submodule(parent), key, copy)


def bitsandbytes_flag(layer: nn.Module) -> str | None:
    """Return the model attribute that PEFT requires for a quantized layer; None for other layers."""
    for base in type(layer).__mro__:
        if base.__module__.partition(".")[0] == "bitsandbytes" and base.__name__ in BITSANDBYTES_FLAGS:
            return BITSANDBYTES_FLAGS[base.__name__]
    return None


def is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer is a quantized layer of bitsandbytes."""
    return bitsandbytes_flag(layer) is not None


def quantized_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefix, with a dot, of each quantized layer's keys in the model's state dict."""
    return tuple(f"{name}." for name, layer in model.named_modules() if is_quantized(layer))


def num_weights(parameter: Tensor) -> int:
    """Return the number of weights in a parameter; each byte of a 4-bit parameter holds two weights."""
    state: Any = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else parameter.numel()
