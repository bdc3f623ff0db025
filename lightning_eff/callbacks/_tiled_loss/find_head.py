"""Find the output projection of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_eff.core import model_surgery
from lightning_eff.core.errors import ConfigError


def find_head(model: nn.Module, head: str | None) -> tuple[str, nn.Module] | None:
    """Return the output projection of a model and its name; None where it has none.

    That of Hugging Face's models is what they name as such. Else it is the linear layer outside of the
    repeated blocks that shares its weight with an embedding, or has the most outputs, more than inputs.

    Args:
        model: The model.
        head: Its name; None to find it.

    Raises:
        ConfigError: No module has that name, or several may be meant.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if head is not None:
        if head not in named:
            linear = [name for name, module in named.items() if isinstance(module, nn.Linear)]
            allowed = (
                f"the name of the output projection, for example {linear[-1] if linear else 'model.head'}"
            )
            raise ConfigError(key="head", value=head, allowed=allowed)
        return head, _trained_copy(named[head])
    getters = [getattr(module, "get_output_embeddings", None) for module in (model, *named.values())]
    found = {id(module): module for get in getters if callable(get) and (module := get()) is not None}
    if not found:
        adapters = [name for name, module in named.items() if hasattr(module, model_surgery.ADAPTER)]
        inner = tuple(f"{name}." for name in (*model_surgery.repeated_blocks(model), *adapters))
        outside = {
            id(module): module
            for name, module in named.items()
            if isinstance(_plain(module), nn.Linear) and not name.startswith(inner)
        }
        # Not `weight`: a parametrized layer computes it, and spectral_norm counts each computation.
        embeddings = [module for module in named.values() if isinstance(module, nn.Embedding)]
        weights = {p for module in embeddings for p in module.parameters(recurse=False)}
        tied = {
            key: each
            for key, each in outside.items()
            if not weights.isdisjoint(_plain(each).parameters(recurse=False))
        }
        wide = {
            key: each for key, each in outside.items() if _plain(each).out_features > _plain(each).in_features
        }
        most = max((_plain(each).out_features for each in wide.values()), default=0)
        found = tied or {key: each for key, each in wide.items() if _plain(each).out_features == most}
    if not found:
        return None
    names = [name for name, module in named.items() if id(module) in found]
    if len(found) > 1:
        raise ConfigError(key="head", value=None, allowed=f"one of {', '.join(names)}")
    return names[0], _trained_copy(named[names[0]])


def _plain(module: nn.Module) -> Any:
    """Return the layer that a module computes, without its adapter."""
    trained = _trained_copy(module)
    return getattr(trained, "base_layer", trained)


def _trained_copy(module: Any) -> nn.Module:
    """Return the copy that PEFT trains of a module in `modules_to_save`; else the module."""
    copies: Any = getattr(module, "modules_to_save", None)
    return next(iter(copies.values())) if isinstance(copies, nn.ModuleDict) and len(copies) == 1 else module
