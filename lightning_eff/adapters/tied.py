"""Weights that several modules of a model share, and how one of them gets a weight of its own.

A head that is tied to an embedding is one parameter under two names. What an adapter adds to the head is the
head's alone, so there is no shared weight that stands for it: merged, or copied to be trained, it is another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def shared(model: nn.Module, part: nn.Module) -> dict[str, str]:
    """Return a part's parameters that the model also has outside of it: name in the part, name in the model.

    Example:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
        >>> model["head"].weight = model["embedding"].weight
        >>> shared(model, model["head"])
        {'weight': 'embedding.weight'}
    """
    inside = {id(each) for each in part.modules()}
    outside = {
        id(parameter): f"{name}.{key}".strip(".")
        for name, module in model.named_modules()
        if id(module) not in inside
        for key, parameter in module.named_parameters(recurse=False)
    }
    return {name: outside[id(p)] for name, p in part.named_parameters() if id(p) in outside}


@torch.no_grad()
def untie(model: nn.Module, part: nn.Module) -> None:
    """Give a part copies of the parameters that it shares with the rest of a model."""
    for name in shared(model, part):
        parent, _, key = name.rpartition(".")
        parameter = part.get_parameter(name)
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        setattr(part.get_submodule(parent), key, copy)


def names_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters under all names that they have."""
    return dict(model.named_parameters(remove_duplicate=False))


def no_longer(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Return the names of parameters that were one and are several now.

    Example:
        >>> a, b = torch.ones(1), torch.ones(1)
        >>> no_longer({"x": a, "y": a, "z": b}, {"x": a, "y": b, "z": b})
        ['x', 'y']
    """
    groups: dict[int, list[str]] = {}
    for name, value in before.items():
        if name in after:
            groups.setdefault(id(value), []).append(name)
    parted = [names for names in groups.values() if len({id(after[name]) for name in names}) > 1]
    return [name for names in parted for name in names]
