"""What of a model can be kept in few bits once it is frozen: which layers, which matrices, and what never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from lightning_eff.adapters.quantized import is_quantized
from lightning_eff.core.errors import ConfigError, suggest_name

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
"""Layers that refuse weights of another format than their input's on some devices; they have few."""


def parts(model: nn.Module, skip: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are not to be skipped, by name.

    Args:
        model: Where to look, before or after it got adapters.
        skip: Names, or the ends of them, of modules that stay as they are, with all that is in them.

    Raises:
        ConfigError: One of `skip` is no module's name.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        >>> [name for name, _ in parts(model, ["1"])]
        ['', '0']
    """
    named = {name.replace(".base_layer", ""): name for name, _ in model.named_modules() if name}
    for word in skip:
        if not any(f".{name}".endswith(f".{word}") for name in named):
            known = named if "." in word else {name.rpartition(".")[2] for name in named}
            allowed = f"a module's name, or the end of it; {suggest_name(word, known)}"
            raise ConfigError(key="skip", value=word, allowed=allowed)
    for name, part in model.named_modules():
        plain = f".{name.replace('.base_layer', '')}."
        if not any(f".{word}." in plain for word in skip):
            yield name, part


def linear_layers(model: nn.Module, skip: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that can be quantized, by name.

    Subclasses of `nn.Linear` are not among them, nor heads, nor layers that share a weight.
    """
    kept = heads(model) | shared(model)
    return {
        name: part
        for name, part in parts(model, skip)
        if type(part) is nn.Linear and id(part) not in kept  # a subclass has a forward pass of its own
    }


def matrices(model: nn.Module, skip: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the matrices that are not trained, and the biases beside them, by name.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).requires_grad_(False)
        >>> [name for name, _ in matrices(model, [])]
        ['0.weight', '0.bias']
    """
    for name, part in parts(model, skip):
        own = dict(part.named_parameters(recurse=False))
        if isinstance(part, NORMS) or all(parameter.ndim < 2 for parameter in own.values()):
            continue
        for key, parameter in own.items():
            if parameter.is_floating_point() and not parameter.requires_grad:
                yield f"{name}.{key}".strip("."), parameter


def heads(model: nn.Module) -> set[int]:
    """Return the output layers that Hugging Face models in a module name as theirs, by identity."""
    found = [getattr(part, "get_output_embeddings", lambda: None)() for part in model.modules()]
    return {id(head) for head in found if head is not None}


def shared(model: nn.Module) -> set[int]:
    """Return modules with a parameter that another module has too, by identity.

    Example:
        >>> model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
        >>> model["head"].weight = model["embedding"].weight
        >>> len(shared(model))
        2
    """
    holders: dict[int, set[int]] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(part))
    return {holder for of_one in holders.values() if len(of_one) > 1 for holder in of_one}


def refuse_trained(model: nn.Module) -> None:
    """Refuse quantized layers with a parameter that is to be trained: the library casts it as it computes.

    Raises:
        ConfigError: There is one.
    """
    for name, part in model.named_modules():
        if is_quantized(part) and any(p.requires_grad for p in part.parameters(recurse=False)):
            plain = name.replace(".base_layer", "")
            allowed = f"{plain} among them, or not trained: a layer of few bits has to stay as it is"
            remedies = ("callbacks.peft_adapter.options.bias=none", f"precision.skip=[{plain}]")
            raise ConfigError(key="skip", value=None, allowed=allowed, remedies=remedies)
