"""What of a model can be kept in few bits: linear layers, or all frozen matrices; and what never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from lightning_eff.adapters.module_tree import check_module_names, is_in_module, plain_name

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Layers that on some devices reject weights of another dtype than their input's; they have few weights."""


def modules_without(model: nn.Module, skip_modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are not skipped, by name.

    Args:
        model: With or without adapters.
        skip_modules: Names, or ends of names, of modules that are skipped with all modules in them.

    Raises:
        ConfigError: A name matches no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        >>> [name for name, _ in modules_without(model, ["1"])]
        ['', '0']
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
    """Yield the frozen matrices, and the biases of their layers, by name.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).requires_grad_(False)
        >>> [name for name, _ in matrices(model, [])]
        ['0.weight', '0.bias']
    """
    for name, module in modules_without(model, skip_modules):
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, NORMS) or all(parameter.ndim < 2 for parameter in own.values()):
            continue
        for key, parameter in own.items():
            if parameter.is_floating_point() and not parameter.requires_grad:
                yield f"{name}.{key}".strip("."), parameter
