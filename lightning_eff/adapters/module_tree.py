"""Find modules of a model by name, by kind and by the weights that they share.

What is kept in few bits: linear layers that compute nothing else, or all frozen matrices.

A head that is tied to an embedding is one parameter under two names. What an adapter adds to the head belongs
to the head alone, so no shared weight can hold it: a merged layer, or a copy that is trained, needs a weight
of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from lightning_eff.core.errors import ConfigError, suggest_name

NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Layers that on some devices reject weights of another dtype than their input's; they have few weights."""


def outermost(model: nn.Module, matches: Callable[[str, nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the modules of a model, itself included, that match and are inside no other match, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # parents come before their children
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not is_inside and matches(name, module):
            found[name] = module
    return found


def check_module_names(key: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check that each name in the setting `key` is a known module's name, or the end of one.

    Raises:
        ConfigError: A name matches no module.
    """
    modules = list(known)
    for name in names:
        if any(f".{module}".endswith(f".{name}") for module in modules):
            continue
        ends = {module.rpartition(".")[2] for module in modules}
        options = modules if "." in name else {end for end in ends if not end.isdigit()} or modules
        allowed = f"a module's name, or the end of one; {suggest_name(name, options)}"
        raise ConfigError(key=key, value=name, allowed=allowed)


def is_in_module(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module or parameter is, or is inside, a module with one of these (ends of) names.

    Example:
        >>> is_in_module("blocks.0.head.weight", ["head"]), is_in_module("blocks.0.overhead", ["head"])
        (True, False)
    """
    return any(f".{module}." in f".{name}." for module in modules)


def plain_name(name: str) -> str:
    """Return the name that a module or tensor has without adapters around its layer.

    Example:
        >>> plain_name("blocks.0.linear.base_layer.weight"), plain_name("head.original_module")
        ('blocks.0.linear.weight', 'head')
    """
    return f"{name}.".replace(".base_layer.", ".").replace(".original_module.", ".").removesuffix(".")


def tied_parameters(model: nn.Module, part: nn.Module) -> dict[str, str]:
    """Return a part's parameters that the model also has outside of it: name in the part, name in the model.

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
    """Replace the parameters that a part shares with the rest of a model by copies."""
    for name in tied_parameters(model, part):
        parent, _, key = name.rpartition(".")
        parameter = part.get_parameter(name)
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        setattr(part.get_submodule(parent), key, copy)


def modules_without(model: nn.Module, skip_modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are neither named (by ends of names) nor inside of one that is, by name.

    Raises:
        ConfigError: A name matches no module.
    """
    modules = {plain_name(name) for name, _ in model.named_modules() if name}
    check_module_names("precision.skip_modules", skip_modules, modules)
    for name, module in model.named_modules():
        if not is_in_module(plain_name(name), skip_modules):
            yield name, module


def linear_layers(model: nn.Module, skip_modules: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that can be quantized, by name.

    Not subclasses of `nn.Linear`, which may compute something else, nor layers with a weight that another
    module has too, nor the heads that Hugging Face models name as their output embeddings.
    """
    num_modules = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    heads = [getattr(module, "get_output_embeddings", lambda: None)() for module in model.modules()]
    return {
        name: module
        for name, module in modules_without(model, skip_modules)
        if type(module) is nn.Linear
        and not any(module is head for head in heads)
        and all(num_modules[id(p)] == 1 for p in module.parameters(recurse=False))
    }


def matrices(model: nn.Module, skip_modules: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the frozen matrices, and the biases of their layers, by name."""
    for name, module in modules_without(model, skip_modules):
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, NORMS) or all(parameter.ndim < 2 for parameter in own.values()):
            continue
        for key, parameter in own.items():
            if parameter.is_floating_point() and not parameter.requires_grad:
                yield f"{name}.{key}".strip("."), parameter
