"""Read which modules are local layers, also those inside containers, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_eff.core.model_surgery import MODULE_HOOKS, is_foreign
from lightning_eff.core.shards import full_shape
from lightning_eff.kernels._conv.layers import LocalLayer, read_layer

FORWARD = "forward"
COMPUTES = "_conv_forward"
"""Private method of torch's convolutions (2.13), which some replace to pad in another way."""


def is_container(module: nn.Module) -> bool:
    """Return whether a module passes its input through its children, one after another, and no more.

    Example:
        >>> is_container(nn.Sequential(nn.ReLU())), is_container(nn.ModuleList())
        (True, False)
    """
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children by name, also one that is there twice."""
    return dict(vars(module)["_modules"])


def read_module(module: nn.Module, replaced_by: type = NoneType) -> tuple[LocalLayer, ...] | str:
    """Return a module as local layers, or why it is none; containers are read through.

    Args:
        module: A layer, or a container of layers.
        replaced_by: Class of a forward that may be on a container in place of its own.
    """
    if any(is_foreign(hook) for kind in MODULE_HOOKS for hook in vars(module)[kind].values()):
        return f"{type(module).__name__} has hooks, which would not run"
    if not isinstance(vars(module).get(FORWARD), (replaced_by, NoneType)) or COMPUTES in vars(module):
        return f"the forward of {type(module).__name__} is replaced already"
    if is_container(module):
        layers: list[LocalLayer] = []
        for part in children_of(module).values():
            found = read_module(part, replaced_by)
            if isinstance(found, str):
                return found
            layers += found
        return tuple(layers)
    weights = module.parameters(recurse=False)
    if any(isinstance(weight, DTensor) or weight.shape != full_shape(weight) for weight in weights):
        return f"the weights of {type(module).__name__} are sharded"
    layer = read_layer(module)
    return layer if isinstance(layer, str) else (layer,)


def overwrites_input(layers: Sequence[LocalLayer]) -> bool:
    """Return whether a layer in place has the memory that the first one gets: no layer before it made new."""
    first = next((layer for layer in layers if layer.is_in_place or layer.is_new), None)
    return first is not None and first.is_in_place


def has_windows(module: nn.Module) -> bool:
    """Return whether a local layer inside reads more than one pixel, or resamples.

    Example:
        >>> has_windows(nn.Sequential(nn.Conv2d(1, 1, 3))), has_windows(nn.Sequential(nn.Linear(1, 1)))
        (True, False)
    """
    layers = [read_layer(part) for part in module.modules()]
    return any(isinstance(layer, LocalLayer) and bool(layer.windows) for layer in layers)
